"""`handle.explain()` names the reason first, in situations that were made on purpose."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide import Explanation, Inspection, StepStats
from ebbtide.observe.explain import Evidence, explain
from ebbtide.observe.inspection import InFlight, InspectedStorage
from ebbtide.observe.memory import MemorySample, Owner, StepMemory
from live_memory import LiveMemory

pytestmark = pytest.mark.usefixtures("frozen_imports")

MIB = 2**20
WIDTH = 64
ROWS = 32768  # 8 MiB for an activation
POLICY = ebbtide.ActivationPolicy(rebuild=False)


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sin()


@pytest.fixture(autouse=True)
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Counts storages: what a process returns to the system depends on earlier tests."""
    memory = LiveMemory()
    monkeypatch.setattr("ebbtide.observe.recording.memory_of", lambda _: memory)
    with memory:
        yield


def chain(length: int = 6, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(length)])


def batch(rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH)


def step(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    model(x).sum().backward()


def causes(explanation: Explanation) -> list[str]:
    text = str(explanation)
    assert all(len(line) <= 80 for line in text.splitlines()), text
    assert explanation.verdict
    for finding in explanation.findings:
        assert finding.sentence.endswith(".")
        assert finding.evidence
        assert finding.setting
    return [finding.cause for finding in explanation.findings]


# ---- nothing happened ---------------------------------------------------------------------------


def test_the_model_was_not_called() -> None:
    with ebbtide.offload(chain()) as handle:
        chain()(batch(8)).sum().backward()  # another model of the same class
        assert causes(handle.explain()) == ["model not called"]


def test_the_model_only_ran_without_gradients() -> None:
    model = chain()
    with ebbtide.offload(model) as handle:
        with torch.no_grad():
            model(batch(8))
        assert causes(handle.explain()) == ["model not called"]


def test_the_backward_is_to_come() -> None:
    model = chain()
    with ebbtide.offload(model) as handle:
        loss = model(batch()).sum()
        assert causes(handle.explain()) == ["step not over"]
        loss.backward()
        assert "step not over" not in causes(handle.explain())


# ---- the peak -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ebbtide offloaded nothing")
def test_tensors_are_smaller_than_min_bytes() -> None:
    model = chain(12)
    policy = ebbtide.ActivationPolicy(min_bytes="64MiB", rebuild=False)
    with ebbtide.offload(model, trace=True, activations=policy) as handle:
        step(model, batch())
        explanation = handle.explain()
        assert causes(explanation)[0] == "small tensors"
        assert "64.0 MiB" in explanation.findings[0].sentence
    with ebbtide.offload(model, activations=policy) as handle:
        step(model, batch())
        assert causes(handle.explain())[0] == "small tensors", "without a trace, too"


def test_layers_were_chosen_to_stay() -> None:
    model = chain(12)
    policy = ebbtide.ActivationPolicy(num_layers=2, rebuild=False)
    with ebbtide.offload(model, trace=True, activations=policy) as handle:
        step(model, batch())
        explanation = handle.explain()
    assert causes(explanation)[0] == "kept by choice"
    assert "layers 2 to 11" in explanation.findings[0].sentence
    assert "num_layers" in explanation.findings[0].setting


@pytest.mark.filterwarnings("ignore:a backward with create_graph")
def test_a_second_backward_needs_them() -> None:
    model = chain(8)
    with ebbtide.offload(model, trace=True, activations=POLICY) as handle:
        for _ in range(3):
            x = batch().requires_grad_()
            (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            gradient.square().sum().backward()
            del gradient, x
            model.zero_grad()
        assert causes(handle.explain())[0] == "double backward"


def test_the_program_holds_what_was_offloaded() -> None:
    model = chain(12)
    outputs: list[torch.Tensor] = []
    for block in model:
        block.register_forward_hook(lambda _, __, output: outputs.append(output.detach()))
    with ebbtide.offload(model, trace=True, activations=POLICY) as handle:
        step(model, batch())
        explanation = handle.explain()
    assert causes(explanation)[0] == "still in use"


def test_the_peak_is_the_optimizers_step() -> None:
    model = chain(4, 1024)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    with ebbtide.offload(model, trace=True, activations=POLICY) as handle:
        for _ in range(2):
            step(model, torch.randn(64, 1024))
            optimizer.step()
            optimizer.zero_grad()
        assert causes(handle.explain())[0] == "optimizer step"


def test_the_peak_is_the_loss() -> None:
    model = nn.Sequential(*chain(4), nn.Linear(WIDTH, 8192))
    with ebbtide.offload(model, trace=True, activations=POLICY) as handle:
        target = torch.randint(0, 8192, (2048,))
        for _ in range(2):
            nn.functional.cross_entropy(model(batch(2048)), target).backward()
            model.zero_grad()
        explanation = handle.explain()
    found = causes(explanation)
    assert found[0] in ("loss", "one operation")
    assert "loss" in found


def test_the_peak_is_what_one_operation_works_on() -> None:
    class Wide(nn.Module):
        """Saves its input alone, and makes eight times as much on the way."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                wide = torch.cat([x] * 16).sum()
            return x * self.scale + wide * 0

    model = nn.Sequential(*[Wide() for _ in range(4)])
    with ebbtide.offload(model, trace=True, activations=POLICY) as handle:
        for _ in range(2):
            step(model, batch())
        explanation = handle.explain()
    assert causes(explanation)[0] == "one operation"
    assert explanation.limit_bytes is not None
    peak = handle.trace.memory
    assert peak is not None and explanation.limit_bytes <= peak.peak_bytes


def test_weights_and_state_are_most_of_it() -> None:
    model = chain(8, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    with ebbtide.offload(model, trace=True, activations=POLICY) as handle:
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)
            step(model, torch.randn(64, 1024))
            optimizer.step()
        found = causes(handle.explain())
    assert found[0] in ("weights and state", "optimizer step")
    assert "weights and state" in found


def test_a_graph_is_still_held() -> None:
    model = chain(4)
    losses = []
    with ebbtide.offload(model, activations=POLICY) as handle:
        for _ in range(3):
            loss = model(batch()).sum()
            loss.backward(retain_graph=True)
            losses.append(loss)
        assert causes(handle.explain())[0] == "graph held"
        losses.clear()
        del loss
        gc.collect()
        assert "graph held" not in causes(handle.explain())


def test_all_is_well() -> None:
    """What leaves has left, and what remains is spread over what a step needs anyway."""
    model = chain(8)
    policy = ebbtide.ActivationPolicy(rebuild=False, max_inflight_bytes="8MiB")
    with ebbtide.offload(model, trace=True, activations=policy) as handle:
        for _ in range(3):
            step(model, batch())
            model.zero_grad()
        explanation = handle.explain()
    problems = [cause for cause in causes(explanation) if cause != "one operation"]
    assert problems in ([], ["late copies"])


# ---- what only an accelerator, a plan or a slow link shows: from figures -------------------------

IDLE = InFlight(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def recorded(phase: str = "B3", reserved: int = 0, **owned: int) -> Evidence:
    """A step that was recorded, by the MiB of each owner at the peak."""
    at_peak = {Owner[name]: size * MIB for name, size in owned.items()}
    peak_bytes = sum(at_peak.values())
    sample = MemorySample(phase, 0.0, 1.0, at_peak, peak_bytes)
    memory = StepMemory("memory", (sample,), 0, max(reserved * MIB, peak_bytes))
    stats = StepStats(unique_bytes=500 * MIB, offloaded_bytes=400 * MIB, num_saved=10)
    stats = dataclasses.replace(stats, saved_bytes=600 * MIB)
    return Evidence(
        stats=stats,
        num_steps=3,
        inspection=Inspection((), (), IDLE),
        memory=memory,
        policy=POLICY,
        min_bytes=MIB,
        total_bytes=1000 * MIB,
    )


def with_stats(evidence: Evidence, **figures: int) -> Evidence:
    stats = dataclasses.replace(evidence.stats, **figures)
    return dataclasses.replace(evidence, stats=stats)


@pytest.mark.parametrize(
    ("evidence", "cause"),
    [
        (recorded(PARAMETERS=100, LEAVING=300, RUNNING=100), "late copies"),
        (recorded(PARAMETERS=100, RELOADED=300, RUNNING=100), "reloaded early"),
        (recorded(PARAMETERS=100, REFERENCED=300, RUNNING=100), "still in use"),
        (recorded(PARAMETERS=100, RUNNING=50, KEPT=150, reserved=600), "allocator"),
        (
            dataclasses.replace(recorded(LEAVING=300, RUNNING=100), follows_schedule=True),
            "released late",
        ),
        (recorded(phase="optimizer step", PARAMETERS=300, OPTIMIZER=600), "optimizer step"),
        (recorded(phase="loss", OUTPUTS=300, RUNNING=400, PARAMETERS=100), "loss"),
        (recorded(PARAMETERS=30, KEPT=60, LEAVING=5, RELOADED=10), "it fits"),
        (with_stats(recorded(KEPT=150, INPUTS=350), kept_bytes=150 * MIB), "small tensors"),
        (
            dataclasses.replace(recorded(KEPT=300, PARAMETERS=200), plan_keeps_all=True),
            "it fits",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_figures_tell(evidence: Evidence, cause: str) -> None:
    assert causes(explain(evidence))[0] == cause


def test_the_limit_is_what_no_activation_could_leave() -> None:
    """60 MiB of parameters and 40 of the running operation; 200 of activations could be away."""
    explanation = explain(recorded(phase="F3", PARAMETERS=60, KEPT=200, RUNNING=40))
    assert explanation.limit_bytes == 100 * MIB
    assert "200.0 MiB above" in explanation.limit_why


def saved(layer: int, size_mib: int) -> InspectedStorage:
    moved, name = size_mib * MIB, f"blocks.{layer}"
    where = (layer, name, 0, 0, moved, moved, "offload", "disk", (), 1, 0.0, 1.0)
    return InspectedStorage(*where, shape=(size_mib, 2**18), dtype="float32", saved_by="Gelu")


def test_a_tensor_that_backward_reads_is_not_blamed_on_the_prefetch() -> None:
    """B3 reads 240 MiB at once; of 300 MiB that came back, 60 wait, a tenth of the peak."""
    evidence = recorded(PARAMETERS=100, RELOADED=300, RUNNING=100)
    storages = (saved(3, 240), saved(2, 200))
    inspection = dataclasses.replace(evidence.inspection, storages=storages)
    explanation = explain(dataclasses.replace(evidence, inspection=inspection))
    assert causes(explanation) == ["one tensor"]
    (finding,) = explanation.findings
    assert finding.size_bytes == 240 * MIB
    text = "240.0 MiB float32 [240, 262144], saved by Gelu in layer 3 blocks.3"
    assert finding.evidence.startswith(text)


def test_what_is_in_flight_is_lowered_where_it_is_set() -> None:
    evidence = dataclasses.replace(recorded(LEAVING=300, RELOADED=300), bound_bytes=12 * MIB)
    settings = {each.setting for each in explain(evidence).findings}
    assert all("max_inflight_bytes=...) from 12.0 MiB" in setting for setting in settings)
    planned = explain(dataclasses.replace(evidence, plan_peak_bytes=700 * MIB))
    assert {each.setting.split(":")[0] for each in planned.findings} == {"a smaller budget"}


def test_a_peak_without_a_cause_says_so() -> None:
    """A fifth each: no owner has a part that explains the peak, and KEPT is below its limit."""
    evidence = recorded(RUNNING=100, GRADIENTS=90, LEAVING=60, INPUTS=150)
    explanation = explain(dataclasses.replace(evidence, total_bytes=0))
    assert explanation.findings == ()
    assert "No single cause stands out" in explanation.verdict


def test_what_was_there_before_the_step_comes_last() -> None:
    evidence = recorded(OTHER=100, MAPPED=50, RUNNING=250)
    explanation = explain(evidence)
    assert "The peak is 250.0 MiB above idle, 400.0 MiB in all, in B3." in explanation.verdict
    rows = [line.split("  ")[-1] for line in str(explanation.memory).splitlines()[1:]]
    assert rows == [Owner.RUNNING.value, Owner.OTHER.value, Owner.MAPPED.value]
