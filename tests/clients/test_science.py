"""Models of weather and physics train with two lines added as without, beside their checkpoints."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from catalog import SCIENCE, Client
from compare import LOWER, PROGRAMS, Outcome, problems, run
from run_program import OWN_CHECKPOINTS, prepare
from science_page import GUIDES, write_between


def stem(client: Client) -> str:
    return Path(client.program).stem


Train = Callable[[str, bool], Outcome]


@pytest.fixture
def train(tmp_path: Path) -> Callable[[Client], Train]:
    """Return what runs a client, or skip where its packages are not installed."""

    def begin(client: Client) -> Train:
        for package in client.needs:
            if not _is_installed(package):
                pytest.skip(f"needs {package}, which `make clients-science` installs")

        def once(mode: str, own: bool) -> Outcome:
            (outcome,) = run(client.program, mode, 1, tmp_path, own_checkpoints=own)
            return outcome

        return once

    return begin


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a package that it is a part of
        return False


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("client", SCIENCE, ids=stem)
def test_a_model_trains_as_without_in_less_memory(
    client: Client, train: Callable[[Client], Train]
) -> None:
    once = train(client)
    plain, offloaded = once("plain", False), once("offloaded", False)
    assert problems([plain], [offloaded]) == []
    assert offloaded.printed == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "client", [client for client in SCIENCE if client.own_checkpoints], ids=stem
)
def test_checkpoints_of_its_own_leave_the_numbers_and_little_to_offload(
    client: Client, train: Callable[[Client], Train]
) -> None:
    once = train(client)
    plain, alone, both = once("plain", False), once("plain", True), once("offloaded", True)
    assert alone.losses == both.losses == plain.losses
    assert alone.weights == both.weights == plain.weights
    assert alone.above_idle_bytes < LOWER * plain.above_idle_bytes, "the setting does nothing"
    offloaded = once("offloaded", False)
    assert both.stats["saved_bytes"] < 0.5 * offloaded.stats["saved_bytes"]


@pytest.mark.parametrize("client", SCIENCE, ids=stem)
def test_two_lines_make_the_difference(client: Client) -> None:
    source = (PROGRAMS / client.program).read_text()
    plain = prepare(source, offloaded=False).body
    offloaded = prepare(source, offloaded=True).body
    assert len(offloaded) == len(plain) + 2
    assert (OWN_CHECKPOINTS in source) == (client.own_checkpoints is not None)


def test_each_program_of_science_is_a_client() -> None:
    programs = sorted(f"science/{path.name}" for path in (PROGRAMS / "science").glob("*.py"))
    assert programs == sorted(client.program for client in SCIENCE)


def test_checkpoints_are_turned_on_in_the_program_itself() -> None:
    source = "import ebbtide\nOWN_CHECKPOINTS = False\nhandle = ebbtide.offload(1)\n"
    names: dict[str, object] = {"_note_that_the_model_is_ready": lambda: None}
    exec(compile(prepare(source, offloaded=False, own_checkpoints=True), "", "exec"), names)
    assert names["OWN_CHECKPOINTS"] is True
    with pytest.raises(ValueError, match="no setting OWN_CHECKPOINTS"):
        prepare(source.replace("OWN", "OTHER"), offloaded=False, own_checkpoints=True)


def test_the_guide_has_a_row_and_a_section_for_each() -> None:
    guide = (GUIDES / "scientific.md").read_text()
    rows = [line for line in guide.splitlines() if line.startswith("| [")]
    assert len(rows) == len(SCIENCE)
    for client, row in zip(SCIENCE, rows, strict=True):
        link = f"[{client.title}](../../tests/clients/programs/{client.program})"
        assert row.startswith(f"| {link} |")
        if client.own_checkpoints is not None:
            setting = client.own_checkpoints.split("(")[-1 if "=" in client.own_checkpoints else 0]
            assert setting.split("=")[0].split(":")[0] in guide


def test_a_table_replaces_the_one_before(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- figures -->\nold\n<!-- end of figures -->\nb\n")
    for _ in range(2):
        write_between(page, "new")
    assert page.read_text() == ("a\n<!-- figures -->\n\nnew\n\n<!-- end of figures -->\nb\n")
