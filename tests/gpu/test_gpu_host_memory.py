"""Page-locked memory: exact, reused, and gone after `detach`."""

import contextlib
import warnings

import pytest
import torch

import ebbtide
from ebbtide.stores import PinnedStore
from gpu_bench import (
    INFLIGHT,
    OFFLOADED_BYTES,
    SIZE_BYTES,
    TIGHT,
    batch,
    needs_accelerator,
    needs_registration,
    take_step,
    tower,
    transfers_of,
    unregister,
)


def _store(handle: ebbtide.OffloadHandle) -> PinnedStore:
    store = transfers_of(handle).store
    assert isinstance(store, PinnedStore)
    return store


def _blocks(store: PinnedStore) -> list[torch.Tensor]:
    return [slab.memory.tensor for slab in store._slabs]


@needs_registration
def test_page_locked_until_detach(device: torch.device) -> None:
    model, x = tower(device), batch(device)
    handle = ebbtide.offload(model, activations=TIGHT, store="host")
    store = _store(handle)
    for _ in range(3):
        take_step(model, x)
        assert _blocks(store)
        assert all(block.is_pinned() for block in _blocks(store))
    addresses = [block.data_ptr() for block in _blocks(store)]
    handle.detach()
    assert store.host_capacity_bytes == 0
    assert not any(unregister(address, device) for address in addresses)


@needs_registration
def test_detach_gives_back_what_a_live_graph_holds_when_it_dies(device: torch.device) -> None:
    model, x = tower(device), batch(device)
    handle = ebbtide.offload(model, activations=TIGHT, store="host")
    store = _store(handle)
    loss = model(x).sum()
    addresses = [block.data_ptr() for block in _blocks(store)]
    handle.detach()
    assert store.host_capacity_bytes > 0
    loss.backward()
    assert store.host_capacity_bytes == 0
    assert not any(unregister(address, device) for address in addresses)


@needs_registration
def test_registration_is_seen_while_it_lasts(device: torch.device) -> None:
    """The other tests' look at the registration can say yes."""
    model, x = tower(device), batch(device)
    handle = ebbtide.offload(model, activations=TIGHT, store="host")
    take_step(model, x)
    (block,) = _blocks(_store(handle))
    assert unregister(block.data_ptr(), device)
    # The store will unregister it once more, which the device refuses and nobody minds.
    with contextlib.suppress(OSError):
        handle.detach()
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)  # takes back the error, which the next kernel would report


@needs_registration
def test_second_step_has_exactly_what_it_needs(device: torch.device) -> None:
    """Memory that is page-locked where it is. Elsewhere torch gives it, in powers of two."""
    model, x = tower(device), batch(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # "the system refused to page-lock"
        with ebbtide.offload(model, activations=TIGHT, store="host") as handle:
            for _ in range(3):
                take_step(model, x)
            # In whole pages already.
            assert handle.stats.host_capacity_bytes == OFFLOADED_BYTES


@pytest.mark.parametrize("store", ["host", "disk"])
@needs_accelerator
def test_copies_go_to_and_from_page_locked_memory(
    store: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = tower(device), batch(device)
    with ebbtide.offload(model, activations=TIGHT, store=store) as handle:
        moving = transfers_of(handle).device
        seen: list[bool] = []
        down, up = moving.copy_down, moving.copy_up
        monkeypatch.setattr(
            moving, "copy_down", lambda t, s, *e: seen.append(t.is_pinned()) or down(t, s, *e)
        )
        monkeypatch.setattr(
            moving, "copy_up", lambda t, s, *e: seen.append(s.is_pinned()) or up(t, s, *e)
        )
        take_step(model, x)
        monkeypatch.undo()
    # Everything goes down, and up again but for what was not gone yet.
    assert len(seen) >= 2 * OFFLOADED_BYTES // SIZE_BYTES - INFLIGHT
    assert all(seen)
