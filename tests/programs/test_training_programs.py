"""Generated training programs: the bits of plain training, or its error (`make programs`)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ebbtide
import program_runs
from program_runs import InvalidProgramError, check_seed, check_valid, minimise, run_program
from training_programs import FAMILIES, Program, Statement, generate

MIXED = range(0, len(FAMILIES), 7)
"""Seeds of programs that mix families. `make programs` runs 2,000 of them."""
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_runs, "SEED_TIMEOUT_S", 60)
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_user_does_trains_as_without_ebbtide(family: str) -> None:
    program, difference, _ = check_seed(1, only=family, alone=True)
    assert difference is None, f"{program}\n\n{difference.kind}: {difference.text}"


@pytest.mark.parametrize("seed", MIXED)
def test_a_program_trains_as_without_ebbtide(seed: int) -> None:
    program, difference, _ = check_seed(seed)
    assert difference is None, f"{program}\n\n{difference.kind}: {difference.text}"


def test_every_family_occurs() -> None:
    for seed, family in enumerate(FAMILIES):
        assert family in generate(seed).families, family
        assert family in generate(1, only=family, alone=True).families, family


def test_the_families_that_are_documented_are_those_that_there_are() -> None:
    page = (HERE.parents[1] / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| .* \| (.*) \|$", page.partition("families that find it")[2], re.M)
    named = {family for row in rows for family in row.split("; ")}
    assert len(named) > 40
    assert named <= set(FAMILIES), named - set(FAMILIES)


def test_a_seed_is_the_same_program_in_every_process() -> None:
    script = "from training_programs import generate; print(*map(generate, range(60)))"
    texts = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONPATH": str(HERE), "PYTHONHASHSEED": str(n)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for n in range(2)
    }
    assert len(texts) == 1


def test_a_fault_is_found_and_minimised(monkeypatch: pytest.MonkeyPatch) -> None:
    offload = ebbtide.offload

    def change_a_weight(model: torch.nn.Module, **others: object) -> ebbtide.OffloadHandle:
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] += 1e-3
        return offload(model, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(ebbtide, "offload", change_a_weight)
    program, difference, _ = check_seed(4, only="retained graph", alone=True)
    assert difference is not None
    assert difference.kind == "numbers"
    small = minimise(program, "cpu", difference)
    texts = [s.text for s in small.statements if not s.text.startswith(("class ", "def "))]
    assert len(texts) <= 4, texts  # the device, a model, its offload, and a forward at most


def test_an_error_that_plain_training_should_not_raise_is_a_fault_of_the_generator() -> None:
    program = Program(0, (Statement("missing()"),), frozenset(), False, False, False)
    with pytest.raises(InvalidProgramError):
        check_valid(program, run_program(program, "cpu", offloaded=False))


@pytest.mark.slow
def test_most_programs_are_not_refused() -> None:
    refused = [seed for seed in range(1, 40, 4) if check_seed(seed)[2].refused]
    assert len(refused) <= 3
