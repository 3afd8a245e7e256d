"""Plan a schedule for one rank of a pipeline, from the order of its passes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, final

from ebbtide.errors import ScheduleError
from ebbtide.schedule.schedule import Action, Direction, Pass, Schedule, Unit, Verb, parse_pass

# The notation of `torch.distributed.pipelining`: 2F5 is the forward of microbatch 5 on stage 2, and
# (2F5;3B1)OVERLAP_F_B is two passes that run side by side.
_COMPUTE = re.compile(r"(\d+)([FBIW])(\d+)")
# Everything else is communication. torch 2.15 added WAIT_SEND_F, WAIT_SEND_B and WAIT_REDUCE_GRAD.
_OTHER = re.compile(r"\d+((SEND|RECV|REDUCE|WAIT)_[A-Z_]+|UNSHARD|RESHARD|NONE)\d*")
_SIDE_BY_SIDE = re.compile(r"\((.*)\)\w+")

Row = Iterable[object]
"""The actions of one rank in order: `torch.distributed.pipelining` actions, their text, or passes,
with None where the rank idles."""


def from_pipeline(
    order: Row | Mapping[int, Row] | str,
    stage: int | None = None,
    *,
    resident: int,
    lead: int = 1,
) -> Schedule:
    """Plan a schedule for one rank of a pipeline, with at most ``resident`` units on the device.

    A unit is one stage in one microbatch. Of the units that wait for their backward, those with the
    longest wait are offloaded first. Each is released just before its room is needed, and its
    reload starts up to ``lead`` passes before its backward if there is room.

    Not modelled: passes that run side by side (``OVERLAP_F_B``) are taken one after the other.

    Args:
        order: what the rank does, as in ``schedule.pipeline_order`` of
            `torch.distributed.pipelining`: the row of one rank, or the mapping from ranks to rows;
            or text such as ``"0F0 0F1 0B0 0B1"``. Actions other than compute are skipped.
        stage: one of the rank's stages. It selects the row of a mapping. Passes are named by their
            stage: ``F2.m5`` is the forward of microbatch 5 on stage 2.
        resident: the most units whose saved tensors may be on the device at once, including the
            unit that runs.
        lead: number of passes that a reload starts ahead of its unit's backward, where there is
            room for it.

    Returns:
        The checked schedule; it has no actions if everything fits.

    Raises:
        ScheduleError: an action cannot be read, or ``resident`` is too small; the message names
            the smallest value that works.
    """
    passes = _choose_row(order, stage)
    if not passes:
        raise ScheduleError("the order has no forward and no backward")
    if isinstance(resident, bool) or not isinstance(resident, int) or resident < 1:
        raise ScheduleError(f"resident must be a whole number, 1 or more, got {resident!r}")
    if isinstance(lead, bool) or not isinstance(lead, int) or lead < 0:
        raise ScheduleError(f"lead must be a whole number of passes, 0 or more, got {lead!r}")
    Schedule(passes).check()
    return _Planner(passes, resident, lead).schedule().check()


def read_row(row: Row | str) -> tuple[Pass, ...]:
    """Return the compute passes among the actions of one rank.

    Raises:
        ScheduleError: an action cannot be read.
    """
    actions = row.replace(",", " ").split() if isinstance(row, str) else row
    return _count_from_0(
        [each for action in actions if action is not None for each in _read(action)]
    )


def _count_from_0(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """Renumber the forwards of a stage whose forwards are counted from 1 and backwards from 0.

    Since https://github.com/pytorch/pytorch/pull/155935 torch's `Schedule1F1B` lists the last
    rank's passes as ``3F1 3B0 3F2 3B1``, although it runs microbatches 0, 0, 1, 1. The renumbering
    is safe because no order that can be run looks like that.
    """
    forwards: dict[int, set[int]] = defaultdict(set)
    backwards: dict[int, set[int]] = defaultdict(set)
    for each in passes:
        numbers = forwards if each.is_forward else backwards
        numbers[each.unit.layer].add(each.unit.microbatch)
    off_by_one = {
        stage
        for stage, numbers in forwards.items()
        if numbers == set(range(1, len(numbers) + 1))
        and backwards[stage] == set(range(len(numbers)))
    }
    return tuple(
        Pass(each.direction, Unit(each.unit.layer, each.unit.microbatch - 1))
        if each.is_forward and each.unit.layer in off_by_one
        else each
        for each in passes
    )


def _read(action: object) -> list[Pass]:
    if isinstance(action, Pass):
        return [action]
    text = str(action).strip()
    both = _SIDE_BY_SIDE.fullmatch(text)
    if both is not None:
        return [each for part in both[1].split(";") for each in _read(part)]
    match = _COMPUTE.fullmatch(text)
    if match is not None:
        return [Pass(Direction(match[2]), Unit(int(match[1]), int(match[3])))]
    if not text or _OTHER.fullmatch(text):
        return []
    try:
        return [parse_pass(text)]
    except ScheduleError:
        raise ScheduleError(
            f"{text!r} is not a pipeline action; write the stage, the kind and the microbatch, "
            f"such as 2F5, 2B5, 2I5 or 2W5"
        ) from None


def _choose_row(order: Row | Mapping[int, Row] | str, stage: int | None) -> tuple[Pass, ...]:
    rows = order.values() if isinstance(order, Mapping) else [order]
    if stage is None:
        if isinstance(order, Mapping):
            raise ScheduleError(
                f"the order has {len(rows)} ranks; say which stage to plan for, or give one rank's "
                f"row"
            )
        return read_row(order)
    for row in rows:
        passes = read_row(row)
        if any(each.unit.layer == stage for each in passes):
            return passes
    raise ScheduleError(f"no rank of the order has stage {stage}")


@final
class _Stay:
    """When a unit is on the device, as indices of passes in the order.

    It is there from its forward until its release, and from its reload until its backward ends.

    Attributes:
        unit: the unit.
        forward: its forward.
        use: first pass of its backward.
        end: last pass of its backward.
        out: the pass at whose anchor it is released; None if it stays.
        back: the pass at whose anchor it is reloaded.
    """

    def __init__(self, unit: Unit, forward: int, use: int, end: int) -> None:
        self.unit = unit
        self.forward = forward
        self.use = use
        self.end = end
        self.out: int | None = None
        self.back = use

    @property
    def idle(self) -> int:
        """Number of passes between its forward and its backward."""
        return self.use - self.forward - 1


@final
class _Planner:
    """Chooses which units are offloaded, then gives every copy as much time as the order allows."""

    def __init__(self, passes: Sequence[Pass], resident: int, lead: int) -> None:
        self._passes = passes
        self._resident = resident
        self._lead = lead
        forwards = {each.unit: place for place, each in enumerate(passes) if each.is_forward}
        uses: dict[Unit, list[int]] = {unit: [] for unit in forwards}
        for place, each in enumerate(passes):
            if not each.is_forward:
                uses[each.unit].append(place)
        self._stays = [
            _Stay(unit, place, uses[unit][0], uses[unit][-1])
            if uses[unit]
            # Without a backward it stays to the end, so it counts as in use from its forward on.
            else _Stay(unit, place, place, len(passes) - 1)
            for unit, place in forwards.items()
        ]
        self._num_resident = [0] * len(passes)
        for stay in self._stays:
            self._count(stay.forward, stay.end + 1, 1)

    def _count(self, begin: int, end: int, change: int) -> None:
        for place in range(begin, end):
            self._num_resident[place] += change

    def schedule(self) -> Schedule:
        offloaded = self._choose()
        for stay in sorted(offloaded, key=lambda stay: stay.use):
            self._reload_early(stay)
        # Later units first. Copies queue one behind the other, so a later unit's copy ends later
        # and needs the free room more; an earlier unit would take it away.
        for stay in sorted(offloaded, key=lambda stay: stay.forward, reverse=True):
            self._release_late(stay)
        offloaded = [stay for stay in offloaded if stay.out is not None]
        offloads, releases, reloads = [], [], []
        for stay in sorted(offloaded, key=lambda stay: stay.forward):
            assert stay.out is not None
            unit = stay.unit
            offloads.append((self._passes[stay.forward], Action(Verb.OFFLOAD, unit)))
            releases.append((self._passes[stay.out], Action(Verb.RELEASE, unit)))
            reloads.append((self._passes[stay.back], Action(Verb.RELOAD, unit)))
        # Releases come first at each anchor, so that they make room for its reloads.
        return Schedule(self._passes, [*releases, *offloads, *reloads])

    def _choose(self) -> list[_Stay]:
        """Choose the units to offload.

        Wherever too many units are on the device, the one with the longest idle time among those
        that are idle there is offloaded, for all of its idle time. If the order takes units in
        turn, that is also the unit whose backward is furthest away.
        """
        offloaded = []
        longest_first = sorted(self._stays, key=lambda stay: (-stay.idle, stay.unit))
        for place in range(len(self._passes)):
            while self._num_resident[place] > self._resident:
                stay = next(
                    (
                        stay
                        for stay in longest_first
                        if stay.out is None and stay.forward < place < stay.use
                    ),
                    None,
                )
                if stay is None:
                    self._refuse()
                stay.out = stay.forward + 1
                self._count(stay.out, stay.use, -1)
                offloaded.append(stay)
        return offloaded

    def _refuse(self) -> NoReturn:
        least = max(
            sum(stay.forward == place or stay.use <= place <= stay.end for stay in self._stays)
            for place in range(len(self._passes))
        )
        raise ScheduleError(
            f"resident={self._resident} is too small: with everything else offloaded, this order "
            f"still has {least} microbatches of a stage on the device at once; give "
            f"resident={least} or more"
        )

    def _has_room(self, place: int) -> bool:
        return self._num_resident[place] < self._resident

    def _reload_early(self, stay: _Stay) -> None:
        """Move its reload up to ``lead`` passes ahead of its backward, as far as there is room."""
        assert stay.out is not None
        earliest = max(stay.out + 1, stay.use - self._lead)
        while stay.back > earliest and self._has_room(stay.back - 1):
            stay.back -= 1
            self._num_resident[stay.back] += 1

    def _release_late(self, stay: _Stay) -> None:
        """Delay its release until its room is needed, so that its copy has until then."""
        assert stay.out is not None
        while stay.out + 1 < stay.back and self._has_room(stay.out):
            self._num_resident[stay.out] += 1
            stay.out += 1
        if stay.out + 1 == stay.back and self._has_room(stay.out):
            self._num_resident[stay.out] += 1
            stay.out = None  # there is room for it all the time, so it need not be offloaded
