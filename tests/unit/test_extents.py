"""The extent allocator: nothing overlaps, nothing is lost, and growing as told is enough."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.stores import Extent
from ebbtide.stores.store import ExtentAllocator

ALIGNMENTS = st.sampled_from([1, 8, 512, 4096])
# Positive: so many bytes to allocate. Zero or less: which of the live extents to free.
SEQUENCES = st.lists(st.one_of(st.integers(1, 20_000), st.integers(-30, 0)), max_size=60)


def allocate_growing(allocator: ExtentAllocator, size_bytes: int) -> Extent:
    """What the stores do: grow by what is missing, and by no more, when nothing fits."""
    extent = allocator.allocate(size_bytes)
    if extent is None:
        allocator.grow(allocator.missing_bytes(size_bytes))
        extent = allocator.allocate(size_bytes)
    assert extent is not None
    return extent


def run(allocator: ExtentAllocator, sequence: list[int], alignment: int) -> list[Extent]:
    """Runs the sequence and checks the extents after each operation; returns those still live."""
    live: list[Extent] = []
    for operation in sequence:
        if operation > 0:
            extent = allocate_growing(allocator, operation)
            # The smallest multiple of the alignment that holds the bytes.
            assert 0 <= extent.size_bytes - operation < alignment
            live.append(extent)
        elif live:
            allocator.free(live.pop(operation % len(live)))
        check(allocator, live, alignment)
    return live


def check(allocator: ExtentAllocator, live: list[Extent], alignment: int) -> None:
    in_order = sorted(live, key=lambda extent: extent.offset_bytes)
    for extent in in_order:
        assert extent.offset_bytes % alignment == 0
        assert extent.size_bytes % alignment == 0
        assert extent.offset_bytes >= 0
        assert extent.offset_bytes + extent.size_bytes <= allocator.capacity_bytes
    for one, next_one in pairwise(in_order):
        assert one.offset_bytes + one.size_bytes <= next_one.offset_bytes
    assert allocator.used_bytes == sum(extent.size_bytes for extent in live)


@given(ALIGNMENTS, SEQUENCES)
def test_live_extents_are_aligned_and_apart(alignment: int, sequence: list[int]) -> None:
    run(ExtentAllocator(alignment), sequence, alignment)


@given(ALIGNMENTS, SEQUENCES, st.integers(1, 20_000))
def test_growing_by_what_is_missing_is_enough_and_no_more(
    alignment: int, sequence: list[int], size_bytes: int
) -> None:
    allocator = ExtentAllocator(alignment)
    live = run(allocator, sequence, alignment)
    if allocator.allocate(size_bytes) is not None:
        return
    end_of_live = max((extent.offset_bytes + extent.size_bytes for extent in live), default=0)
    allocator.grow(allocator.missing_bytes(size_bytes))
    extent = allocator.allocate(size_bytes)
    # Nothing before the end of the last live extent fits, so that is where the new one begins,
    # and with the least growth it ends where the range does.
    assert extent is not None
    assert extent.offset_bytes == end_of_live
    assert extent.offset_bytes + extent.size_bytes == allocator.capacity_bytes


def test_the_smallest_run_that_fits_is_taken() -> None:
    """Runs of 3, 1 and 2 pages between extents in use; 2 pages go into the run of 2."""
    allocator = ExtentAllocator(4096)
    sizes = (3, 1, 1, 1, 2, 1)
    extents = [allocate_growing(allocator, pages * 4096) for pages in sizes]
    assert allocator.capacity_bytes == sum(sizes) * 4096
    for number in (0, 2, 4):
        allocator.free(extents[number])
    assert allocator.used_bytes == (1 + 1 + 1) * 4096
    assert allocator.allocate(2 * 4096) == Extent((3 + 1 + 1 + 1) * 4096, 2 * 4096)
    assert allocator.allocate(4096) == Extent((3 + 1) * 4096, 4096)
    assert allocator.allocate(3 * 4096) == Extent(0, 3 * 4096)
    assert allocator.allocate(1) is None
