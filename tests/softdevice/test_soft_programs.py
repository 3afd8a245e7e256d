"""Random programs on torch's own streams: the bits of plain training, and nothing left over."""

import os
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ebbtide.devices import AbstractEvent, AcceleratorDevice
from soft_programs import check_activations, check_schedules, order_of
from soft_weight_programs import check_weights
from soft_weight_statements import check_statements
from weight_statements import STATEMENTS

SEEDS = int(os.environ.get("EBBTIDE_SOFT_PROGRAMS", "20"))
"""Of each kind, in each order. `make soft-soak` runs many more."""
CHUNK = 20
ORDERS = ("threads", "compute-first", "copies-first", "random")
CHECKS = {
    "activations": check_activations,
    "schedules": check_schedules,
    "weights": check_weights,
    "statements": check_statements,
}
CONTENT = {
    "activations": {
        *("1F1B", "backward", "double backward", "dropped", "early exit", "input refilled"),
        *("interrupted backward", "interrupted forward", "layer absent", "modified in place"),
        *("output changed", "retained", "several microbatches", "store failed"),
    },
    "schedules": {"dropped", "followed", "interrupted", "moved", "said so", "swapped"},
    "weights": {
        *("another order", "asked for", "backward", "changed by hand", "dropped", "evaluated"),
        *("held gradients", "interrupted backward", "interrupted forward", "retained"),
    },
    "statements": {*STATEMENTS, "interrupted", "said so"},
}

_done: dict[str, Counter[str]] = {kind: Counter() for kind in CHECKS}


@pytest.mark.timeout(1200)  # a twentieth of it on a core of its own
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", CHECKS)
def test_random_programs(kind: str, order: str, first: int) -> None:
    for seed in range(first, first + CHUNK):
        _done[kind] += CHECKS[kind](seed, order)
    assert _done[kind].keys() >= CONTENT[kind], CONTENT[kind] - _done[kind].keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_failure_says_what_replays_it(
    check: Callable[[int, str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong bytes are noticed, and a second run of the seed notices them again."""
    copy_up = AcceleratorDevice.copy_up

    def copy_zeros(
        device: AcceleratorDevice, target: Tensor, source: Tensor, *after: AbstractEvent
    ) -> AbstractEvent:
        return copy_up(device, target, torch.zeros_like(source), *after)

    monkeypatch.setattr(AcceleratorDevice, "copy_up", copy_zeros)
    seed, message = _first_failure(check, "random")
    assert f"seed {seed}, order {order_of('random', seed)}: " in message
    with pytest.raises(AssertionError, match=f"seed {seed}, order random:{seed}: "):
        check(seed, f"random:{seed}")


def _first_failure(check: Callable[[int, str], object], order: str) -> tuple[int, str]:
    for seed in range(20):
        try:
            check(seed, order)
        except AssertionError as error:
            return seed, str(error)
    pytest.fail("no program has noticed it")
