"""Whatever the model: with its layers recomputed in backward, training ends in the same bits."""

import functools

import pytest
import torch

import ebbtide
import zoo_transformers
from ebbtide import ActivationPolicy
from test_weights_zoo import LAYERS, NothingAtRestComputes, Train, offloaded
from zoo import ENTRIES, Entry, Snapshot, assert_bitwise_equal

LLAMA = functools.partial(zoo_transformers.llama, attention_dropout=0.1)
ENTRIES_HERE = (
    Entry("llama_dropout", LLAMA, "transformers"),
    Entry("llama_dropout_bf16", LLAMA, "transformers", autocast=torch.bfloat16),
    *(entry for entry in ENTRIES if entry.name != "llama_checkpointed"),
)
NAMED = {entry.name: entry for entry in ENTRIES_HERE}
SEVERAL_STEPS = (
    "fno_2d",
    "fno_2d_bf16",
    "uno",
    "llama_dropout",
    "llama_dropout_bf16",
    "gpt2",
    "convnet",  # batch norms, and an in-place ReLU inside the layer
    "convnet_channels_last",
    "mixture_of_experts",
    "recurrent",
)
STEPS = 3
MODES = ("recompute", "recompute+offload")


@functools.cache
def plain_steps(name: str) -> Snapshot:
    """The end of plain training, which each way to offload is compared with."""
    return Train(NAMED[name], "adamw").steps(STEPS)


def small(mode: str) -> ActivationPolicy:
    """Nearly every activation of the zoo's small models is large enough to move."""
    return ActivationPolicy(min_bytes="4KiB", max_inflight_bytes="1MiB", mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SEVERAL_STEPS)
def test_steps_are_bit_identical(name: str, mode: str) -> None:
    """The first verifies the layers, and the third is the first in a learned order."""
    expected = plain_steps(name)
    train = Train(NAMED[name], "adamw")
    with ebbtide.offload(train.model, activations=small(mode), layers=LAYERS.get(name)) as handle:
        assert_bitwise_equal(train.steps(STEPS), expected)
        stats = handle.stats
        assert stats.recomputed_bytes > stats.unique_bytes // 4
        assert (stats.offloaded_bytes > 0) == (mode == "recompute+offload")
        assert {each.layer.name for each in handle.inspect().recomputed} <= set(handle.layers)
    assert_bitwise_equal(train.state(), expected)


@pytest.mark.parametrize("entry", ENTRIES_HERE, ids=lambda entry: entry.name)
def test_with_weights_on_the_host(entry: Entry) -> None:
    """Backward brings a layer's weights before its forward runs again, and computes with them."""
    expected = plain_steps(entry.name)
    train = Train(entry, "adamw")
    with offloaded(train, 1, small(MODES[len(entry.name) % 2])) as (handle, _):
        train.watch = lambda: NothingAtRestComputes(handle)
        assert_bitwise_equal(train.steps(STEPS), expected)
        assert handle.stats.recomputed_bytes > 0
