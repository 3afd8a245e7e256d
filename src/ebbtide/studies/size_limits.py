"""The largest sizes that fit: by plain training, by rules for all layers, and by a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, final

from ebbtide.errors import BudgetError, PolicyError
from ebbtide.studies.granularities import Granularities
from ebbtide.studies.tasks import Size

PLANNED: Final = "planned"

METHODS: Final = {
    "plain": "keep all",
    "checkpointed": "recompute all",
    "offload all": "offload all",
    PLANNED: PLANNED,
}
"""Names of ways to train, and the rules that they stand for."""

_MOST_UNITS: Final = 2**20
_SURE: Final = 1e-3  # share of a peak by which a guess may be wrong to be believed further


class Limit(NamedTuple):
    """The largest size that fits with one way to train.

    Attributes:
        method: the way to train.
        length: the largest length at the batch that was asked for; None: not even the smallest
            fits.
        length_step_s: predicted seconds of its step.
        batch: the largest batch at the length that was asked for; None: not even one sample fits.
        batch_step_s: predicted seconds of its step.
    """

    method: str
    length: int | None = None
    length_step_s: float | None = None
    batch: int | None = None
    batch_step_s: float | None = None


class _Line(NamedTuple):
    """A straight line through peaks: bytes by number of points."""

    points: int
    peak_bytes: int
    bytes_per_point: float

    def bytes_at(self, points: int) -> float:
        return self.peak_bytes + (points - self.points) * self.bytes_per_point


def find_limits(
    studies: Granularities, device_bytes: int, say: Callable[[str], None] = lambda _: None
) -> list[Limit]:
    """Return the largest sizes that fit into a budget of device memory.

    Args:
        studies: the training step; rules are about the largest layers.
        device_bytes: the budget.
        say: is told what is being looked for.
    """
    limits = _Limits(studies, device_bytes)
    study = next(iter(studies))
    size = study.family.size
    found = []
    for method in METHODS:
        limit = Limit(method)
        if size.length is not None:
            say(f"largest {study.family.length_name}, {method}")
            length = limits.largest(method, "length")
            step_s = None if length is None else limits.step_s(method, length)
            limit = limit._replace(length=length and length.length, length_step_s=step_s)
        if size.batch is not None:
            say(f"largest batch, {method}")
            batch = limits.largest(method, "batch")
            step_s = None if batch is None else limits.step_s(method, batch)
            limit = limit._replace(batch=batch and batch.batch, batch_step_s=step_s)
        found.append(limit)
    return found


@final
class _Limits:
    """Looks for the largest sizes. Peaks that are known guide it to those that are not."""

    def __init__(self, studies: Granularities, device_bytes: int) -> None:
        self._studies = studies
        self._study = next(iter(studies))
        self._device_bytes = device_bytes
        self._peaks: dict[tuple[str, Size], int | None] = {}

    def largest(self, method: str, what: str) -> Size | None:
        """Return the largest size that fits; None if none does.

        Args:
            method: one of `METHODS`.
            what: ``"length"`` or ``"batch"``: the number that may grow.
        """
        step = self._study.family.length_step if what == "length" else 1
        start = getattr(self._study.family.size, what)
        power = max(1, self._study.family.dimensions) if what == "length" else 1

        def size_of(units: int) -> Size:
            return self._study.family.size._replace(**{what: units * step})

        def fits(units: int) -> bool:
            peak_bytes = self._peak_bytes(method, size_of(units))
            return peak_bytes is not None and peak_bytes <= self._device_bytes

        low, high = 0, _MOST_UNITS + 1  # what fits, and what does not
        units = max(1, start // step)
        while high - low > 1:
            units = min(max(units, low + 1), high - 1)
            line = self._line(method, what, power)
            if fits(units):
                low = units
                if line is not None and self._is_sure(line, method, size_of(units), (what, power)):
                    next_points = ((units + 1) * step) ** power
                    if line.bytes_at(next_points) > self._device_bytes * (1 + 2 * _SURE):
                        break
            else:
                high = units
            units = self._guess(self._line(method, what, power), (low, high), step, power)
        return size_of(low) if low else None

    def _is_sure(self, line: _Line, method: str, size: Size, axis: tuple[str, int]) -> bool:
        """Whether a line that was drawn before a peak was known has met it."""
        what, power = axis
        peak_bytes = self._peaks[method, size]
        assert peak_bytes is not None
        expected_bytes = line.bytes_at(getattr(size, what) ** power)
        return abs(expected_bytes - peak_bytes) <= _SURE * peak_bytes

    def _guess(self, line: _Line | None, bracket: tuple[int, int], step: int, power: int) -> int:
        """Return where the peak should be just within the budget, in units."""
        low, high = bracket
        if line is None or line.bytes_per_point <= 0:
            return low * 2 if low else high // 2
        points = line.points + (self._device_bytes - line.peak_bytes) / line.bytes_per_point
        return int(max(points, 0.0) ** (1 / power) / step)

    def _line(self, method: str, what: str, power: int) -> _Line | None:
        """Return the line through the two known peaks nearest to the budget.

        Peaks grow about linearly with the number of points, or of samples.
        """
        base = self._study.family.size
        known = [
            (getattr(size, what) ** power, peak_bytes)
            for (of, size), peak_bytes in self._peaks.items()
            if of == method
            and peak_bytes is not None
            and size == base._replace(**{what: getattr(size, what)})
        ]
        if len(known) < 2:
            return None
        nearest = sorted(known, key=lambda each: abs(each[1] - self._device_bytes))[:2]
        (first, first_bytes), (second, second_bytes) = nearest
        return _Line(first, first_bytes, (second_bytes - first_bytes) / (second - first))

    def _peak_bytes(self, method: str, size: Size) -> int | None:
        """Return the peak of a size; None if it cannot be built, or the host is too small."""
        key = method, size
        if key not in self._peaks:
            try:
                self._peaks[key] = self._smallest_peak_bytes(method, size)
            except PolicyError:
                self._peaks[key] = None
        return self._peaks[key]

    def _smallest_peak_bytes(self, method: str, size: Size) -> int | None:
        if method == PLANNED:
            return self._studies.smallest_bytes(size)
        outcome = self._study.rule(METHODS[method], 0, size)
        budget = self._study.budget(outcome.prediction.peak_bytes)
        too_much = budget.excess_bytes(outcome.prediction)  # on the host
        return None if too_much else outcome.prediction.peak_bytes

    def step_s(self, method: str, size: Size) -> float | None:
        """Return the seconds of the fastest step of a size that fits; None if none is found."""
        if method != PLANNED:
            return self._study.rule(METHODS[method], self._device_bytes, size).prediction.step_s
        try:
            return self._studies.find(self._device_bytes, size).prediction.step_s
        except BudgetError:
            return None
