"""Where bytes can go from an accelerator, and what happens when there is no room."""

import pytest
import torch

import ebbtide
from ebbtide import StoreFullError
from gpu_bench import (
    INFLIGHT,
    MIB,
    OFFLOADED_BYTES,
    SIZE_BYTES,
    STORES,
    TIGHT,
    assert_at_rest,
    assert_parity,
    batch,
    fail,
    needs_accelerator,
    take_step,
    tower,
    transfers_of,
)
from zoo import assert_bitwise_equal


@pytest.mark.parametrize("store", STORES)
def test_parity_and_tiers(store: str, device: torch.device) -> None:
    stats = assert_parity(tower(device), batch(device), store=store)
    assert stats.offloaded_bytes == OFFLOADED_BYTES
    # Backward finds the last ones where they were if their copies down are not complete.
    assert stats.reloaded_bytes >= OFFLOADED_BYTES - INFLIGHT * SIZE_BYTES
    on_disk = store == "disk"  # "tiered" without a budget has all of the host's memory
    assert stats.peak_disk_bytes == (OFFLOADED_BYTES if on_disk else 0)
    assert stats.peak_host_bytes == (0 if on_disk else OFFLOADED_BYTES)


@needs_accelerator
def test_tiered_with_a_small_budget_uses_both_tiers(device: torch.device) -> None:
    budget_bytes = 4 * MIB
    stats = assert_parity(tower(device), batch(device), store="tiered", host_budget=budget_bytes)
    # A quarter of the budget is chunks on the way to disk. The rest, 3 MiB, has room for six
    # activations of 512 KiB; the other six go to disk.
    assert stats.peak_host_bytes == 6 * SIZE_BYTES
    assert stats.peak_disk_bytes == 6 * SIZE_BYTES
    assert stats.host_capacity_bytes <= budget_bytes


@needs_accelerator
def test_tiered_learns_to_send_what_comes_first_to_disk(device: torch.device) -> None:
    model, x = tower(device), batch(device)
    expected = take_step(model, x)
    with ebbtide.offload(
        model, activations=TIGHT, store="tiered", host_budget="4MiB", trace=True
    ) as handle:
        for _ in range(3):
            assert_bitwise_equal(take_step(model, x), expected)
            back = [event.layer for event in handle.trace.events if event.what == "reload"]
        assert back[-1] == 0  # what left first is wanted last
        assert handle.stats.peak_disk_bytes > 0


@needs_accelerator
def test_budget_that_is_too_small(device: torch.device) -> None:
    model, x = tower(device), batch(device)
    expected = take_step(model, x)
    handle = ebbtide.offload(model, activations=TIGHT, store="host", host_budget="2MiB")
    message = fail(lambda: take_step(model, x), StoreFullError, device)
    assert "host_budget allows 2.0 MiB" in message
    assert_at_rest(handle)
    # A quarter of the rows takes a quarter of the memory: that fits into the same store.
    small = batch(device, rows=128)
    assert take_step(model, small)["output"].shape == (128, 256)
    handle.detach()
    assert transfers_of(handle).store.host_capacity_bytes == 0
    assert_bitwise_equal(take_step(model, x), expected)


def test_steps_of_changing_sizes(device: torch.device) -> None:
    """Slabs, extents and chunks are cut anew; what comes back is right all the same."""
    model = tower(device)
    inputs = [batch(device, rows=rows, seed=rows) for rows in (512, 64, 700, 512, 1, 2000, 64)]
    expected = [take_step(model, x) for x in inputs]
    for store in STORES:
        with ebbtide.offload(model, activations=TIGHT, store=store) as handle:
            for x, plain in zip(inputs, expected, strict=True):
                assert_bitwise_equal(take_step(model, x), plain)
            assert_at_rest(handle)
