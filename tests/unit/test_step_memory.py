"""What memory holds in each phase of a step, by owner: the parts are exact and add up."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ebbtide
from ebbtide.devices.process import OPTIMIZER_WATCHES
from ebbtide.observe.memory import Owner, StepMemory
from live_memory import LiveMemory
from waiting import wait_until

pytestmark = pytest.mark.usefixtures("frozen_imports")

KIB = 1024
WIDTH, ROWS = 64, 256
WEIGHT = WIDTH * WIDTH * 4
ACTIVATION = ROWS * WIDTH * 4


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveMemory]:
    """Counts the bytes of all live tensors, in the place of resident memory."""
    gc.collect()
    with LiveMemory() as live:
        monkeypatch.setattr("ebbtide.observe.recording.memory_of", lambda _: live)
        yield live


class Block(nn.Module):
    """Saves its input, and the input of the sine."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sin()


def chain(length: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(length)])


KEEP = ebbtide.ActivationPolicy(num_layers=0, min_bytes=1, rebuild=False)


def check(memory: StepMemory) -> None:
    """The owners add up to the peak in every phase, and none owns less than nothing."""
    for sample in memory.samples:
        assert sum(sample.owned.values()) == sample.peak_bytes, sample.phase
        assert all(size_bytes > 0 for size_bytes in sample.owned.values()), sample
    at_peak = memory.samples[memory.peak]
    assert at_peak.peak_bytes == max(sample.peak_bytes for sample in memory.samples)
    ends = [sample.end_s for sample in memory.samples]
    assert ends == sorted(ends)


def phases(memory: StepMemory) -> list[str]:
    """The phases, without those between layers."""
    return [each.phase for each in memory.samples if each.phase != "forward outside layers"]


@pytest.mark.usefixtures("memory")
def test_each_owner_has_its_exact_bytes() -> None:
    """Three kept layers and Adam: all parts of the peak can be worked out by hand."""
    model = chain(3)
    optimizer = torch.optim.Adam(model.parameters())
    held = torch.ones(1000)  # the program's own
    x = torch.randn(ROWS, WIDTH)
    with ebbtide.offload(model, trace=True, activations=KEEP) as handle:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        step = handle.trace.memory
    assert step is not None
    check(step)
    assert phases(step) == [
        *("F0", "F1", "F2", "loss", "B2", "B1", "B0"),
        *("between steps", "optimizer step"),
    ]
    f2 = next(each for each in step.samples if each.phase == "F2")
    assert f2.owned[Owner.PARAMETERS] == 3 * WEIGHT
    # Two moments, and a step count of 4 bytes for each parameter.
    assert f2.owned[Owner.OPTIMIZER] == 3 * (2 * WEIGHT + 4)
    assert f2.owned[Owner.OTHER] == held.nbytes
    # x, and two of each block: the sine's input, and its output, which the next block saves.
    assert f2.owned[Owner.KEPT] == (1 + 2 + 2 + 1) * ACTIVATION
    assert Owner.INPUTS not in f2.owned, "x is saved, so it counts as an activation"
    rest = f2.owned.get(Owner.RUNNING, 0) + f2.owned.get(Owner.PASSED, 0)
    assert rest == ACTIVATION, "the last sine's output"
    b0 = next(each for each in step.samples if each.phase == "B0")
    assert b0.owned[Owner.GRADIENTS] == 2 * WEIGHT, "of the layers whose backward has ended"
    optimizing = next(each for each in step.samples if each.phase == "optimizer step")
    assert optimizing.owned[Owner.GRADIENTS] == 3 * WEIGHT
    assert optimizing.owned[Owner.INPUTS] == ACTIVATION


@pytest.mark.usefixtures("memory")
def test_a_wrapped_forward_without_layers_has_phases() -> None:
    model = chain(2)
    policy = ebbtide.ActivationPolicy(min_bytes="1GiB")
    model.forward = ebbtide.wrap_forward_with_offload(  # type: ignore[method-assign]
        model.forward, trace=True, activations=policy
    )
    model(torch.randn(ROWS, WIDTH)).sum().backward()
    step = model.forward.handle.trace.memory
    check(step)
    # Nothing large is read in backward, so nothing tells when it began.
    assert [each.phase for each in step.samples] == ["forward outside layers", "loss"]


@pytest.mark.parametrize(
    ("mode", "rebuild"), [("recompute", True), ("offload", True), ("offload", False)]
)
@pytest.mark.parametrize(("microbatches", "late"), [(1, False), (2, False), (1, True)])
@pytest.mark.usefixtures("memory")
def test_the_owners_add_up(mode: str, rebuild: bool, microbatches: int, late: bool) -> None:
    """With micro-batches, with gradients that are freed late, recomputed, rebuilt and kept.

    What goes to a file is not counted here: the worker threads that read it back escape the count.
    """
    model = chain(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    policy = ebbtide.ActivationPolicy(mode=mode, min_bytes=1, rebuild=rebuild)
    if mode == "offload":
        policy = replace(policy, num_layers=0)
    with ebbtide.offload(model, trace=True, activations=policy) as handle:
        for _ in range(3):
            for _ in range(microbatches):
                loss = model(torch.randn(ROWS, WIDTH)).square().mean()
                if late:
                    optimizer.zero_grad()
                loss.backward()
                del loss
            optimizer.step()
            if not late:
                optimizer.zero_grad()
            step = handle.trace.memory
            assert step is not None
            check(step)


def test_without_a_trace_nothing_is_recorded(memory: LiveMemory) -> None:
    resets = itertools.count()
    before = next(resets)
    memory.reset_peak = lambda: next(resets)  # type: ignore[method-assign]
    with ebbtide.offload(chain(2), activations=KEEP) as handle:
        assert handle is not None
        chain(2)(torch.randn(ROWS, WIDTH)).sum().backward()
    assert next(resets) == before + 1, "nobody has reset the peak"


@pytest.mark.parametrize("how", [{"trace": True}, {"weights": ebbtide.WeightPolicy()}], ids=list)
def test_models_come_and_go_while_an_optimizer_steps(how: dict[str, Any]) -> None:
    """In another thread, say. torch's global hooks must not change meanwhile."""

    def meanwhile(*_: object) -> None:
        other = chain(2)
        with ebbtide.offload(other, **how):
            other(torch.randn(ROWS, WIDTH)).sum().backward()

    model = chain(2)
    hooks = [register_optimizer_step_pre_hook(each) for each in (meanwhile, lambda *_: None)]
    try:
        model(torch.randn(ROWS, WIDTH)).sum().backward()
        torch.optim.SGD(model.parameters()).step()
    finally:
        for hook in hooks:
            hook.remove()


def test_a_recording_that_is_gone_leaves_no_hook_on_optimizers() -> None:
    gc.collect()
    before = len(OPTIMIZER_WATCHES)
    model = chain(2)
    handle = ebbtide.offload(model, trace=True)
    model(torch.randn(4, WIDTH)).sum().backward()
    assert handle.trace.memory is not None
    assert len(OPTIMIZER_WATCHES) > before
    del model, handle
    gc.collect()
    wait_until(lambda: len(OPTIMIZER_WATCHES) == before, "the recording is still told of steps")
