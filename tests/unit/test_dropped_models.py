"""A model that is dropped without `detach` is freed at once, with all that its offload has."""

from __future__ import annotations

import functools
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide import ActivationPolicy, OffloadHandle, PolicyError, WeightPolicy
from ebbtide.devices import SimulatedDevice
from ebbtide.schedule import default
from ebbtide.stores import PinnedStore
from loops import on_device
from waiting import wait_until

NUM_LAYERS = 4
EVERYTHING = ActivationPolicy(min_bytes=1)
Offload = Callable[[nn.Module], OffloadHandle]


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 32), nn.GELU())


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))


def _wrap(model: nn.Module) -> OffloadHandle:
    wrapped = ebbtide.wrap_forward_with_offload(model.forward, activations=EVERYTHING)
    model.forward = wrapped  # type: ignore[method-assign]
    handle = wrapped.handle
    assert isinstance(handle, OffloadHandle)
    return handle


def _replaced_after(model: nn.Module) -> OffloadHandle:
    handle = ebbtide.offload(model, activations=EVERYTHING)
    known = weakref.ref(model)

    def forward(x: Tensor) -> Tensor:
        alive = known()
        assert alive is not None
        return type(alive).forward(alive, x)  # type: ignore[no-any-return]

    model.forward = forward  # type: ignore[method-assign]
    return handle


def _on_device(model: nn.Module) -> OffloadHandle:
    """Weights that really come and go, and layers that use them once more in backward."""
    device = SimulatedDevice(0, eagerness=0.1)
    with on_device(device, lambda: PinnedStore(device, slab_bytes=2**16)):
        policy = ActivationPolicy(mode="recompute")
        return ebbtide.offload(model, activations=policy, weights=WeightPolicy())


def _of(**arguments: Any) -> Offload:
    return functools.partial(ebbtide.offload, **arguments)


WAYS: dict[str, Offload] = {
    "default": _of(activations=EVERYTHING),
    "weights": _of(activations=EVERYTHING, weights=WeightPolicy()),
    "only weights": _of(weights=WeightPolicy()),
    "schedule": _of(activations=EVERYTHING, schedule=default(2, NUM_LAYERS)),
    "trace": _of(activations=EVERYTHING, trace=True),
    "recompute": _of(activations=ActivationPolicy(mode="recompute")),
    "recompute+offload": _of(activations=ActivationPolicy(mode="recompute+offload", min_bytes=1)),
    "on a device": _on_device,
    "wrapped": _wrap,
    "bypassed": _replaced_after,
}


@pytest.fixture(autouse=True, scope="module")
def without_collector() -> Iterator[None]:
    """What goes, goes when its last reference does."""
    _train(_model())  # the first step imports what it needs, and frames of that hold the model
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _count_files() -> int:
    """Counts the open files that have no name, as those of the disk store, and their mappings."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found += "(deleted)" in os.readlink(descriptor)
        except OSError:  # it was the descriptor of this directory
            continue
    return found + Path("/proc/self/maps").read_text().count("(deleted)")


def _count_threads() -> int:
    return sum(thread.name.startswith("ebbtide") for thread in threading.enumerate())


def _wait_for(threads: int, files: int) -> None:
    """Waits until no more threads and files than these are there. Threads end by themselves."""
    wait_until(lambda: _count_threads() <= threads, "threads remain")
    wait_until(lambda: _count_files() <= files, "files remain")


def _train(model: nn.Module) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 32)).sum()
        loss.backward()
        optimizer.step()
    return loss


@pytest.mark.parametrize("order", ["model", "handle", "keeps handle", "keeps loss"])
@pytest.mark.parametrize("way", WAYS)
def test_a_dropped_model_is_freed_at_once(way: str, order: str) -> None:
    threads, files = _count_threads(), _count_files()
    model = _model()
    handle: OffloadHandle | None = WAYS[way](model)
    loss: Tensor | None = _train(model)
    parts: list[weakref.ref[Any]] = [weakref.ref(each) for each in model.modules()]
    if order == "handle":
        handle = None
    if order != "keeps loss":  # whose graph holds the parameters
        parts += [weakref.ref(each) for each in model.parameters()]
        loss = None
    del model
    assert [part() for part in parts if part() is not None] == []
    if order == "model":
        handle = None
    del loss
    _wait_for(threads, files)
    if handle is not None:
        assert handle.stats.num_saved > 0
        assert str(handle.inspect()) and repr(handle) and str(handle.explain())
        handle.detach()


def test_a_graph_that_outlives_its_model_has_its_gradients() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    model = _model()
    model(x).sum().backward()
    expected, x.grad = x.grad, None
    handle = ebbtide.offload(model, activations=EVERYTHING, weights=WeightPolicy())
    loss = model(x).sum()
    del model, handle
    loss.backward()
    assert expected is not None and x.grad is not None and torch.equal(x.grad, expected)


def test_the_last_graph_after_detach_takes_the_store_with_it() -> None:
    """No forward, backward or question to the handle comes any more: a thread looks after it."""
    model, device = _model(), SimulatedDevice(0)
    store = PinnedStore(device, slab_bytes=2**16)
    with on_device(device, lambda: store):
        handle = ebbtide.offload(model, activations=EVERYTHING)
    loss = model(torch.randn(4, 32)).sum()
    handle.detach()
    assert store.host_capacity_bytes > 0
    del loss
    wait_until(lambda: store.host_capacity_bytes == 0, "the store stayed open")


def test_the_offload_stays_in_force_without_its_handle() -> None:
    model = _model()
    told = weakref.ref(ebbtide.offload(model, activations=EVERYTHING))
    assert told() is None
    with pytest.raises(PolicyError):
        ebbtide.offload(model)


def test_a_forward_without_its_model_says_so() -> None:
    model = _model()
    ebbtide.offload(model, activations=EVERYTHING)
    forward = model.forward
    del model
    with pytest.raises(PolicyError):
        forward(torch.randn(4, 32))


def test_a_wrapped_forward_keeps_a_model_that_does_not_own_it() -> None:
    wrapped = ebbtide.wrap_forward_with_offload(_model().forward, activations=EVERYTHING)
    wrapped(torch.randn(4, 32)).sum().backward()
    assert wrapped.handle.stats.num_saved > 0


def test_many_small_models_leave_nothing() -> None:
    threads, files = _count_threads(), _count_files()
    for _ in range(30):
        model = _model()
        ebbtide.offload(model, activations=EVERYTHING, weights=WeightPolicy())
        _train(model)
    del model
    _wait_for(threads, files)
