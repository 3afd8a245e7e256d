"""The engine under adversarial orders of copies, against plain autograd."""

import dataclasses
import os
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import KIB, Knobs, Watch, check, check_outcome
from programs import Outcome, one_forward_one_backward

SEEDS = int(os.environ.get("EBBTIDE_SIMULATION_SEEDS", "120"))
"""`make soak` runs many more."""

CHUNK = 120  # enough for everything to happen
GENERATED = 5 * SEEDS // 3
TAPES = st.integers(0, 500).flatmap(lambda size: st.binary(min_size=size, max_size=size))
KNOBS = st.builds(
    Knobs,
    device_seed=st.integers(0, 2**16),
    bound_bytes=st.sampled_from((0, 1 * KIB, 4 * KIB, 16 * KIB, 256 * KIB)),
    eagerness=st.sampled_from((0.0, 0.1, 0.3, 0.6)),
    backward_stream=st.booleans(),
    closes_early=st.booleans(),
    store=st.sampled_from(("host", "disk", "tiered")),
    refusals=st.sampled_from((0.0, 0.3, 1.0)),
    slow_copies=st.sampled_from((0.0, 0.3)),
    short_calls=st.sampled_from((0.0, 0.5)),
    failures=st.sampled_from((0.0, 0.0, 0.1, 0.9)),
    rebuild=st.booleans(),
    recompute=st.sampled_from((0.0, 0.0, 0.5)),
    scales=st.booleans(),
)


@dataclass
class Tally:
    """What programs did, all together."""

    programs: int = 0
    offloading: int = 0
    offloads: int = 0
    unread: int = 0
    reloads: int = 0
    rebuilds: int = 0
    most_excess: float = 0.0
    content: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome, watch: Watch) -> None:
        self.programs += 1
        self.offloading += watch.offloads > 0
        self.offloads += watch.offloads
        self.unread += watch.unread
        self.reloads += watch.reloads
        self.rebuilds += watch.rebuilds
        self.most_excess = max(self.most_excess, watch.most_excess)
        self.content += outcome.content
        self.errors.update(outcome.errors)

    def check(self) -> None:
        """Everything worth testing happens, and often."""
        assert self.offloading > 0.7 * self.programs
        assert self.offloads > 5 * self.programs
        assert self.reloads > 3 * self.programs
        assert self.rebuilds > 0.5 * self.programs
        assert self.unread > 0.5 * self.programs
        for name in CONTENT:
            assert self.content[name] > self.programs // 40, name
        for name in ERRORS:
            assert self.errors[name] > self.programs // 300, name
        assert set(self.content) == CONTENT
        assert set(self.errors) == ERRORS


CONTENT = {
    "1F1B",
    "backward",
    "double backward",
    "double backward, hooked",
    "dropped",
    "early exit",
    "input refilled",
    "input refilled unseen",
    "layer absent",
    "output changed",
    "retained",
    "several microbatches",
    "some gradients only",
}
ERRORS = {
    "interrupted backward",
    "interrupted forward",
    "modified in place",
    "reentrant within grad",
    "store failed",
}


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_random_programs(first: int) -> None:
    """Over so many seeds, everything worth testing happens at all."""
    tally, late = Tally(), 0
    for seed in range(first, first + CHUNK):
        outcome, watch = check_outcome(seed)
        tally.add(outcome, watch)
        late += watch.simulation.transfers.account.stats.late_reloads
    tally.check()
    assert late > 0


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_random_programs_with_recomputed_layers(share: float) -> None:
    """Operations are layers that backward runs again, some or all of them."""
    recomputed = 0
    for seed in range(SEEDS // 2):
        knobs = dataclasses.replace(Knobs.of(seed), recompute=share)
        simulation = check(seed, knobs)
        recomputed += simulation.recomputed
        assert simulation.transfers.account.stats.recomputed_bytes >= 0
    assert recomputed > 4 * share * SEEDS // 2


@pytest.mark.timeout(900)
def test_generated_programs() -> None:
    """The same, where hypothesis generates program and simulation, and shrinks what fails."""
    tally = Tally()

    @settings(
        deadline=None,
        max_examples=GENERATED,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(TAPES, KNOBS)
    def generated(tape: bytes, knobs: Knobs) -> None:
        tally.add(*check_outcome(tape, knobs))

    generated()
    # What else it draws depends on what has been imported, because it takes constants from there.
    assert tally.offloads > 5 * tally.programs


def test_1f1b_is_what_pipelines_run() -> None:
    text = " ".join(f"{action[0]}{number}" for action, number in one_forward_one_backward(5, 2))
    assert text == "f0 f1 f2 b0 f3 b1 f4 b2 b3 b4"


def test_a_seed_replays() -> None:
    assert check(7).device.trace == check(7).device.trace
    assert check(7).device.trace != check(8).device.trace


def test_a_tape_replays() -> None:
    tape, knobs = bytes(range(1, 255, 3)) * 3, Knobs.of(7)
    assert check(tape, knobs).device.trace
    assert check(tape, knobs).device.trace == check(tape, knobs).device.trace
