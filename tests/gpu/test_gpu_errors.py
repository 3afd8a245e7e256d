"""Errors half-way, out-of-memory above all, leave a model that works and a store that is empty."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from gpu_bench import (
    DRY_RUN,
    TIGHT,
    assert_at_rest,
    batch,
    fail,
    mean_square,
    take_step,
    tower,
    transfers_of,
)
from zoo import assert_bitwise_equal

# A CPU has no error of its own for it.
OUT_OF_MEMORY: type[BaseException] = RuntimeError if DRY_RUN else torch.OutOfMemoryError
TOO_MUCH_BYTES = 2**50


def _exhaust(device: torch.device) -> None:
    torch.empty(TOO_MUCH_BYTES, dtype=torch.uint8, device=device)


class Planted(torch.autograd.Function):
    """Does nothing, but runs `action` on the way forward or back."""

    @staticmethod
    def forward(ctx, x, ahead, behind):
        ctx.behind = behind
        ahead()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.behind()
        return gradient, None, None


class Fuse(nn.Module):
    """A layer that runs `ahead` in its forward and `behind` in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead: Callable[[], None] = _nothing
        self.behind: Callable[[], None] = _nothing

    def forward(self, x: Tensor) -> Tensor:
        return Planted.apply(x, self.ahead, self.behind)

    def replace(self) -> None:
        self.ahead = self.behind = _nothing


def _nothing() -> None:
    pass


def _fused_tower(device: torch.device) -> tuple[nn.Sequential, Fuse]:
    """Three layers, the fuse, three layers."""
    layers, fuse = list(tower(device)), Fuse()
    return nn.Sequential(*layers[:3], fuse, *layers[3:]), fuse


@pytest.mark.parametrize("where", ["ahead", "behind"], ids=["in forward", "in backward"])
def test_out_of_memory_leaves_the_model_usable(where: str, device: torch.device) -> None:
    x = batch(device)
    expected = take_step(_fused_tower(device)[0], x)
    model, fuse = _fused_tower(device)
    with ebbtide.offload(model, activations=TIGHT) as handle:
        for _ in range(3):
            setattr(fuse, where, lambda: _exhaust(device))
            message = fail(lambda: take_step(model, x), OUT_OF_MEMORY, device)
            assert "memory" in message
            assert_at_rest(handle)
            fuse.replace()
            assert_bitwise_equal(take_step(model, x), expected)
            assert_at_rest(handle)


def test_out_of_memory_at_a_reload(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has no room for what comes back; with room again, training goes on."""
    model, x = tower(device), batch(device)
    expected = take_step(model, x)
    with ebbtide.offload(model, activations=TIGHT) as handle:
        assert_bitwise_equal(take_step(model, x), expected)
        store = transfers_of(handle).store
        reload, calls = store.reload, []

        def refuse_the_fourth(*arguments: object) -> object:
            calls.append(arguments)
            if len(calls) == 4:
                raise torch.OutOfMemoryError("planted: out of memory")
            return reload(*arguments)

        monkeypatch.setattr(store, "reload", refuse_the_fourth)
        message = fail(lambda: take_step(model, x), torch.OutOfMemoryError, device)
        assert "planted" in message
        monkeypatch.undo()
        calls.clear()
        assert_at_rest(handle)
        assert_bitwise_equal(take_step(model, x), expected)
        assert_at_rest(handle)


def test_out_of_memory_after_detach(device: torch.device) -> None:
    """A graph outlives its handle, and its backward fails: the store is closed all the same."""
    x = batch(device)
    model, fuse = _fused_tower(device)
    expected = take_step(model, x)
    fuse.behind = lambda: _exhaust(device)
    handle = ebbtide.offload(model, activations=TIGHT)
    losses = [mean_square(model(x))]
    handle.detach()
    fail(lambda: losses.pop().backward(), OUT_OF_MEMORY, device)
    assert_at_rest(handle)
    assert transfers_of(handle).store.host_capacity_bytes == 0
    fuse.replace()
    assert_bitwise_equal(take_step(model, x), expected)


@pytest.mark.parametrize("where", ["ahead", "behind"], ids=["in forward", "in backward"])
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_exception_half_way(error: type[BaseException], where: str, device: torch.device) -> None:
    def raise_error() -> None:
        raise error("half-way")

    x = batch(device)
    model, fuse = _fused_tower(device)
    expected = take_step(model, x)
    with ebbtide.offload(model, activations=TIGHT) as handle:
        setattr(fuse, where, raise_error)
        assert "half-way" in fail(lambda: take_step(model, x), error, device)
        assert_at_rest(handle)
        fuse.replace()
        assert_bitwise_equal(take_step(model, x), expected)
        assert_at_rest(handle)


def test_modification_in_place_is_noticed(device: torch.device) -> None:
    class Modifies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(256, 256)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x)
            output = hidden.sin()
            with torch.no_grad():
                hidden.add_(1)
            return output

    model = Modifies().to(device)
    with ebbtide.offload(model, activations=TIGHT) as handle:
        message = fail(
            lambda: take_step(model, batch(device)), ebbtide.SavedTensorModifiedError, device
        )
        assert "version 0 is at version 1" in message
        assert_at_rest(handle)
