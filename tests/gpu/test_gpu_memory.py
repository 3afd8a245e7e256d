"""Device memory to the byte, and none of any kind that grows."""

import os
from collections.abc import Callable
from dataclasses import replace

import psutil
import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide import ActivationPolicy
from gpu_bench import (
    DRY_RUN,
    MIB,
    SIZE_BYTES,
    TIGHT,
    assert_at_rest,
    batch,
    finish_device,
    needs_accelerator,
    settle,
    take_step,
    tower,
)

ROWS, WIDTH = 2048, 512
ACTIVATION_BYTES = ROWS * WIDTH * 4  # 4 MiB
LAYERS = 12
WEIGHT_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
ROUNDING_BYTES = 512  # of the allocator, for each tensor


class Chain(nn.Module):
    """Equal layers on an input that only autograd holds on to.

    A linear map saves its input and tanh its result, which is the next layer's input. So N layers
    save N + 1 activations: the input and every layer's result.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        layers = tower(device, LAYERS, WIDTH, nn.Tanh)
        self.layers = nn.ModuleList(layers)

    def forward(self, value: float) -> Tensor:
        x = torch.full((ROWS, WIDTH), value, device=self.layers[0][0].weight.device)
        for layer in self.layers:
            x = layer(x)
        return x.sum()  # saves nothing


def _warm(model: Chain) -> None:
    """A plain step: gradients, and the workspaces of the kernels, are there from now on."""
    model(0.5).backward()
    finish_device(next(model.parameters()).device)


def _allocated_after_forward(
    model: Chain, device: torch.device, handle: ebbtide.OffloadHandle | None
) -> int:
    loss = model(0.5)
    finish_device(device)
    if handle is not None:
        settle(handle)
    allocated_bytes = torch.accelerator.memory_allocated(device)
    loss.backward()
    return allocated_bytes


@needs_accelerator
def test_forward_frees_what_it_offloads(device: torch.device) -> None:
    model = Chain(device)
    _warm(model)
    plain_bytes = _allocated_after_forward(model, device, None)
    with ebbtide.offload(model, activations=ActivationPolicy(rebuild=False)) as handle:
        for _ in range(3):
            left_bytes = _allocated_after_forward(model, device, handle)
            stats = handle.stats
            assert stats.num_offloaded == LAYERS + 1
            assert stats.offloaded_bytes == (LAYERS + 1) * ACTIVATION_BYTES
            lost_bytes = plain_bytes - stats.offloaded_bytes - left_bytes
            assert abs(lost_bytes) <= ROUNDING_BYTES * stats.num_offloaded


def _peaks_bytes(
    model: Chain, device: torch.device, handle: ebbtide.OffloadHandle | None
) -> tuple[int, int]:
    """The most that a forward holds, and a backward that begins when all copies are complete."""
    torch.accelerator.reset_peak_memory_stats(device)
    loss = model(0.5)
    finish_device(device)
    if handle is not None:
        settle(handle)
    forward_bytes = torch.accelerator.max_memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    loss.backward()
    finish_device(device)
    return forward_bytes, torch.accelerator.max_memory_allocated(device)


@needs_accelerator
@pytest.mark.parametrize("num_layers", [3, 6, 9])
def test_peak_of_k_of_n_layers(num_layers: int, device: torch.device) -> None:
    model = Chain(device)
    _warm(model)
    gradient_bytes = WEIGHT_BYTES
    plain_forward_bytes, plain_backward_bytes = _peaks_bytes(model, device, None)
    # Backward's peak is where it starts: all activations, and what the running kernels take (the
    # gradients that go in and out of a layer, a weight's before it is added, cuBLAS).
    saved_bytes = (LAYERS + 1) * ACTIVATION_BYTES
    workspace_bytes = plain_backward_bytes - WEIGHT_BYTES - gradient_bytes - saved_bytes
    assert workspace_bytes > 0
    # The first k layers offload the input and their own results, of which the last is also what
    # layer k + 1 saves. That leaves N - k.
    offloaded_bytes = (num_layers + 1) * ACTIVATION_BYTES
    kept_bytes = (LAYERS - num_layers) * ACTIVATION_BYTES
    # At its first kept tensor backward begins to bring back as much as the bound allows.
    inflight_bytes = 2 * ACTIVATION_BYTES
    expected_bytes = WEIGHT_BYTES + gradient_bytes + kept_bytes + inflight_bytes + workspace_bytes
    policy = ActivationPolicy(
        num_layers=num_layers, max_inflight_bytes=inflight_bytes, rebuild=False
    )
    with ebbtide.offload(model, activations=policy) as handle:
        for _ in range(3):
            forward_bytes, backward_bytes = _peaks_bytes(model, device, handle)
            assert backward_bytes == pytest.approx(expected_bytes, rel=0.01)
            # How much is on its way down at the end of the forward is up to the link.
            most_bytes = plain_forward_bytes - offloaded_bytes + inflight_bytes
            assert forward_bytes <= most_bytes * 1.01
            stats = handle.stats
            assert stats.offloaded_bytes == stats.reloaded_bytes == offloaded_bytes
            assert stats.kept_bytes == kept_bytes


# ---- growth -------------------------------------------------------------------------------------

STEPS, SETTLED = 500, 20
ROWS_OF_A_STEP = 64
SMALL_BYTES = SIZE_BYTES * ROWS_OF_A_STEP // 512  # one activation: 64 KiB
GROWTH_BYTES = 16 * MIB
"""Of the host's memory, over 480 steps. One forgotten activation a step would be 480 x 64 KiB = 30
MiB, one of the small things that hold them (4 KiB, say) for each of 12, 22 MiB."""


def _figures(device: torch.device) -> dict[str, int]:
    process = psutil.Process()
    figures = {
        "resident": process.memory_info().rss,
        "threads": process.num_threads(),
        "files": len(os.listdir("/proc/self/fd")),
    }
    if not DRY_RUN:
        figures["allocated"] = torch.accelerator.memory_allocated(device)
        figures["reserved"] = torch.accelerator.memory_reserved(device)
    return figures


def _repeat(step: Callable[[], object], steps: int, device: torch.device) -> None:
    for _ in range(steps):
        step()
        finish_device(device)  # as training code does that reads a loss


def test_five_hundred_steps_leave_nothing(device: torch.device) -> None:
    model, x = tower(device), batch(device, rows=ROWS_OF_A_STEP)
    policy = replace(TIGHT, max_inflight_bytes=2 * SMALL_BYTES)
    with ebbtide.offload(model, activations=policy) as handle:
        _repeat(lambda: take_step(model, x), SETTLED, device)
        settle(handle)
        before = _figures(device)
        _repeat(lambda: take_step(model, x), STEPS - SETTLED, device)
        settle(handle)
        after = _figures(device)
        assert_at_rest(handle)
    assert after["resident"] <= before["resident"] + GROWTH_BYTES
    assert after["threads"] <= before["threads"]
    assert after["files"] <= before["files"]
    if not DRY_RUN:
        assert after["allocated"] == before["allocated"]
        # How many copies are under way at a time is up to the link, two each way at most: they
        # may need one more segment, of 2 MiB. A forgotten activation a step would need 15.
        assert after["reserved"] <= before["reserved"] + 2 * MIB
