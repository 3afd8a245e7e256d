"""The models that `ebbtide plan` knows, and their profiles, checked by hand."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from ebbtide.errors import PolicyError
from ebbtide.planning import Hardware
from ebbtide.tools.models import (
    BUILT_IN,
    LLAMA_SHAPES,
    LanguageModel,
    read_model,
)
from ebbtide.tools.plan_tables import Study

H100 = Hardware.named("h100")


QUICK = ("fno2d", "gpt")
"""Of an operator and of a language model, one is studied in `make test`."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in BUILT_IN],
)
def test_every_built_in_model_can_be_studied(name: str) -> None:
    options = {}
    if name not in ("gpt", "llama"):
        pytest.importorskip("neuralop")
        options = {"resolution": {"fno1d": 1024, "fno3d": 32}.get(name, 64), "modes": 8}
    study = Study(read_model(name, **options), H100)
    layers = study.profile.layers
    assert sum(len(layer.storages) for layer in layers) > len(layers)
    saving = [
        layer for layer in layers if layer.storages
    ]  # an embedding looks up, and saves little
    assert all(layer.forward_s > 0 and layer.backward_s > layer.forward_s for layer in saving)
    assert study.smallest_bytes < study.predict(study.rule("keep all", 0)).peak_bytes


@pytest.mark.parametrize(
    ("size", "billions"),
    [("1b", 1.50), ("3b", 3.61), ("7b", 6.74), ("8b", 8.03), ("13b", 13.02), ("70b", 70.55)],
)
def test_llamas_have_as_many_parameters_as_published(size: str, billions: float) -> None:
    """The head of 1b and 3b is not tied here, unlike theirs: 0.26 and 0.39 billion more."""
    with torch.device("meta"):
        model = LanguageModel(LLAMA_SHAPES[size], None)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e9 == pytest.approx(billions, abs=0.006)


@pytest.mark.slow
def test_a_llama_at_8k_takes_as_long_as_its_arithmetic() -> None:
    """A block of 7b at 8,192 tokens, in bfloat16, on an H100 that does 794.5 TFLOP/s."""
    profile = Study(read_model("llama", size="7b", seq=8192), H100).profile
    tokens, width, inner = 8192, 4096, 11008
    matrices = 2 * tokens * (4 * width**2 + 3 * width * inner)
    scores = 2 * 2 * tokens**2 * width / 2  # two products, causal
    block = profile.layers[5]
    products_s = (matrices + scores) / 794.5e12
    assert products_s == pytest.approx(4.87e-3, rel=1e-2)
    assert products_s < block.forward_s < 1.6 * products_s  # norms, rotation and gate beside them
    assert 2 * products_s < block.backward_s < 1.6 * 2.3 * products_s
    # Weights, gradients and Adam's two states, each in two bytes.
    weights = 4 * width**2 + 3 * width * inner + 2 * width
    assert block.parameter_bytes == 4 * 2 * weights
    outside = 2 * 32000 * width + width  # the tokens, the head and the last norm are layers, too
    whole = sum(layer.weight_bytes for layer in profile.layers)
    assert whole == 2 * (32 * weights + outside)


# A user's own model

MODULE = """
import torch
from torch import nn

def build(resolution=64, batch=2):
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1))
              for _ in range(4)]
    return nn.Sequential(*blocks), torch.zeros(batch, 8, resolution, resolution)

def with_loss():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model, (torch.zeros(2, 4),), lambda y: y.square().mean()

def real_values():
    scale = torch.ones(1).item()
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.zeros(2, 4) * scale

def alone(): return nn.Linear(2, 2)
def bad_loss(): return nn.Linear(2, 2), torch.zeros(2, 2), 3
def raises(): raise KeyError("weights.pt")
def wants(path): return path
def bare(batch): return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.zeros(batch, 4)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_model_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    return name


def test_a_users_function_is_called_with_what_it_takes(module: str) -> None:
    task = read_model(f"{module}:build", resolution=96)
    assert task.options == {"resolution": 96, "batch": 2}
    assert task.title == f"{module}:build, resolution 96, batch 2"
    assert task.batch.shape == (2, 8, 96, 96)
    assert task.batch.device.type == "meta"
    assert read_model(f"{module}:with_loss").loss
    task = read_model(f"{module}:real_values")
    assert task.batch.device.type == "cpu"  # it needs a value, so it was called as it is
    assert not task.options
    assert read_model(f"{module}:bare", batch=5).options == {"batch": 5}


@pytest.mark.parametrize(
    ("address", "options", "message"),
    [
        ("{}:alone", {}, "must return .model, batch. .* not Linear"),
        ("{}:bad_loss", {}, "and a function last, not Linear, Tensor, int"),
        ("{}:raises", {}, "fails when it is called with .*weights.pt"),
        ("{}:wants", {}, "has a parameter 'path' without a default"),
        ("{}:bare", {}, "needs to know its batch: give --batch"),
        ("{}:alone", {"seq": 4}, "has no --seq; it takes none"),
        ("{}:build", {"resolution": 64, "seq": 64}, "has no --seq; it takes --resolution, --batch"),
        ("{}:build", {"width": 64}, "has no --width"),
        ("{}:build", {"batch": 0}, "--batch must be 1 or more"),
        ("{}:absent", {}, "no attribute 'absent'"),
        ("{}_absent:build", {}, "cannot be imported from here"),
        (":build", {}, "as module:function, such as train:build"),
    ],
)
def test_what_is_wrong_with_a_users_function_is_said(
    module: str, address: str, options: dict[str, int], message: str
) -> None:
    with pytest.raises(PolicyError, match=message):
        read_model(address.format(module), **options)
