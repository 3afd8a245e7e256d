"""A study of a model's blocks, and those of ever smaller layers, which need less memory at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from ebbtide.errors import BudgetError
from ebbtide.studies.study import Outcome, Study
from ebbtide.studies.tasks import Size


@final
class Granularities:
    """Studies of the same step with ever smaller layers, as long as less memory is enough then.

    Args:
        study: the one with the largest layers.
    """

    def __init__(self, study: Study) -> None:
        self._studies = [study]
        self._is_finest = not study.is_divisible

    def __iter__(self) -> Iterator[Study]:
        number = 0
        while number < len(self._studies):
            yield self._studies[number]
            number += 1
            if number == len(self._studies):
                self._divide()

    def _divide(self) -> None:
        last = self._studies[-1]
        if self._is_finest:
            return
        divided = last.divided()
        self._is_finest = divided.smallest_bytes() >= last.smallest_bytes()
        if not self._is_finest:
            self._studies.append(divided)

    def smallest_bytes(self, size: Size | None = None) -> int:
        """Return the smallest budget of device memory that a plan was found for."""
        return min(study.smallest_bytes(size) for study in self)

    def find(self, device_bytes: int, size: Size | None = None) -> Outcome:
        """Find the fastest plan within a budget, for smaller layers if no other fits.

        Raises:
            BudgetError: no plan was found within the budget.
        """
        refused: BudgetError | None = None
        for study in self:
            try:
                return study.find(device_bytes, size)
            except BudgetError as error:
                refused = error
        assert refused is not None
        raise refused
