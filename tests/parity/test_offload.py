"""Whatever the model: with its activations offloaded, the same numbers to the bit."""

import pytest
import torch

import ebbtide
from ebbtide import ActivationPolicy
from zoo import ENTRIES, Entry, assert_bitwise_equal, snapshot

SMALL = ActivationPolicy(min_bytes="4KiB", max_inflight_bytes="1MiB")
"""Nearly every activation of the zoo's small models moves, and room is short on the way."""

NAMES = ("fno_2d", "llama_checkpointed", "mixture_of_experts", "recurrent")
SEVERAL = [entry for entry in ENTRIES if entry.name in NAMES]


def _plain(entry: Entry, steps: int) -> list[dict]:
    model, inputs = entry.build()
    return [_step(entry, model, inputs) for _ in range(steps)]


def _step(entry: Entry, model: torch.nn.Module, inputs: dict) -> dict:
    model.zero_grad()
    for tensor in inputs.values():
        tensor.grad = None
    return snapshot(entry, model, inputs)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_gradients_are_bit_identical_over_three_steps(entry: Entry) -> None:
    """The first step prefetches by reverse save order, the next two by the order learned."""
    *expected, after = _plain(entry, steps=4)
    model, inputs = entry.build()
    with ebbtide.offload(model, activations=SMALL) as handle:
        for plain in expected:
            assert_bitwise_equal(_step(entry, model, inputs), plain)
            assert handle.stats.offloaded_bytes > 64 * 1024
    assert_bitwise_equal(_step(entry, model, inputs), after)


@pytest.mark.parametrize("entry", SEVERAL, ids=lambda entry: entry.name)
def test_wrapped_forward_is_bit_identical(entry: Entry) -> None:
    expected = _plain(entry, steps=1)[0]
    model, inputs = entry.build()
    model.forward = ebbtide.wrap_forward_with_offload(model.forward, activations=SMALL)
    assert_bitwise_equal(_step(entry, model, inputs), expected)
    assert model.forward.handle.stats.offloaded_bytes > 64 * 1024
