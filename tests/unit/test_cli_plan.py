"""`ebbtide plan`: its report, its files, and what it says when something is wrong."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import Result

import ebbtide
from commands import call
from ebbtide.planning import Decision, Hardware, PlannedStep
from ebbtide.tools.plan_tables import RULES

H100 = Hardware.named("h100")
GIB = 2**30


def run(*arguments: str) -> Result:
    return call("plan", *arguments)


class Tower(nn.Module):
    """Blocks that save 9 matrices of the batch's size between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tower(resolution: int = 4096, batch: int = 4) -> tuple[nn.Module, torch.Tensor]:
    return Tower(), torch.zeros(batch, resolution, 256)


# This file is the module of the function above.
TOWER = f"{Path(__file__).stem}:tower"


@pytest.fixture(scope="module")
def report() -> str:
    found = run(TOWER, "--budget", "130MiB")
    assert found.exit_code == 0, found.output
    return found.output


@pytest.mark.slow
def test_the_report_fits_80_columns(report: str) -> None:
    assert max(map(len, report.splitlines())) <= 80
    for text in (
        "3 x blocks",
        "NVIDIA H100 SXM",
        "The fastest step within a budget",
        "The plan within 130.0 MiB",
        "Beside one rule for all layers",
    ):
        assert text in report


@pytest.mark.slow
def test_steps_get_shorter_with_the_budget(report: str) -> None:
    table = report.split("The fastest step")[1].split("The plan within")[0]
    ratios = [float(each) for each in re.findall(r"  (\d+\.\d{3})  ", table)]
    assert len(ratios) >= 5
    assert ratios[0] == 1
    assert ratios == sorted(ratios)


@pytest.mark.slow
def test_the_budgets_of_the_report_hold(report: str) -> None:
    table = report.split("The fastest step")[1].split("The plan within")[0]
    rows = re.findall(r"([\d.]+) (MiB|GiB)  +([\d.]+) (MiB|GiB)", table)
    units = {"MiB": 2**20, "GiB": GIB}
    assert len(rows) >= 5
    for budget, unit, peak, peak_unit in rows:
        assert float(peak) * units[peak_unit] <= float(budget) * units[unit]


def test_json_has_all_figures_and_the_saved_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    found = run(TOWER, "--budget", "130MiB", "--json", "--save", str(path))
    assert found.exit_code == 0
    content = json.loads(found.stdout)
    plan = PlannedStep.load(path).plan
    assert content["plan"] == json.loads(path.read_text())["step"]["plan"]
    assert len(plan.layers) == len(content["layers"]) == 3
    assert plan.peak_bytes == content["prediction"]["peak_bytes"] <= 130 * 2**20
    assert content["sources"]["h2d_bytes_per_s"].startswith("published: ")
    slowest = min(content["budgets"], key=lambda row: row["budget_bytes"])
    assert slowest["budget_bytes"] >= content["smallest_budget_bytes"]
    assert tuple(content["rules"]) == RULES
    assert (
        content["rules"]["keep all"]["peak_bytes"] > content["rules"]["recompute all"]["peak_bytes"]
    )


class Heavy(nn.Module):
    """Six blocks whose weights, gradients and two states take 16 MiB each; they save little."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.GELU()) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def heavy(batch: int = 256) -> tuple[nn.Module, torch.Tensor]:
    return Heavy(), torch.ones(batch, 1024)


HEAVY = f"{Path(__file__).stem}:heavy"


@pytest.mark.slow
def test_weights_may_rest_on_the_host(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ebbtide")
    without = run(HEAVY, "--budget", "60MiB")
    assert without.exit_code == 78
    path = tmp_path / "plan.json"
    found = run(HEAVY, "--budget", "60MiB", "--weights", "--save", str(path))
    assert found.exit_code == 0, found.output
    assert max(map(len, found.output.split("\nPlan: ")[0].splitlines())) <= 80
    flat = " ".join(found.output.split())
    # With two blocks on the device, 32 of 60 MiB are taken; with three there would be 48.
    said = "64.0 MiB are weights, gradients and optimizer state of 4 of 6 modules"
    assert said in flat
    assert re.search(r"The optimizer's step on the host takes [\d.]+ ms more", flat)
    assert re.search(r"\n> +60\.0 MiB .* w\n", found.output)
    roomy = json.loads(run(HEAVY, "--budget", "1GiB", "--weights", "--json").stdout)
    by_budget = {row["budget_bytes"]: row for row in roomy["budgets"]}
    assert not by_budget[GIB]["weights_on_host"]
    assert by_budget[min(by_budget)]["weights_on_host"]

    digests = []
    for plan in (None, path):
        torch.manual_seed(0)
        model, batch = heavy()
        optimizer = torch.optim.Adam(model.parameters())
        handle = None if plan is None else ebbtide.offload(model, plan=plan)
        for _ in range(3):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        if handle is not None:
            planned = PlannedStep.load(path)
            wanted = {
                layer.name
                for layer, chosen in zip(planned.profile.layers, planned.plan.layers, strict=True)
                if chosen.weights_on_host
            }
            assert handle._engine.weights is not None
            groups = handle._engine.weights.groups
            assert {group.layer.name for group in groups} == wanted
            assert len(wanted) == 4
            assert "weights: WeightPolicy(num_layers=None" in caplog.text
            handle.detach()
        digests.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *digests))


@pytest.mark.slow
def test_a_plan_with_the_weights_of_one_module_in_two_places_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    run(HEAVY, "--budget", "25MiB", "--weights", "--save", str(path))
    step = PlannedStep.load(path)
    assert all(layer.weights_on_host for layer in step.plan.layers)
    first, second, *others = step.profile.layers
    twice = dataclasses.replace(
        step.profile, layers=(first, dataclasses.replace(second, name=first.name), *others)
    )
    first_plan, *other_plans = step.plan.layers
    mixed = dataclasses.replace(
        step.plan, layers=(dataclasses.replace(first_plan, weights_on_host=False), *other_plans)
    )
    step = dataclasses.replace(step, plan=mixed, profile=twice)
    model, batch = heavy()
    with pytest.raises(ebbtide.PolicyError):
        ebbtide.offload(model, plan=step)
    with ebbtide.offload(model, plan=step, weights=ebbtide.WeightPolicy(num_layers=5)):
        model(batch).sum().backward()


@pytest.mark.slow
def test_a_saved_plan_is_followed(tmp_path: Path) -> None:
    """What was planned without an accelerator decides in training, layer by layer."""
    path = tmp_path / "plan.json"
    assert run(TOWER, "--budget", "130MiB", "--save", str(path)).exit_code == 0
    model, batch = tower()
    with ebbtide.offload(model, plan=path) as handle:
        for _ in range(2):  # in the first step, layers are verified before they are recomputed
            model(batch).sum().backward()
        assert handle.plan is not None
        plan = handle.plan.plan
        assert handle.layers == tuple(layer.name for layer in handle.plan.profile.layers)
        recomputed = {each.layer.index for each in handle.inspect().recomputed}
        moved = handle.stats.offloaded_bytes
    modes = [layer.mode.value for layer in plan.layers]
    assert recomputed == {index for index, mode in enumerate(modes) if mode != "as is"}
    leaves = any(Decision.OFFLOAD in layer.decisions for layer in plan.layers)
    assert bool(moved) == (leaves or "recompute+offload" in modes)


@pytest.mark.slow
def test_a_budget_that_nothing_fits_into_is_answered_with_the_smallest() -> None:
    found = run(TOWER, "--budget", "20MiB", "--json")
    assert found.exit_code == 78
    study = json.loads(found.stdout)
    assert study["plan"] is None
    smallest_bytes = study["smallest_budget_bytes"]
    assert smallest_bytes == min(row["peak_bytes"] for row in study["budgets"] if row["fits"])


def test_a_model_that_fits_is_left_alone() -> None:
    found = run(TOWER, "--json")
    assert found.exit_code == 0
    layers = json.loads(found.stdout)["plan"]["layers"]
    assert {layer["mode"] for layer in layers} == {"as is"}
    assert {each for layer in layers for each in layer["decisions"]} == {"keep"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["warp"], "give one of fno1d, fno2d, fno3d, tfno, uno, gpt, llama, or module:function"),
        (["gpt", "--resolution", "4"], "gpt has no --resolution; it takes --seq"),
        (["llama", "--size", "9b"], "its sizes are 1b, 3b, 7b, 8b"),
        (["gpt", "--seq", "0"], "--seq must be 1 or more"),
        ([TOWER, "--budget", "24"], "has no unit; write 24GiB"),
        ([TOWER, "--budget", "200GiB"], "is more than NVIDIA H100 SXM has"),
        ([TOWER, "--budget", "0%"], "is 0 bytes"),
        ([TOWER, "--budget", "0GiB"], "is 0 bytes"),
        ([TOWER, "--budget", "plenty"], "cannot be read"),
        ([TOWER, "--hardware", "h101"], "there is no hardware named 'h101'; the names are"),
        ([TOWER, "--hardware", "absent.json"], "`ebbtide doctor --json > absent.json` writes"),
        ([TOWER, "--hardware", __file__], "this is not the JSON of an ebbtide-hardware"),
        ([TOWER, "--save", "/absent/plan.json"], "there is no directory /absent"),
        ([TOWER, "--plan-layers", "heads.*"], "no module is called 'heads.*'"),
        ([TOWER, "--optimizer-states", "-1"], "--optimizer-states must be a whole number"),
    ],
)
def test_what_is_wrong_is_said_with_exit_code_2(arguments: list[str], message: str) -> None:
    found = run(*arguments)
    assert found.exit_code == 2
    assert message in found.stderr
