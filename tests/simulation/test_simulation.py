"""The engine under adversarial orders of copies, against plain autograd."""

import os

import pytest

from harness import check

SEEDS = int(os.environ.get("EBBTIDE_SIMULATION_SEEDS", "300"))
"""`make soak` runs many more."""

CHUNK = 50


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_random_programs(first: int) -> None:
    for seed in range(first, first + CHUNK):
        check(seed)


def test_programs_do_what_they_are_for() -> None:
    """Over some seeds, everything worth testing happens at all."""
    from harness import simulate

    offloads = reloads = late = 0
    errors: set[str] = set()
    for seed in range(120):
        _, offloaded, simulation = simulate(seed)
        errors.update(offloaded.errors)
        stats = simulation.session.stats
        offloads += stats.num_offloaded
        reloads += stats.reloaded_bytes
        late += stats.late_reloads
    assert errors == {"interrupted forward", "interrupted backward", "modified in place"}
    assert offloads > 300
    assert reloads > 0
    assert late > 0


def test_a_seed_replays() -> None:
    assert check(7).device.trace == check(7).device.trace
    assert check(7).device.trace != check(8).device.trace
