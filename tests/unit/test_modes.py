"""Steps under modes of torch, which see operations and may change their results: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ebbtide
from ebbtide import ActivationPolicy, WeightPolicy
from zoo import assert_bitwise_equal

WIDTH = 16
STEPS = 5
Mode = Callable[[], AbstractContextManager[object]]


class Rounding(TorchDispatchMode):
    """Rounds what some kernels give, as an emulation of another number format does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        if func in (aten.gelu.default, aten.tanh.default, aten.sigmoid.default, aten.addmm.default):
            return result.bfloat16().to(result.dtype)
        return result


class Swapping(TorchFunctionMode):
    """Calls one function in the place of another, and the other way round."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.gelu, F.silu):
            return F.silu(args[0]) if func is F.gelu else F.gelu(args[0])
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        gated = F.gelu(torch.tanh(h) * torch.sigmoid(h))
        return x + self.leave(gated) * gated


class Leaving(Block):
    """Computes under a mode, and saves the result when it has left it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        with Rounding():
            h = F.gelu(h)
        return x + self.leave(h) * h


def train(
    kind: type[nn.Module], mode: Mode, first: int, where: str, settings: dict[str, Any]
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[kind() for _ in range(3)])
    handle = ebbtide.offload(model, layers=list(model), **settings) if settings else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
        modes = (mode if each in where and number >= first else nullcontext for each in "fb")
        forward_mode, backward_mode = (each() for each in modes)
        with forward_mode:
            loss = model(batch).square().mean()
        with backward_mode:
            torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        handle.detach()
    return {name: each.detach() for name, each in model.named_parameters()}


SETTINGS: dict[str, dict[str, Any]] = {
    "rebuild": {"activations": ActivationPolicy(min_bytes=1, rebuild=True)},
    "recompute": {"activations": ActivationPolicy(min_bytes=1, mode="recompute")},
    "weights": {"weights": WeightPolicy(min_bytes=1)},
}


@pytest.mark.filterwarnings("ignore:layers that are not recomputed:RuntimeWarning")
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("where", ["f", "fb", "b"], ids=["forward", "step", "backward"])
@pytest.mark.parametrize("first", [0, 2], ids=["always", "later"])
@pytest.mark.parametrize("mode", [Rounding, Swapping])
def test_a_mode_changes_results(mode: Mode, first: int, where: str, settings: str) -> None:
    run = (Block, mode, first, where)
    assert_bitwise_equal(train(*run, SETTINGS[settings]), train(*run, {}))


@pytest.mark.filterwarnings("ignore:layers that are not recomputed:RuntimeWarning")
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_mode_ends_before_its_result_is_saved(settings: str) -> None:
    run = (Leaving, nullcontext, 0, "")
    assert_bitwise_equal(train(*run, SETTINGS[settings]), train(*run, {}))
