"""Profiles from fake tensors: the bytes are those that the engine offloads."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from neuralop.models import FNO
from torch import Tensor, nn

import ebbtide
from architectures import UNet
from ebbtide import ActivationPolicy
from ebbtide.planning import (
    Hardware,
    StepProfile,
    StorageId,
)
from plan_cases import engine_name_of, fake_profile

H100 = Hardware.named("h100")


def perceptron(depth: int = 3) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(depth)]
    return nn.Sequential(*blocks)


class Block(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(heads.transpose(1, 2).reshape(x.shape)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """With tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class NormNet(nn.Module):
    """Convolutions, batch norms and changes in place, shared between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x) * block(x)  # each is called twice
        return x


def fno() -> nn.Module:
    return FNO(n_modes=(6, 6), hidden_channels=8, in_channels=1, out_channels=1, n_layers=3)


CASES: dict[str, tuple[Any, Any]] = {
    "perceptron": (perceptron, lambda: torch.randn(64, 16)),
    "gpt": (GPT, lambda: torch.randint(0, 50, (2, 8))),
    "fno": (fno, lambda: torch.randn(2, 1, 16, 16)),
    "unet": (UNet, lambda: torch.randn(2, 3, 16, 16)),
    "norms": (NormNet, lambda: torch.randn(2, 4, 8, 8)),
}


def profile_of(model: nn.Module, batch: Any, min_bytes: int = 1, **more: Any) -> StepProfile:
    return fake_profile(model, batch, H100, min_bytes=min_bytes, **more)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers that ebbtide finds."""
    with ebbtide.offload(model) as handle:
        return [model.get_submodule(name) for name in handle.layers]


def saved_bytes(profile: StepProfile) -> dict[tuple[int | None, int], int]:
    """The bytes of each storage, by the name that the engine has for it if all leave."""
    names = engine_name_of(profile)
    return {tuple(names[name]): profile.storage(name).size_bytes for name in names}


def engine_bytes(
    model: nn.Module, batch: Tensor, min_bytes: int
) -> tuple[Counter[tuple[int | None, int]], dict[tuple[int | None, int], tuple[int | None, ...]]]:
    """What the engine really offloads: bytes of each storage, and who else saves it.

    Several views gathered from one storage have one number. Together they are the storage here.
    """
    policy = ActivationPolicy(min_bytes=min_bytes, rebuild=False)
    with ebbtide.offload(model, layers=layers_of(model), activations=policy) as handle:
        model(batch).sum().backward()
        storages = handle.inspect().storages
        assert {each.decision for each in storages} == {"offload"}
        assert handle.stats.offloaded_bytes == sum(each.size_bytes for each in storages)
    sizes: Counter[tuple[int | None, int]] = Counter()
    firsts: dict[tuple[int | None, int], tuple[int | None, int]] = {}
    for each in storages:  # a view may first be saved where another view of the same has a name
        name = firsts.get((each.layer, each.number), (each.layer, each.number))
        own = [(place if place >= 0 else None, number) for place, number in each.numbers]
        firsts.update(dict.fromkeys(own, name))
        sizes[name] += each.size_bytes
    return sizes, {(each.layer, each.number): each.shared_by for each in storages}


@pytest.mark.parametrize("min_bytes", [1, 1100])
@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_that_the_engine_offloads(name: str, min_bytes: int) -> None:
    torch.manual_seed(0)
    make_model, make_batch = CASES[name]
    model, batch = make_model(), make_batch()
    profile = profile_of(model, batch, min_bytes)
    sizes, shared = engine_bytes(model, batch, min_bytes)
    assert saved_bytes(profile) == sizes
    names = engine_name_of(profile)
    calls = itertools.count()
    again = {
        (None if layer.between else call, tuple(names[each.same_as]))
        for layer in profile.layers
        for call in (None if layer.between else next(calls),)
        for each in layer.storages
        if each.same_as is not None
    }
    assert again == {(other, key) for key, others in shared.items() for other in others}


@pytest.mark.parametrize("frozen", [False, True])
def test_copies_of_weights_made_by_autocast_are_no_activations(frozen: bool) -> None:
    model, batch = perceptron(), torch.randn(64, 16)
    model[1].requires_grad_(not frozen)
    with torch.autocast("cpu", torch.bfloat16):
        found = saved_bytes(profile_of(model, batch))
        sizes, _ = engine_bytes(model, batch, 1)
    assert found == sizes


@pytest.mark.parametrize("name", CASES)
def test_what_is_outside_layers_is_fixed(name: str) -> None:
    """A batch that nothing saves, buffers, and four times the parameters there.

    That is the weights, their gradients and the two states of Adam. The layers have their own.
    """
    torch.manual_seed(0)
    make_model, make_batch = CASES[name]
    model, batch = make_model(), make_batch()
    profile = profile_of(model, batch)
    inside = {parameter for each in layers_of(model) for parameter in each.parameters()}
    outer = sum(each.nbytes for each in set(model.parameters()) - inside)
    inner = sum(each.nbytes for each in inside)
    batch_bytes = batch.nbytes if name == "fno" else 0
    buffers = sum(each.nbytes for each in model.buffers())
    assert profile.fixed_bytes == batch_bytes + buffers + 4 * outer
    assert sum(layer.weight_bytes for layer in profile.layers) == inner
    assert sum(layer.parameter_bytes for layer in profile.layers) == 4 * inner


class Sliced(nn.Module):
    """Two parameters in one storage, and small views of something large."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(2, 16)
        self.one, self.other = nn.Parameter(both[0]), nn.Parameter(both[1])

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.one
        return x[:1].exp() * self.other + x[1:2] * x[2:3]


def test_parameters_in_one_storage_and_small_views() -> None:
    model, batch = nn.Sequential(Sliced()), torch.randn(64, 16)
    profile = fake_profile(model, batch, H100, layers=[model[0]], min_bytes=1100)
    (layer,) = profile.layers
    assert layer.weight_bytes == layer.gradient_bytes == 2 * 16 * 4
    assert layer.optimizer_bytes == 2 * layer.weight_bytes
    # The batch, and the product, of which only views are saved, each smaller than 1100 bytes.
    assert saved_bytes(profile) == {(0, 0): batch.nbytes, (0, 1): batch.nbytes}


def test_weights_without_gradients_have_no_state() -> None:
    model = perceptron()
    model[0].requires_grad_(False)
    layers = profile_of(model, torch.randn(4, 16), optimizer_states=1).layers
    assert [(each.gradient_bytes, each.optimizer_bytes) for each in layers] == [
        (0, 0),
        (2176, 2176),  # 2 (16 x 16 + 16) float32
        (2176, 2176),
    ]


def test_the_batch_may_not_leave() -> None:
    layers = profile_of(perceptron(), torch.randn(4, 16)).layers
    assert [[each.may_leave for each in layer.storages] for layer in layers] == [
        [False, True, True],
        [True, True, True],
        [True, True, True],
    ]
    assert [(layer.input_bytes, layer.input_same_as) for layer in layers] == [
        (4 * 16 * 4, StorageId(index, 0)) for index in range(3)
    ]


def test_the_model_stays_as_it_is() -> None:
    """Neuralop caches a grid in the model, and batch norms change their buffers."""
    for make_model, make_batch in (CASES["fno"], CASES["norms"], CASES["gpt"]):
        torch.manual_seed(0)
        model, batch = make_model(), make_batch()
        tensors = [*model.parameters(), *model.buffers()]
        expected = [each.detach().clone() for each in tensors]
        before = torch.get_rng_state()
        profile_of(model, batch)
        assert torch.equal(torch.get_rng_state(), before)
        after = [*model.parameters(), *model.buffers()]
        assert all(map(torch.equal, after, expected))
        assert all(one is other for one, other in zip(after, tensors, strict=True))
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not any(module._forward_hooks for module in model.modules())
        model(batch).sum().backward()
        assert all(type(each.grad) is Tensor for each in model.parameters())


def test_a_model_without_memory() -> None:
    """3 x 2 matrices of 64 GiB each on the meta device, for a batch of 64 rows."""
    width = 2**17
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3)]
        model = nn.Sequential(*blocks)
        batch = torch.empty(64, width)
    profile = fake_profile(model, batch, H100, layers=blocks)
    assert [layer.weight_bytes for layer in profile.layers] == [4 * (width**2 + width)] * 3
    # The input, and the ReLU's output, which is the next layer's input.
    assert saved_bytes(profile) == {(0, 0): 2**25, (0, 1): 2**25, (1, 1): 2**25, (2, 1): 2**25}


def test_other_batches_and_losses() -> None:
    model = perceptron()
    target = torch.randn(4, 16)  # real, and closed over

    def loss(output: Tensor) -> Tensor:
        return F.mse_loss(output, target)

    named = profile_of(model, {"input": torch.randn(4, 16)}, loss=loss)
    assert named == profile_of(model, (torch.randn(4, 16),), loss=loss)
    # The loss is none of the model's forward. The difference needs the output, which is alive
    # anyway, and the target; and the backward of the loss makes a gradient. The loss and its
    # gradient are one number each.
    assert not any(each.between for each in named.layers)
    assert named.loss_working_bytes == 3 * 4 * 16 * 4 + 2 * 4


def test_a_batch_of_a_class_of_its_own_is_given_to_the_model_whole() -> None:
    """As in training, and as `ebbtide.verify` does."""

    @dataclasses.dataclass
    class Fields:
        x: Tensor

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = perceptron()

        def forward(self, fields: Fields) -> Tensor:
            y: Tensor = self.blocks(fields.x)
            return y

    x = torch.randn(8, 16)
    whole, plain = Net(), perceptron()
    found = fake_profile(whole, Fields(x), H100, layers=[*whole.blocks])
    expected = fake_profile(plain, x, H100, layers=[*plain])
    assert [each.name for each in found.layers] == ["blocks.0", "blocks.1", "blocks.2"]
    assert found.layers[1].storages == expected.layers[1].storages


def test_what_is_saved_before_a_layer_saves_it_is_shared() -> None:
    class Saved(nn.Module):
        def __init__(self, before: bool) -> None:
            super().__init__()
            self.layer, self.before = nn.Linear(16, 16), before

        def forward(self, x: Tensor) -> Tensor:
            hidden = x.exp()
            y = hidden.sin() if self.before else 0  # saves `hidden`, as the layer does
            return self.layer(hidden + 1 if not self.before else hidden) + y

    for before, same_as in ((True, StorageId(0, 0)), (False, None)):
        model = Saved(before)
        profile = fake_profile(
            model, torch.ones(4, 16).requires_grad_(), H100, layers=[model.layer]
        )
        (storage,) = profile.layers[1].storages
        assert storage.size_bytes == 4 * 16 * 4
        assert storage.same_as == same_as
