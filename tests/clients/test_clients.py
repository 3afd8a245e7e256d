"""Real clients train with two lines added as they train without, to the bit, in less memory.

`make test` runs the quick ones; `make clients` runs all, in an environment that has their packages.
"""

import ast
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from catalog import CLIENTS, Client, KnownFailure
from compare import PROGRAMS, Outcome, compare, problems, unexpected
from run_program import READY, prepare
from write_page import PAGE

RUN_ALL = os.environ.get("EBBTIDE_CLIENTS") == "all"
CHOSEN = [client for client in CLIENTS if RUN_ALL or client.quick]
MIB = 2**20


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("client", CHOSEN, ids=lambda client: Path(client.program).stem)
def test_client_trains_as_without_in_less_memory(client: Client, tmp_path: Path) -> None:
    unknown = unexpected(client, compare(client, tmp_path).problems)
    assert not unknown, "\n".join(unknown)
    if client.known is not None:
        pytest.xfail(client.known.reason)


def test_each_program_is_a_client() -> None:
    programs = sorted(path.name for path in PROGRAMS.glob("*.py"))
    assert programs == sorted(client.program for client in CLIENTS)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: Path(client.program).stem)
def test_two_lines_make_the_difference(client: Client) -> None:
    source = (PROGRAMS / client.program).read_text()
    plain = prepare(source, offloaded=False).body
    offloaded = prepare(source, offloaded=True).body
    assert len(offloaded) == len(plain) + 2


@pytest.mark.parametrize(
    "source",
    [
        "x = 1\n",
        "import ebbtide\nhandle = ebbtide.offload(model)\nprint(handle.stats)\n",
        "import ebbtide\npolicy = ebbtide.ActivationPolicy()\nhandle = ebbtide.offload(model)\n",
        "from ebbtide import offload\nhandle = offload(model)\n",
        "import ebbtide\nfrom ebbtide.units import MIB\nhandle = ebbtide.offload(model)\n",
    ],
    ids=["none", "handle used", "third line", "from import", "other import"],
)
def test_a_program_with_other_lines_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="and nothing else"):
        prepare(source, offloaded=True)


def test_the_measurement_begins_where_the_model_is_offloaded() -> None:
    source = "import ebbtide\nmodel = 1\nhandle = ebbtide.offload(model)\nlosses = []\n"
    plain, offloaded = (
        [ast.unparse(statement) for statement in prepare(source, offloaded=each).body]
        for each in (False, True)
    )
    line = "handle = ebbtide.offload(model)"
    assert plain == ["model = 1", f"{READY}()", "losses = []"]
    assert offloaded == ["import ebbtide", "model = 1", line, f"{READY}()", "losses = []"]


OUTCOME = Outcome(
    losses=[(0.5).hex()],
    weights="a",
    idle_bytes=100 * MIB,
    peak_bytes=300 * MIB,
    printed=[],
    stats={},
    layers=[],
)
OFFLOADED = replace(OUTCOME, peak_bytes=200 * MIB, stats={"offloaded_bytes": 90 * MIB})


def test_a_client_that_trains_the_same_in_less_memory_has_no_problems() -> None:
    assert problems([OUTCOME], [OFFLOADED]) == []


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"losses": [(0.5000001).hex()]}, "the losses differ"),
        ({"weights": "b"}, "the weights after training differ"),
        ({"stats": {}}, "nothing was offloaded"),
        ({"peak_bytes": 295 * MIB}, "memory is not lower: 200 MiB .*, 195 MiB"),
    ],
)
def test_each_difference_is_a_problem(changed: dict[str, object], problem: str) -> None:
    found = problems([OUTCOME], [replace(OFFLOADED, **changed)])
    assert len(found) == 1
    assert re.match(problem, found[0])


def test_a_printed_reason_excuses_memory_and_not_numbers() -> None:
    silent = replace(OFFLOADED, stats={}, peak_bytes=OUTCOME.peak_bytes)
    assert len(problems([OUTCOME], [silent])) == 2
    assert (
        problems([OUTCOME], [replace(silent, printed=["nothing was offloaded: too small"])]) == []
    )
    wrong = replace(silent, printed=["nothing was offloaded: too small"], weights="b")
    assert problems([OUTCOME], [wrong]) == ["the weights after training differ"]


def test_every_process_counts() -> None:
    found = problems([OUTCOME] * 2, [OFFLOADED, replace(OFFLOADED, weights="b")])
    assert found == ["process 1: the weights after training differ"]


def test_a_known_failure_excuses_its_own_kind_and_must_be_there() -> None:
    client = Client("a client", "a.py", "note", known=KnownFailure("reason", match="memory"))
    assert unexpected(client, ["memory is not lower"]) == []
    found = ["memory is not lower", "the weights after training differ"]
    assert unexpected(client, found) == found[1:]
    assert unexpected(client, [])[0].startswith("a client trains now")
    assert unexpected(replace(client, known=None), found) == found


def test_the_page_has_a_row_for_each_client() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| [")]
    assert len(rows) == len(CLIENTS)
    for client, row in zip(CLIENTS, rows, strict=True):
        assert row.startswith(
            f"| [{client.title}](../../tests/clients/programs/{client.program}) |"
        )
        assert client.note in row
        assert ("Not yet" in row) == (client.known is not None), "run make clients-page again"
        assert client.known is None or client.known.reason in row
