"""Recomputed layers: what is held after forward, what moves, and the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide import ActivationPolicy
from recompute_bench import MODES, S, Stack, calls_of, compare, policy, stack, step

# A layer saves its input and its sine's argument, and the stack the argument of one more sine.
N = 4


def test_a_recomputed_layer_holds_its_input_only() -> None:
    """Inputs of N layers, and the last sine's argument; not the N arguments inside the layers."""
    model = stack(N)
    with ebbtide.offload(model, activations=policy("recompute")) as handle:
        step(handle, model)  # verifies
        loss = model(torch.randn(64, 256)).sum()
        assert handle.inspect().in_flight.kept_bytes == (N + 1) * S
        assert handle.inspect().in_flight.stored_bytes == 0
        loss.backward()
        stats = handle.stats
    assert stats.kept_bytes == (N + 1) * S
    assert stats.recomputed_bytes == N * S
    assert stats.offloaded_bytes == stats.reloaded_bytes == 0
    assert stats.unique_bytes == (2 * N + 1) * S
    # Backward holds one layer's argument of the sine beside the inputs and what is left of them.
    assert stats.peak_device_bytes == (N + 1) * S


def test_inputs_of_recomputed_layers_leave_and_come_back() -> None:
    model = stack(N)
    with ebbtide.offload(model, activations=policy("recompute+offload")) as handle:
        step(handle, model)  # verifies
        loss = model(torch.randn(64, 256)).sum()
        assert handle.inspect().in_flight.kept_bytes == 0
        assert handle.inspect().in_flight.stored_bytes == (N + 1) * S
        loss.backward()
        stats = handle.stats
    assert stats.kept_bytes == 0
    assert stats.offloaded_bytes == (N + 1) * S
    assert stats.reloaded_bytes <= (N + 1) * S, "a copy down that has not ended needs none up"
    assert stats.recomputed_bytes == N * S
    assert stats.num_offloaded == N + 1, "nothing that the recomputation saves leaves"


@pytest.mark.parametrize("mode", MODES)
def test_num_layers_and_keep_last_choose_the_layers(mode: str) -> None:
    """No layer's code runs twice. Of layers not chosen both activations stay on the device."""
    offloads = mode == "recompute+offload"
    for chosen, options in (
        ({0, 1}, {"num_layers": 2}),
        ({0, 1, 2}, {"keep_last": 1}),
        ({0, 1}, {"keep_last": 2}),
        (set(), {"num_layers": 0}),
    ):
        model = stack(N)
        calls = calls_of(model)
        with ebbtide.offload(
            model, activations=policy(mode, **options), layers=["layers.?"]
        ) as handle:
            step(handle, model)  # the first forward counts the layers
            calls.clear()
            stats = step(handle, model)
        assert calls == [*range(N)]
        assert stats.recomputed_bytes == len(chosen) * S
        # What is outside layers leaves if the policy does not count layers; keep_last only counts.
        inputs = len(chosen) * S
        outside = S if offloads and "keep_last" in options else 0
        assert stats.offloaded_bytes == (inputs + outside if offloads else 0)
        assert stats.unique_bytes == (2 * N + 1) * S
        assert stats.kept_bytes == stats.unique_bytes - len(chosen) * S - stats.offloaded_bytes


def test_the_peak_is_that_of_the_layer_that_is_recomputed() -> None:
    """Layers of ten sines hold ten arguments while their backward runs, and an input otherwise.

    Kept: N inputs and the last sine's argument. The first layer to be recomputed is the last one;
    its ten sines have eleven tensors with its linear map's input, which is kept already. The last
    sine's argument of the stack has been freed by then.
    """

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(256, 256)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            for _ in range(10):
                x = x.sin()
            return x

    model = Stack(nn.ModuleList(Deep() for _ in range(N)))
    with ebbtide.offload(model, activations=policy("recompute")) as handle:
        step(handle, model)  # verifies
        stats = step(handle, model)
    assert stats.recomputed_bytes == N * 10 * S
    assert stats.peak_device_bytes == N * S + 10 * S


@pytest.mark.parametrize("mode", MODES)
def test_the_default_policy_recomputes_every_layer(mode: str) -> None:
    """The same bits over several steps."""
    compare(lambda: stack(3), ActivationPolicy(mode=mode), lambda: (torch.randn(64, 256),))


def test_small_inputs_are_kept_and_not_counted_as_recomputed() -> None:
    """Nothing here reaches 1 MiB. Inputs and the last sine's argument stay, each counted once."""
    model = stack(N)
    recompute = ActivationPolicy(mode="recompute+offload", rebuild=False)
    with ebbtide.offload(model, activations=recompute) as handle:
        step(handle, model)  # verifies
        stats = step(handle, model)
    assert stats.offloaded_bytes == 0
    assert stats.kept_bytes == (N + 1) * S
    assert stats.recomputed_bytes == N * S
