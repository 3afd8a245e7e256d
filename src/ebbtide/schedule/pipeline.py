"""From a pipeline's order to a schedule: what leaves, when it is out and when it comes back."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, final

from ebbtide.errors import ScheduleError
from ebbtide.schedule.passes import Action, Direction, Pass, Unit, Verb, parse_pass
from ebbtide.schedule.schedule import Schedule

# What `torch.distributed.pipelining` prints: 2F5 is the forward of microbatch 5 on stage 2, and
# (2F5;3B1)OVERLAP_F_B two passes that run side by side.
_COMPUTE = re.compile(r"(\d+)([FBIW])(\d+)")
_OTHER = re.compile(r"\d+(SEND_|RECV_|UNSHARD|RESHARD|REDUCE_GRAD|NONE)\w*")
_SIDE_BY_SIDE = re.compile(r"\((.*)\)\w+")

Row = Iterable[object]
"""What one rank does, in order: `torch.distributed.pipelining` actions, their text, passes, or None
where it idles."""


def from_pipeline(
    order: Row | Mapping[int, Row] | str,
    stage: int | None = None,
    *,
    resident: int,
    lead: int = 1,
) -> Schedule:
    """A schedule for one rank of a pipeline, within a number of resident microbatches.

    Of the units (a stage in a microbatch) that wait for their backward, those that wait longest
    leave first. Each is out just before its room is needed, and starts back ``lead`` passes before
    its backward if there is room.

    Not modelled: passes that run side by side (``OVERLAP_F_B``) are taken one after the other.

    Args:
        order: what the rank does, as `torch.distributed.pipelining` has it in
            ``schedule.pipeline_order``: the row of one rank, or the mapping from ranks to rows; or
            text such as ``"0F0 0F1 0B0 0B1"``. What is no compute is passed over.
        stage: one of the rank's stages; of a mapping, the row that has it is taken. Passes are
            named by their stage: ``F2.m5`` is the forward of microbatch 5 on stage 2.
        resident: the most units whose saved tensors may be on the device at once, the one that
            runs included.
        lead: passes that each copy has, at least, to hide behind, where there is room for it.

    Returns:
        The schedule, checked; empty where everything fits.

    Raises:
        ScheduleError: an action cannot be read, or ``resident`` is too small; the message says
            what would do.
    """
    passes = _choose_row(order, stage)
    if not passes:
        raise ScheduleError("the order has no forward and no backward in it")
    if isinstance(resident, bool) or not isinstance(resident, int) or resident < 1:
        raise ScheduleError(f"resident must be a whole number, 1 or more, got {resident!r}")
    if isinstance(lead, bool) or not isinstance(lead, int) or lead < 0:
        raise ScheduleError(f"lead must be a whole number of passes, 0 or more, got {lead!r}")
    Schedule(passes).check()
    return _Planner(passes, resident, lead).schedule().check()


def read_row(row: Row | str) -> tuple[Pass, ...]:
    """The compute in what one rank does.

    Raises:
        ScheduleError: an action cannot be read.
    """
    actions = row.replace(",", " ").split() if isinstance(row, str) else row
    return _count_from_0(
        [each for action in actions if action is not None for each in _read(action)]
    )


def _count_from_0(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """The same passes, with the forwards of a stage that counts them from 1 counted from 0.

    torch's `Schedule1F1B` tells its last rank's as ``3F1 3B0 3F2 3B1``, and runs 0, 0, 1, 1: since
    https://github.com/pytorch/pytorch/pull/155935. No order that can be run looks like that.
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
            f"{text!r} is no action of a pipeline; they are written stage, kind, microbatch, such "
            f"as 2F5, 2B5, 2I5 or 2W5"
        ) from None


def _choose_row(order: Row | Mapping[int, Row] | str, stage: int | None) -> tuple[Pass, ...]:
    rows = order.values() if isinstance(order, Mapping) else [order]
    if stage is None:
        if isinstance(order, Mapping):
            raise ScheduleError(
                f"the order has {len(rows)} ranks; say which stage is meant, or give one rank's row"
            )
        return read_row(order)
    for row in rows:
        passes = read_row(row)
        if any(each.unit.layer == stage for each in passes):
            return passes
    raise ScheduleError(f"no rank of the order has stage {stage}")


@final
class _Stay:
    """When a unit is on the device: while it forwards, until it is out, and from its return on."""

    def __init__(self, unit: Unit, forward: int, use: int, end: int) -> None:
        self.unit = unit
        self.forward = forward  # places in the order
        self.use = use
        self.end = end
        self.out: int | None = None  # released at the anchor of this pass; None: it stays
        self.back = use

    @property
    def idle(self) -> int:
        """Passes between its forward and its backward."""
        return self.use - self.forward - 1


@final
class _Planner:
    """Chooses who leaves, then gives every copy as much time as there is."""

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
            # Its backward never comes, so it stays to the end: in use from its forward on.
            else _Stay(unit, place, place, len(passes) - 1)
            for unit, place in forwards.items()
        ]
        self._there = [0] * len(passes)
        for stay in self._stays:
            self._count(stay.forward, stay.end + 1, 1)

    def _count(self, begin: int, end: int, change: int) -> None:
        for place in range(begin, end):
            self._there[place] += change

    def schedule(self) -> Schedule:
        gone = self._choose()
        for stay in sorted(gone, key=lambda stay: stay.use):
            self._bring_back_early(stay)
        # The last to come first: else the first would take the room of those that come after it,
        # whose copies queue behind its own.
        for stay in sorted(gone, key=lambda stay: stay.forward, reverse=True):
            self._let_go_late(stay)
        gone = [stay for stay in gone if stay.out is not None]
        offloads, releases, reloads = [], [], []
        for stay in sorted(gone, key=lambda stay: stay.forward):
            assert stay.out is not None
            unit = stay.unit
            offloads.append((self._passes[stay.forward], Action(Verb.OFFLOAD, unit)))
            releases.append((self._passes[stay.out], Action(Verb.RELEASE, unit)))
            reloads.append((self._passes[stay.back], Action(Verb.RELOAD, unit)))
        # At one anchor, what goes makes room for what comes.
        return Schedule(self._passes, [*releases, *offloads, *reloads])

    def _choose(self) -> list[_Stay]:
        """Who leaves: wherever too many are there, of those that idle the one that idles longest.

        It leaves for all its idle time. At each place the longest idle ones are the ones whose
        backward is furthest, as far as the order takes units in turn.
        """
        gone = []
        longest_first = sorted(self._stays, key=lambda stay: (-stay.idle, stay.unit))
        for place in range(len(self._passes)):
            while self._there[place] > self._resident:
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
                gone.append(stay)
        return gone

    def _refuse(self) -> NoReturn:
        least = max(
            sum(stay.forward == place or stay.use <= place <= stay.end for stay in self._stays)
            for place in range(len(self._passes))
        )
        raise ScheduleError(
            f"resident={self._resident} is too small: with all others away, this order still has "
            f"{least} microbatches of a stage on the device at once; give resident={least} or more"
        )

    def _has_room(self, place: int) -> bool:
        return self._there[place] < self._resident

    def _bring_back_early(self, stay: _Stay) -> None:
        """Let it start back up to ``lead`` passes before its backward."""
        assert stay.out is not None
        earliest = max(stay.out + 1, stay.use - self._lead)
        while stay.back > earliest and self._has_room(stay.back - 1):
            stay.back -= 1
            self._there[stay.back] += 1

    def _let_go_late(self, stay: _Stay) -> None:
        """Let it be out only when its room is needed: its copy has until then."""
        assert stay.out is not None
        while stay.out + 1 < stay.back and self._has_room(stay.out):
            self._there[stay.out] += 1
            stay.out += 1
        if stay.out + 1 == stay.back and self._has_room(stay.out):
            self._there[stay.out] += 1
            stay.out = None  # after all it need not go
