"""What device memory holds in each phase of a step: the owners add up to the allocator's count."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.observe.memory import Owner, StepMemory
from ebbtide.stores import DeviceMemory
from gpu_bench import needs_accelerator, settle, tower

ROWS, WIDTH, LAYERS = 1024, 512, 6
ACTIVATION = ROWS * WIDTH * 4  # 2 MiB
WEIGHTS = WIDTH * WIDTH * 4 + WIDTH * 4  # of one layer; both are whole blocks of the allocator
POLICY = ebbtide.ActivationPolicy(min_bytes="1MiB", rebuild=False)

pytestmark = needs_accelerator


def test_a_device_has_one_peak_with_its_number_and_without(device: torch.device) -> None:
    """Whoever resets it lets the others note how high it was."""
    numbered, plain = DeviceMemory(device), DeviceMemory(torch.device(device.type))
    numbered.reset_peak()
    block = torch.empty(ACTIVATION, dtype=torch.uint8, device=device)
    peak_bytes = numbered.peak_bytes()
    del block
    plain.reset_peak()
    assert numbered.peak_bytes() == peak_bytes > plain.peak_bytes()


def check(memory: StepMemory) -> None:
    for sample in memory.samples:
        assert sum(sample.owned.values()) == sample.peak_bytes, sample
        assert all(size_bytes > 0 for size_bytes in sample.owned.values()), sample


def phase(memory: StepMemory, name: str) -> dict[Owner, int]:
    return dict(next(sample.owned for sample in memory.samples if sample.phase == name))


def train(
    model: nn.Module, x: torch.Tensor, handle: ebbtide.OffloadHandle, steps: int = 2
) -> StepMemory:
    """Train with an optimizer, and return the memory of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(x).sum()
        settle(handle)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    memory = handle.trace.memory
    assert memory is not None
    check(memory)
    return memory


def model_on(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*tower(device, LAYERS, WIDTH, nn.Sigmoid))


def test_kept_activations_are_counted(device: torch.device) -> None:
    model, x = model_on(device), torch.randn(ROWS, WIDTH, device=device)
    policy = ebbtide.ActivationPolicy(num_layers=0, min_bytes="1MiB", rebuild=False)
    with ebbtide.offload(model, trace=True, activations=policy) as handle:
        memory = train(model, x, handle)
    assert memory.counted == f"memory that torch has allocated on {device}"
    last = phase(memory, f"F{LAYERS - 1}")
    # The input, and each layer's result: the sigmoid saves it, and the next layer shares it.
    assert last[Owner.KEPT] == (LAYERS + 1) * ACTIVATION
    assert last[Owner.PARAMETERS] == LAYERS * WEIGHTS
    assert phase(memory, "B0")[Owner.GRADIENTS] == (LAYERS - 1) * WEIGHTS
    assert phase(memory, "optimizer step")[Owner.GRADIENTS] == LAYERS * WEIGHTS


def test_offloaded_activations_are_gone_after_the_forward(device: torch.device) -> None:
    model, x = model_on(device), torch.randn(ROWS, WIDTH, device=device)
    with ebbtide.offload(model, trace=True, activations=POLICY) as handle:
        memory = train(model, x, handle)
    seen = {owner for sample in memory.samples for owner in sample.owned}
    assert {Owner.LEAVING, Owner.RELOADED} <= seen
    assert Owner.KEPT not in seen


def test_what_the_program_holds_is_counted(device: torch.device) -> None:
    model, x = model_on(device), torch.randn(ROWS, WIDTH, device=device)
    held: list[torch.Tensor] = []
    for layer in model:
        layer.register_forward_hook(lambda _, __, output: held.append(output.detach()))
    with ebbtide.offload(model, trace=True, activations=POLICY) as handle:
        loss = model(x).sum()
        settle(handle)
        loss.backward()
        memory = handle.trace.memory
    assert memory is not None
    check(memory)
    # All results but the last, which is an output of the forward.
    assert phase(memory, "B0")[Owner.REFERENCED] == (LAYERS - 1) * ACTIVATION


def test_weights_come_and_go(device: torch.device) -> None:
    model, x = model_on(device), torch.randn(ROWS, WIDTH, device=device)
    with ebbtide.offload(
        model, trace=True, activations=POLICY, weights=ebbtide.WeightPolicy()
    ) as handle:
        memory = train(model, x, handle)
    middle = phase(memory, "F2")
    assert Owner.PARAMETERS not in middle
    assert middle[Owner.WEIGHTS] >= WEIGHTS


@pytest.mark.parametrize("mode", ["recompute", "recompute+offload"])
def test_recomputed_layers_are_counted(device: torch.device, mode: str) -> None:
    model, x = model_on(device), torch.randn(ROWS, WIDTH, device=device)
    policy = ebbtide.ActivationPolicy(mode=mode, min_bytes="1MiB")
    with ebbtide.offload(model, trace=True, activations=policy) as handle:
        memory = train(model, x, handle)
    assert Owner.RECOMPUTED in phase(memory, "B2")
