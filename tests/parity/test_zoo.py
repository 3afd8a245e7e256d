"""The zoo is fit for parity tests: repeatable, fully trained, and not too small to matter."""

import sys
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zoo import (
    ENTRIES,
    Entry,
    Inputs,
    Snapshot,
    assert_bitwise_equal,
    deterministic,
    snapshot,
)

KIB = 1024
each_entry = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)


def entry_named(name: str) -> Entry:
    return next(entry for entry in ENTRIES if entry.name == name)


def built_snapshot(entry: Entry, seed: int = 0) -> Snapshot:
    model, inputs = entry.build(seed)
    return snapshot(entry, model, inputs)


def saved_activations(entry: Entry, model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """What the forward saved, once per storage and without parameters."""
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage()._cdata
        if address not in parameters:
            # Holding the tensor keeps its address from being given to another storage.
            saved.setdefault(address, tensor.detach())
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        entry.loss(model, inputs)
    return list(saved.values())


def test_names_are_unique() -> None:
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)


@each_entry
def test_only_the_same_seed_gives_the_same_bits(entry: Entry) -> None:
    # All are built before any runs: a dropout mask must not depend on what was drawn in between.
    built = [entry.build() for _ in range(2)]
    first, other = [snapshot(entry, model, inputs) for model, inputs in built]
    assert_bitwise_equal(other, first)
    model, inputs = entry.build(seed=1)
    assert not torch.equal(entry.loss(model, inputs), first["loss"])


@each_entry
def test_gradients_reach_what_they_should(entry: Entry) -> None:
    model, inputs = entry.build()
    taken = snapshot(entry, model, inputs)
    assert taken["loss"].isfinite()
    for name, _ in model.named_parameters():
        gradient = taken[f"gradient of {name}"]
        if entry.without_gradient(name):
            assert gradient is None, name
        else:
            assert gradient is not None, name
            # A norm after a bias takes the constant away again: that gradient is rounding only.
            assert gradient.any() or name.endswith("bias"), name
    for name, tensor in inputs.items():
        gradient = taken[f"gradient of input {name}"]
        assert tensor.requires_grad == (gradient is not None and bool(gradient.any())), name


@each_entry
def test_saves_several_activations_above_64_kib(entry: Entry) -> None:
    saved = saved_activations(entry, *entry.build())
    sizes_bytes = [tensor.untyped_storage().nbytes() for tensor in saved]
    assert sum(size_bytes > 64 * KIB for size_bytes in sizes_bytes) >= 5


@pytest.mark.parametrize("name", ["fno_2d_bf16", "llama_bf16"])
def test_autocast_entries_save_bfloat16(name: str) -> None:
    entry = entry_named(name)
    dtypes = {tensor.dtype for tensor in saved_activations(entry, *entry.build())}
    assert torch.bfloat16 in dtypes


@pytest.mark.parametrize("name", ["fno_2d_frozen", "llama_frozen"])
def test_frozen_entries_train_only_a_part(name: str) -> None:
    model, _ = entry_named(name).build()
    assert {parameter.requires_grad for parameter in model.parameters()} == {False, True}


def test_tied_embeddings_are_one_parameter() -> None:
    untied, _ = entry_named("llama").build()
    tied, _ = entry_named("llama_tied").build()
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_convnet_channels_last_differs_from_contiguous_in_strides_only() -> None:
    contiguous, _ = entry_named("convnet").build()
    channels_last, inputs = entry_named("convnet_channels_last").build()
    assert inputs["x"].is_contiguous(memory_format=torch.channels_last)
    assert not inputs["x"].is_contiguous()
    for one, other in zip(contiguous.parameters(), channels_last.parameters(), strict=True):
        assert torch.equal(one, other)


def test_resting_experts_can_wake_in_a_later_step() -> None:
    entry = entry_named("mixture_of_experts")
    model, inputs = entry.build()
    snapshot(entry, model, inputs)
    for mixture in model.mixtures:
        mixture.resting = set()
    taken = snapshot(entry, model, inputs)
    assert all(taken[f"gradient of {name}"] is not None for name, _ in model.named_parameters())


def test_a_snapshot_does_not_change_with_the_model() -> None:
    entry = entry_named("recurrent")
    model, inputs = entry.build()
    first = snapshot(entry, model, inputs)
    snapshot(entry, model, inputs)  # accumulates a second time into the same gradients
    assert_bitwise_equal(first, built_snapshot(entry))


def test_a_snapshot_keeps_no_graph() -> None:
    entry = entry_named("recurrent")
    model, inputs = entry.build()
    taken = snapshot(entry, model, inputs)
    assert not any(tensor.requires_grad for tensor in taken.values() if tensor is not None)
    model_alive = weakref.ref(model)
    del model
    assert model_alive() is None


@pytest.mark.parametrize("enabled", [False, True])
def test_deterministic_puts_the_setting_back(enabled: bool) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(enabled)
    try:
        with deterministic():
            assert torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled() == enabled
    finally:
        torch.use_deterministic_algorithms(before)


def test_a_missing_dependency_skips_and_says_how_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(pytest.skip.Exception):
        entry_named("vit").build()


DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_flipped_bit_is_seen(dtype: torch.dtype) -> None:
    values = torch.tensor([[0, 1, 0], [1, 0, 1]]).to(dtype)
    flipped = values.clone()
    flipped.view(-1)[4:5].view(torch.uint8)[0] ^= 1
    assert_bitwise_equal({"w": values}, {"w": values.clone()})
    with pytest.raises(AssertionError, match="w: 1 of 6 elements differ, first at flat index 4"):
        assert_bitwise_equal({"v": values, "w": flipped}, {"v": values, "w": values})


@pytest.mark.parametrize("name", ["loss", "gradient of head.weight", "gradient of input x"])
def test_one_flipped_bit_in_a_snapshot_is_named(name: str) -> None:
    entry = entry_named("recurrent")
    expected, actual = built_snapshot(entry), built_snapshot(entry)
    actual[name].view(-1)[:1].view(torch.uint8)[0] ^= 1
    with pytest.raises(AssertionError, match=name):
        assert_bitwise_equal(actual, expected)


def test_negative_zero_differs_from_zero_and_nan_equals_itself() -> None:
    nan = torch.tensor([torch.nan, 1.0])
    assert_bitwise_equal({"t": nan}, {"t": nan.clone()})
    with pytest.raises(AssertionError):
        assert_bitwise_equal({"t": torch.tensor(-0.0)}, {"t": torch.tensor(0.0)})


def test_conjugate_and_negative_views_compare_by_value() -> None:
    values = torch.randn(3, dtype=torch.complex64)
    assert_bitwise_equal({"t": values.conj()}, {"t": values.conj().resolve_conj()})
    imaginary = values.conj().imag  # a negative view
    assert_bitwise_equal({"t": imaginary}, {"t": imaginary})
    with pytest.raises(AssertionError):
        assert_bitwise_equal({"t": values.conj()}, {"t": values})


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        (None, r"t: None != torch.float32 \(2, 3\) strides \(3, 1\)"),
        (torch.zeros(2, 3, dtype=torch.float64), "t: torch.float64"),
        (torch.zeros(3, 2), r"t: torch.float32 \(3, 2\)"),
        (torch.zeros(3, 2).t(), r"t: torch.float32 \(2, 3\) strides \(1, 2\)"),
    ],
    ids=["missing", "dtype", "shape", "strides"],
)
def test_other_layouts_are_seen(actual: Tensor | None, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_bitwise_equal({"t": actual}, {"t": torch.zeros(2, 3)})


def test_other_names_are_seen() -> None:
    with pytest.raises(AssertionError):
        assert_bitwise_equal({"t": None}, {"t": None, "u": None})
