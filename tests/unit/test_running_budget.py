"""Several models under one budget of `ebbtide run`, and the peak that they share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from run_cases import make, step, watching

pytestmark = pytest.mark.usefixtures("frozen_imports")


def test_models_are_planned_one_after_the_other() -> None:
    first, second = make(), make(2)
    plain = [make(), make(2)]
    expected = [[step(model) for model in plain] for _ in range(36)]
    settled_at = waited_until = None
    with watching(budget="90%") as watched:
        for number in range(36):
            for model, wanted in zip((first, second), expected[number], strict=True):
                assert all(map(torch.equal, wanted, step(model)))
            plan, other = watched.handle(0).plan, watched.handle(1).plan
            assert (plan is None) is (number == 0)  # the first step is what it is planned from
            if number == 1:  # recomputed layers have been verified
                assert other is None and watched.handle(1).stats.recomputed_bytes
            if plan is not None and plan.settled and settled_at is None:
                settled_at = number
            if other is not None and waited_until is None:
                waited_until = number
        assert settled_at is not None and waited_until is not None
        assert settled_at <= waited_until
        assert watched.names == ["Net", "Net"] and watched.left_alone == [None, None]
        assert watched.steps == [36, 36]


def test_a_model_that_is_done_with_keeps_no_other_waiting() -> None:
    models = [make() for _ in range(2)]  # both stay alive, as in a list of results
    with watching(budget="90%") as watched:
        step(models[0])
        for _ in range(36):
            step(models[1])
        assert watched.handle(1).plan is not None


def test_parts_that_are_called_one_by_one_are_planned_one_after_the_other() -> None:
    model = make(3)

    def by_hand(of: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for block in of.blocks:
            x = block(x)
        return x

    with watching(budget="90%") as watched:
        for _ in range(20):
            found = step(model, lambda x: by_hand(model, x))
            assert len(found) == 1 + 3 * 4
        plans = [watched.handle(number).plan for number in range(3)]
        assert plans[0] is not None and plans[0].settled and plans[1] is not None
