"""Models that come from the CPU or from meta, and need not fit on the device."""

from __future__ import annotations

import copy
import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from gpu_bench import mean_square, needs_accelerator
from zoo import assert_bitwise_equal

pytestmark = needs_accelerator

LAYERS, WIDTH, ROWS = 8, 256, 64
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).tanh()


class Model(nn.Module):
    """Blocks between an embedding and a head that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.outside = nn.Linear(WIDTH, 64, bias=False)
        self.outside.weight = self.inside.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.inside(words)
        for block in self.blocks:
            x = block(x)
        return self.outside(x)


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def words_on(device: torch.device) -> Tensor:
    return (torch.arange(ROWS) * 7 % 64).to(device)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, words: Tensor) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        mean_square(model(words)).backward()
        optimizer.step()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().cpu().clone() for name, each in model.state_dict().items()}


def expected_after_training(device: torch.device) -> dict[str, Tensor]:
    """The same training of a model that was moved to the device as a whole first."""
    model = build().to(device)
    with ebbtide.offload(model, weights=ebbtide.WeightPolicy()):
        train(model, torch.optim.AdamW(model.parameters()), words_on(device))
    return values(model)


@pytest.mark.parametrize("made", ["before", "after"])
def test_a_model_on_the_cpu_trains_on_the_device(made: str, device: torch.device) -> None:
    expected = expected_after_training(device)
    model = build()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    gc.collect()
    before_bytes = torch.accelerator.memory_allocated(device)
    handle = ebbtide.offload(model, weights=ebbtide.WeightPolicy(), device=device.type)
    placed_bytes = torch.accelerator.memory_allocated(device) - before_bytes
    # The embedding, which programs ask for the model's device, and the buffers; no layer.
    assert placed_bytes < 2 * LAYER_BYTES
    if made == "after":
        optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, words_on(device))
    assert_bitwise_equal(values(model), expected)
    handle.detach()
    assert {each.device.type for each in model.state_dict().values()} == {"cpu"}
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), parameters, strict=True))
    assert_bitwise_equal(values(model), expected)


def test_all_of_it_goes_to_the_device_where_nothing_rests(device: torch.device) -> None:
    plain = build().to(device)
    train(plain, torch.optim.AdamW(plain.parameters()), words_on(device))
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    with ebbtide.offload(model, activations=ebbtide.ActivationPolicy(), device=device.type):
        assert {each.device.type for each in model.state_dict().values()} == {device.type}
        train(model, optimizer, words_on(device))
        assert_bitwise_equal(values(model), values(plain))


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def test_a_model_on_meta_is_made_module_by_module(device: torch.device) -> None:
    source = build()
    given = dict(source.named_modules())
    model = on_meta()
    names = {module: name for name, module in model.named_modules()}
    optimizer = torch.optim.AdamW(model.parameters())

    def give(module: nn.Module) -> None:
        own = {**given[names[module]]._parameters, **given[names[module]]._buffers}
        with torch.no_grad():
            for name, each in {**module._parameters, **module._buffers}.items():
                if each is not None:
                    each.copy_(own[name])

    with ebbtide.offload(
        model, weights=ebbtide.WeightPolicy(), device=device.type, materialize=give
    ):
        assert model.outside.weight is model.inside.weight
        train(model, optimizer, words_on(device))
        assert_bitwise_equal(values(model), expected_after_training(device))


def test_a_model_on_meta_is_read_from_files(device: torch.device, tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    saved = values(build())
    norms = {name: each for name, each in saved.items() if "norm" in name}
    others = saved.keys() - norms.keys() - {"outside.weight"}  # which is tied
    save_file(norms, tmp_path / "a.safetensors")
    save_file({name: saved[name] for name in others}, tmp_path / "b.safetensors")
    model = on_meta()
    with ebbtide.offload(
        model, weights=ebbtide.WeightPolicy(), device=device.type, materialize=tmp_path
    ):
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer, words_on(device))
        assert_bitwise_equal(values(model), expected_after_training(device))
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(ebbtide.PolicyError, match=r"blocks\.0\.norm\.weight"):
        ebbtide.offload(on_meta(), device=device.type, materialize=tmp_path)


def test_state_follows_its_weights(device: torch.device) -> None:
    """An optimizer that has stepped on the device goes on where the weights are."""
    model, expected = build().to(device), build().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, words_on(device))
    other = torch.optim.AdamW(expected.parameters())
    train(expected, other, words_on(device))
    with ebbtide.offload(expected, weights=ebbtide.WeightPolicy()):
        other.load_state_dict(copy.deepcopy(other.state_dict()))
        train(expected, other, words_on(device))
    with ebbtide.offload(model, weights=ebbtide.WeightPolicy()):
        train(model, optimizer, words_on(device))
        resting = [p for p in model.parameters() if p.device.type == "cpu"]
        assert resting
        assert all(optimizer.state[p]["exp_avg"].device.type == "cpu" for p in resting)
    assert_bitwise_equal(values(model), values(expected))


def test_a_model_that_has_no_room_stays_where_it_was(device: torch.device) -> None:
    model = build()
    expected = values(model)
    with pytest.raises(ebbtide.PolicyError):
        ebbtide.offload(build().to(device), device="cpu")
    with pytest.raises(ebbtide.StoreFullError):
        ebbtide.offload(
            model, weights=ebbtide.WeightPolicy(), device=device.type, host_budget=LAYER_BYTES
        )
    assert {each.device.type for each in model.state_dict().values()} == {"cpu"}
    assert_bitwise_equal(values(model), expected)
    train(model, torch.optim.AdamW(model.parameters()), words_on(torch.device("cpu")))
