"""The optimizer's step inside backward: random programs, whose worker is early or late."""

import os
from collections import Counter

import pytest

import ebbtide
from overlap_programs import check_loops, check_overlap

SEEDS = int(os.environ.get("EBBTIDE_SIMULATION_SEEDS", "100")) // 6


def test_random_programs_on_the_simulated_device() -> None:
    content: Counter[str] = Counter()
    for seed in range(SEEDS):
        check_overlap(seed, content)
    assert min(content[what] for what in ("ahead", "again", "clipped", "skipped")) > 0


@pytest.mark.filterwarnings("ignore:ebbtide offloaded nothing:RuntimeWarning")
@pytest.mark.parametrize("policy", [None, ebbtide.WeightPolicy()], ids=["in memory", "in files"])
def test_random_programs_on_a_cpu(policy: ebbtide.WeightPolicy | None) -> None:
    content: Counter[str] = Counter()
    for seed in range(1000, 1000 + SEEDS):
        content += check_loops(seed, lambda net: ebbtide.offload(net, weights=policy))
    assert min(content[what] for what in ("ahead", "again", "clipped", "skipped")) > 0
