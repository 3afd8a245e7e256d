"""Weights at rest on the host, under adversarial orders of copies."""

import os

import pytest

from weight_programs import Tally, check_weights

SEEDS = max(200, int(os.environ.get("EBBTIDE_SIMULATION_SEEDS", "0")))
CONTENT = {
    "another order",
    "asked for",
    "backward",
    "changed by hand",
    "dropped",
    "evaluated",
    "held gradients",
    "interrupted backward",
    "interrupted forward",
    "retained",
}


@pytest.mark.parametrize("first", range(0, SEEDS, 100))
def test_random_training(first: int) -> None:
    tally = Tally()
    for seed in range(first, first + 100):
        check_weights(seed, tally)
    assert set(tally.content) == CONTENT
    assert min(tally.content.values()) > 10
