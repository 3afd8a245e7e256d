"""Device memory, page-locked memory, and copies between the two."""

import math
import time

import pytest
import torch

import softdevice
from soft_bench import LONG, PORTFOLIO, on, pinned

SIZE = 4096
KIB = 2**10


def test_a_freed_block_comes_back_on_its_stream_and_is_poisoned(device: torch.device) -> None:
    x = torch.ones(SIZE, device=device)
    address = x.data_ptr()
    del x
    y = torch.empty(SIZE, device=device)
    assert y.data_ptr() == address
    assert y.isnan().all().item()


def test_what_is_queued_still_reads_a_freed_block(device: torch.device) -> None:
    """The block is poisoned when it is handed out again, after all that was queued before."""
    for order in PORTFOLIO:
        softdevice.choose_order(order)
        x = torch.ones(SIZE, device=device)
        y = x + 1
        del x
        z = torch.empty(SIZE, device=device)
        assert y.sum().item() == 2 * SIZE, order
        del y, z


def _free_while_another_stream_reads(device: torch.device, recorded: bool) -> float:
    source, target = torch.ones(SIZE, device=device), pinned(SIZE)
    copying = torch.Stream(device=device)
    copying.wait_stream(torch.accelerator.current_stream())
    with on(copying):
        softdevice.sleep(LONG)
        target.copy_(source, non_blocking=True)
    if recorded:
        source.record_stream(copying)
    del source
    again = torch.full((SIZE,), 2.0, device=device)
    torch.accelerator.synchronize()
    assert again[0].item() == 2.0
    return target.mean().item()


def test_a_block_freed_too_early_shows_and_a_recorded_use_protects(device: torch.device) -> None:
    seen = {}
    for order in PORTFOLIO:
        softdevice.choose_order(order)
        seen[order] = _free_while_another_stream_reads(device, recorded=False)
        assert _free_while_another_stream_reads(device, recorded=True) == 1.0, order
    assert seen["threads"] != 1.0
    assert seen["compute-first"] != 1.0


def test_a_block_with_a_recorded_use_comes_back_when_the_use_has_passed(
    device: torch.device,
) -> None:
    softdevice.choose_order("threads")  # a random one may run the use when memory is asked for
    stream = torch.Stream(device=device)
    x = torch.ones(SIZE, device=device)
    address = x.data_ptr()
    x.record_stream(stream)
    with on(stream):
        softdevice.sleep(LONG)
    del x
    y = torch.empty(SIZE, device=device)
    assert y.data_ptr() != address
    torch.accelerator.synchronize()
    assert torch.empty(SIZE, device=device).data_ptr() == address


def test_other_streams_get_other_memory(device: torch.device) -> None:
    x = torch.ones(SIZE, device=device)
    address = x.data_ptr()
    del x
    with on(torch.Stream(device=device)):
        assert torch.empty(SIZE, device=device).data_ptr() != address


def test_out_of_memory_raises_and_all_recovers(device: torch.device) -> None:
    torch.accelerator.empty_cache()
    held = torch.ones(256 * KIB, dtype=torch.uint8, device=device)
    softdevice.set_capacity(torch.accelerator.memory_reserved() + 512 * KIB)
    cached = torch.ones(300 * KIB, dtype=torch.uint8, device=device)
    del cached
    # Fits only if the cached block goes.
    large = torch.ones(500 * KIB, dtype=torch.uint8, device=device)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(100 * KIB, dtype=torch.uint8, device=device)
    del large
    small = torch.ones(100 * KIB, dtype=torch.uint8, device=device)
    assert (held.sum() + small.sum()).item() == 356 * KIB


def test_statistics(device: torch.device) -> None:
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()
    torch.accelerator.reset_peak_memory_stats()
    x = torch.empty(1000, dtype=torch.uint8, device=device)  # 1024 bytes: 512 is the granularity
    y = torch.empty(1, dtype=torch.uint8, device=device)
    assert torch.accelerator.memory_allocated() - before[0] == 1536
    del x
    assert torch.accelerator.memory_allocated() - before[0] == 512
    assert torch.accelerator.max_memory_allocated() - before[0] == 1536
    assert torch.accelerator.memory_reserved() - before[1] == 1536
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() - before[1] == 512
    free, total = torch.accelerator.get_memory_info()
    assert total - free == torch.accelerator.memory_reserved()
    assert y.numel() == 1


# ---- page-locked memory and copies --------------------------------------------------------------


def test_page_locked_memory_is_recognised(device: torch.device) -> None:
    plain = torch.zeros(SIZE)
    assert not plain.is_pinned()
    assert torch.zeros(SIZE, pin_memory=True).is_pinned()
    assert plain.pin_memory()[17:30].is_pinned()
    module = torch.get_device_module(device)
    module.host_register(plain.data_ptr(), plain.nbytes)
    assert plain.is_pinned()
    assert plain[-1:].is_pinned()
    with pytest.raises(OSError, match="are registered already"):
        module.host_register(plain.data_ptr() + 4, 4)
    module.host_unregister(plain.data_ptr())
    assert not plain.is_pinned()
    with pytest.raises(OSError, match="nothing is registered"):
        module.host_unregister(plain.data_ptr())


@pytest.mark.parametrize("down", [True, False], ids=["down", "up"])
@pytest.mark.parametrize("locked", [True, False], ids=["page-locked", "pageable"])
def test_copies_block_unless_memory_is_page_locked(
    locked: bool, down: bool, device: torch.device
) -> None:
    softdevice.choose_order("threads")
    host = torch.ones(SIZE, pin_memory=locked)
    mine = torch.zeros(SIZE, device=device)
    torch.accelerator.synchronize()
    softdevice.sleep(LONG)
    begun_s = time.perf_counter()
    target, source = (host, mine) if down else (mine, host)
    target.copy_(source, non_blocking=True)
    took_s = time.perf_counter() - begun_s
    assert (took_s < 0.05) == locked  # the stream sleeps for 0.1 s first
    torch.accelerator.synchronize()
    assert torch.equal(target.cpu(), source.cpu())


def test_a_copy_of_another_type_blocks_on_the_way_up_as_on_a_gpu(device: torch.device) -> None:
    softdevice.choose_order("compute-first")
    source = torch.ones(SIZE, dtype=torch.float64, pin_memory=True)
    target = torch.zeros(SIZE, device=device)
    target.copy_(source, non_blocking=True)
    source.fill_(2.0)
    assert target.mean().item() == 1.0


def test_page_locked_memory_is_not_reused_while_copies_read_it(device: torch.device) -> None:
    for order in PORTFOLIO:
        softdevice.choose_order(order)
        target = torch.zeros(SIZE, device=device)
        source = pinned(SIZE, fill=1.0)
        torch.accelerator.synchronize()
        softdevice.sleep(LONG)
        target.copy_(source, non_blocking=True)
        del source
        pinned(SIZE, fill=math.nan)
        assert target.mean().item() == 1.0, order


def test_registered_memory_is_the_callers_to_keep(device: torch.device) -> None:
    """The host may write too early into memory that a copy reads: that must show."""
    softdevice.choose_order("compute-first")
    source, target = torch.ones(SIZE), torch.zeros(SIZE, device=device)
    module = torch.get_device_module(device)
    module.host_register(source.data_ptr(), source.nbytes)
    target.copy_(source, non_blocking=True)
    source.fill_(2.0)
    assert target.mean().item() == 2.0
    module.host_unregister(source.data_ptr())


def test_storages_are_resized(device: torch.device) -> None:
    x = torch.arange(8.0, device=device)
    storage = x.untyped_storage()
    storage.resize_(0)
    assert torch.accelerator.memory_allocated() >= 0
    storage.resize_(32)
    x.copy_(torch.arange(8.0))
    x.resize_(16)
    assert torch.equal(x[:8].cpu(), torch.arange(8.0))
