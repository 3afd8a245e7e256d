"""Predicts what a step costs under a plan: its seconds, and its memory pass by pass.

Before the prediction come the uses of memory under a plan, and the link, in virtual time; after it
what is slower than measured, and the windows that a plan has room for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, final

from ebbtide.devices.hardware import Hardware
from ebbtide.documents import check_number
from ebbtide.errors import PolicyError
from ebbtide.planning.plan import LayerMode, Plan
from ebbtide.planning.profile import LayerProfile, StepProfile, StorageId
from ebbtide.runtime.handles import Decision

NOBODY: Final = -1
"""Index of the layer that saves a storage which no layer saves."""


class Memory(NamedTuple):
    """One piece of memory that layers save: once, however many layers save it.

    Attributes:
        size_bytes: its size.
        may_leave: whether it may be offloaded.
        sources: numbers of the pieces it can be rebuilt from.
        rebuild_s: seconds of rebuilding; None if it cannot be rebuilt.
    """

    size_bytes: int
    may_leave: bool
    sources: tuple[int, ...]
    rebuild_s: float | None


class Uses(NamedTuple):
    """What becomes of each piece of memory under one plan; the lists are by its number.

    Attributes:
        decisions: what becomes of it. What cannot leave, or cannot be rebuilt because a source is
            not saved, is kept.
        first: index of the layer that saves it first; `NOBODY` if none does. It is in use until
            that layer's backward has ended.
        last: index of the layer whose backward needs it first, or rebuilds something from it.
        saved: the pieces that each layer saves first.
        needed: the pieces that each layer's backward is the first to need, sources before what is
            rebuilt from them.
    """

    decisions: list[Decision]
    first: list[int]
    last: list[int]
    saved: list[list[int]]
    needed: list[list[int]]


@final
class StorageUses:
    """Finds the uses of memory in a step, for any plan.

    Args:
        profile: the step.

    Attributes:
        memories: all pieces of memory that layers save. What layers save as storages comes first.
        saves: the pieces that each layer saves if it runs as it is, by their numbers in it.
        inputs: the piece that is each layer's input; None if it has no bytes.
        inside_bytes: size of what each layer saves that can leave, beside its input.
        owners: the layer whose weights each layer computes with: another call of its module, or
            itself.
    """

    def __init__(self, profile: StepProfile) -> None:
        self.memories: list[Memory] = []
        self.saves: list[list[int]] = []
        self.inputs: list[int | None] = []
        self.pieces: dict[StorageId, int] = {}
        for name in profile.storage_ids():
            storage = profile.storage(name)
            if storage.same_as is not None:
                self.pieces[name] = self.pieces[storage.same_as]
                continue
            sources = tuple(self.pieces[source] for source in storage.sources)
            self.pieces[name] = len(self.memories)
            self.memories.append(
                Memory(storage.size_bytes, storage.may_leave, sources, storage.rebuild_s)
            )
        for index, layer in enumerate(profile.layers):
            names = (StorageId(index, each.number) for each in layer.storages)
            self.saves.append([self.pieces[name] for name in names])
            if layer.input_same_as is not None:
                self.inputs.append(self.pieces[layer.input_same_as])
            elif layer.input_bytes:
                self.inputs.append(len(self.memories))
                self.memories.append(Memory(layer.input_bytes, True, (), None))
            else:
                self.inputs.append(None)
        self.owners = profile.owners
        self._may_recompute = [layer.may_recompute for layer in profile.layers]
        # What others hold, such as the batch, stays if its layer saves nothing, too.
        self._staying = [
            [
                (each, Decision.KEEP)
                for each in set(saves) - {source}
                if not self.memories[each].may_leave
            ]
            for saves, source in zip(self.saves, self.inputs, strict=True)
        ]
        self.inside_bytes = [
            profile.inside_bytes(index) - sum(self.memories[each].size_bytes for each, _ in staying)
            for index, staying in enumerate(self._staying)
        ]

    def under(self, plan: Plan) -> Uses:
        """Return the uses under a plan.

        Raises:
            PolicyError: the plan is not one for this profile.
        """
        self._check(plan)
        count, layers = len(self.memories), len(self.saves)
        decisions = [Decision.KEEP] * count
        first, last = [NOBODY] * count, [NOBODY] * count
        saved: list[list[int]] = [[] for _ in range(layers)]
        for index in range(layers):
            for piece, decision in self._saved_by(index, plan):
                last[piece] = index
                if first[piece] == NOBODY:
                    first[piece] = index
                    saved[index].append(piece)
                    decisions[piece] = self._possible(piece, decision, first)
        needed: list[list[int]] = [[] for _ in range(layers)]
        for piece in range(count - 1, -1, -1):  # sources have lower numbers
            if decisions[piece] is Decision.REBUILD:
                for source in self.memories[piece].sources:
                    last[source] = max(last[source], last[piece])
        for piece in range(count):
            if first[piece] != NOBODY and decisions[piece] is not Decision.KEEP:
                needed[last[piece]].append(piece)
        return Uses(decisions, first, last, saved, needed)

    def offloaded_bytes(self, uses: Uses, pieces: Iterable[int]) -> int:
        """Return the size of those of the pieces that are offloaded."""
        offloaded = (each for each in pieces if uses.decisions[each] is Decision.OFFLOAD)
        return sum(self.memories[each].size_bytes for each in offloaded)

    def _saved_by(self, index: int, plan: Plan) -> list[tuple[int, Decision]]:
        layer, source = plan.layers[index], self.inputs[index]
        if layer.mode is LayerMode.AS_IS:
            return list(zip(self.saves[index], layer.decisions, strict=True))
        if source is None:
            return self._staying[index]
        leaves = layer.mode is LayerMode.RECOMPUTE_OFFLOAD
        return [(source, Decision.OFFLOAD if leaves else Decision.KEEP), *self._staying[index]]

    def _possible(self, piece: int, decision: Decision, first: list[int]) -> Decision:
        memory = self.memories[piece]
        if decision is Decision.OFFLOAD and not (memory.may_leave and memory.size_bytes):
            return Decision.KEEP
        if decision is Decision.REBUILD:
            there = all(first[source] != NOBODY for source in memory.sources)
            if memory.rebuild_s is None or not there:
                return Decision.KEEP
        return decision

    def _check(self, plan: Plan) -> None:
        for mismatch in self._mismatches(plan):
            raise PolicyError(f"the plan {mismatch}; plan again for this profile")

    def _mismatches(self, plan: Plan) -> Iterator[str]:
        count, num_passes = len(self.saves), 2 * len(self.saves) + 1
        if len(plan.layers) != count:
            yield f"has {len(plan.layers)} layers and the profile {count}"
        if plan.windows and len(plan.windows) != num_passes:
            yield f"has windows for {len(plan.windows)} passes, and the profile has {num_passes}"
        for index, (layer, saved) in enumerate(zip(plan.layers, self.saves, strict=True)):
            if layer.mode is not LayerMode.AS_IS:
                if not self._may_recompute[index]:
                    yield f"recomputes layer {index}, which may not be recomputed"
            elif (num := len(layer.decisions)) != len(saved):
                yield f"decides on {num} storages of layer {index}, which saves {len(saved)}"


# ---- The link between the device and the tier below, in virtual time ----

_NO_TIME_S: Final = 1e-15  # what rounding leaves over of a time
_NO_BYTES: Final = 1e-3


@final
class Copy:
    """One copy on the link.

    Args:
        latency_s: seconds that it takes beside its bytes.
        size_bytes: its bytes.

    Attributes:
        size_bytes: as given.
        piece: number of the piece of memory that is copied down; None: gradients, or a copy up.
        end_s: when it has ended; infinity until that is known.
    """

    __slots__ = ("bytes_left", "end_s", "latency_left_s", "piece", "size_bytes")

    def __init__(self, latency_s: float, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.piece: int | None = None
        self.latency_left_s = latency_s
        self.bytes_left = float(size_bytes)
        self.end_s = math.inf

    def left_s(self, rate: float) -> float:
        """Return how long it takes until the bytes begin to move, or else until they have."""
        return self.latency_left_s if self.latency_left_s > 0 else self.bytes_left / rate

    def run(self, run_s: float, rate: float) -> bool:
        """Run for no longer than `left_s`. Returns whether the copy has ended."""
        if self.latency_left_s > 0:
            self.latency_left_s -= run_s
            if self.latency_left_s > _NO_TIME_S:
                return False
            self.latency_left_s = 0.0
        else:
            self.bytes_left -= rate * run_s
        return self.bytes_left < _NO_BYTES


@final
class CopyQueues:
    """Two queues of copies, one for each direction, which share the bandwidth of both ways.

    Each queue runs in order. While copies run in both directions and the link cannot give each its
    own bandwidth, both are slowed down by the same factor.

    Args:
        hardware: has the bandwidths and the latency.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._latency_s = hardware.link_latency_s
        self._alone = (hardware.d2h_bytes_per_s, hardware.h2d_bytes_per_s)
        shared = min(1.0, hardware.duplex_bytes_per_s / sum(self._alone))
        self._together = (self._alone[0] * shared, self._alone[1] * shared)
        self._queues: tuple[deque[Copy], deque[Copy]] = (deque(), deque())
        self._now_s = 0.0

    def offload(self, now_s: float, size_bytes: int) -> Copy:
        """Queue a copy down that may start now."""
        return self._enqueue(0, now_s, size_bytes)

    def reload(self, now_s: float, size_bytes: int) -> Copy:
        """Queue a copy up that may start now."""
        return self._enqueue(1, now_s, size_bytes)

    def has_ended(self, copy: Copy, now_s: float) -> bool:
        """Whether a copy has ended by now, which must not be earlier than in any call before."""
        self._run_until(now_s)
        return copy.end_s <= now_s

    def wait(self, copy: Copy, now_s: float) -> float:
        """Return when a copy has ended, or now if it has. Nothing else is queued until then."""
        self._run_until(now_s)
        while copy.end_s == math.inf:
            self._run_once(math.inf)
        return max(now_s, copy.end_s)

    def _enqueue(self, way: int, now_s: float, size_bytes: int) -> Copy:
        self._run_until(now_s)
        copy = Copy(self._latency_s, size_bytes)
        self._queues[way].append(copy)
        return copy

    def _run_until(self, time_s: float) -> None:
        down, up = self._queues
        while self._now_s < time_s and (down or up):
            self._run_once(time_s)
        self._now_s = max(self._now_s, time_s)

    def _run_once(self, limit_s: float) -> None:
        """Run to the next moment at which a copy ends or its bytes begin to move."""
        down, up = self._queues
        both = down and up and down[0].latency_left_s <= 0 and up[0].latency_left_s <= 0
        down_rate, up_rate = self._together if both else self._alone
        run_s = limit_s - self._now_s
        if down:
            run_s = min(run_s, down[0].left_s(down_rate))
        if up:
            run_s = min(run_s, up[0].left_s(up_rate))
        self._now_s += run_s
        if down and down[0].run(run_s, down_rate):
            down.popleft().end_s = self._now_s
        if up and up[0].run(run_s, up_rate):
            up.popleft().end_s = self._now_s


# ---- How long a step takes under a plan and what memory it needs, from arithmetic ----
#
# [Note: timing] The model of a step is that of the engine, pass by pass. What a layer saves is
# there from the begin of its forward pass. Copies down begin when the pass has ended, those of the
# inputs of recomputed layers when it begins; they run in order, and a source is let go of at the
# first begin of a pass, or save, that finds its copy complete. If more than the plan's bound would
# be in flight, compute waits for the oldest copy. At the begin of each backward pass, reloads are
# queued in the order in which backward needs them, as far as the bound allows. A pass begins when
# all that it needs is there; it holds that until the backward of the layer that saved it first has
# ended. Where a plan has windows, they take the place of the bound: see [Note: windows]. A source
# whose copy is not complete when backward needs it is used as it is. Where copies need the
# processor that computes, what they cost it is added to the time of the step as a whole.


class Prediction(NamedTuple):
    """What a step under a plan is predicted to cost.

    Attributes:
        step_s: seconds of the step.
        peak_bytes: the peak of device memory.
        peak_by_position: the peaks of the passes F0, F1, ..., the loss, ..., B1, B0, in bytes.
        exposed_copy_s: seconds in which compute waits for copies.
        exposed_update_s: seconds in which the host updates weights after backward.
        host_peak_bytes: the peak of what rests in the tier below, without shadows.
        shadow_bytes: what the shadows of an optimizer need that steps inside backward.
    """

    step_s: float
    peak_bytes: int
    peak_by_position: tuple[int, ...]
    exposed_copy_s: float
    exposed_update_s: float
    host_peak_bytes: int
    shadow_bytes: int


MoreBytes = Callable[[Plan], Sequence[int]]
"""Returns what each position of a step under a plan needs beyond what its profile says."""


@final
class StepTiming:
    """Predicts steps of one profile on one machine by arithmetic. See [Note: timing].

    Args:
        profile: the step.
        hardware: the link.
        awaits_copies: whether all copies are awaited at each begin of a pass, as in a step whose
            memory is measured.
        more: what was measured beyond the profile; None: nothing.
        num_forwards: how many forwards follow a plan before a backward. They run one after the
            other, and of those that share a position the fullest counts.

    Not modelled: kernels that are slower while copies use the memory, a host that queues work late,
    a host that runs ahead and so sees copies complete late, copies of the step before that are
    still under way when a step begins, the allocator's fragments, rounding of page-locked memory,
    storages that are reloaded twice, weights that several layers share.
    """

    def __init__(
        self,
        profile: StepProfile,
        hardware: Hardware,
        *,
        awaits_copies: bool = False,
        more: MoreBytes | None = None,
        num_forwards: int = 1,
    ) -> None:
        self._profile = profile = profile.one_after_the_other(num_forwards)
        self._hardware = hardware
        self._more = more
        self._awaits_copies = awaits_copies
        self._num_forwards = num_forwards
        self._uses = StorageUses(profile)

    def predict(self, plan: Plan) -> Prediction:
        """Return what a step under a plan costs.

        Raises:
            PolicyError: the plan is not one for this profile.
        """
        every = plan
        if self._num_forwards > 1:
            layers, windows = plan.layers * self._num_forwards, self._of_all(plan.windows)
            every = dataclasses.replace(plan, layers=layers, windows=windows)
        run = _Run(self._profile, self._hardware, self._uses, every, self._awaits_copies)
        if self._more is not None:
            more = self._more(plan)
            run.more_bytes = list(self._of_all(more) if self._num_forwards > 1 else more)
        run.forward()
        if self._more is not None and not self._hardware.computes_on_host:
            run.count_what_stays()
        run.backward()
        found = run.prediction()
        if self._num_forwards > 1:
            found = found._replace(peak_by_position=self._of_one(found.peak_by_position))
        return found

    def _of_all(self, by_position: Sequence[int]) -> tuple[int, ...]:
        """Return what the positions of one forward have for those of all forwards."""
        every, half = tuple(by_position), len(by_position) // 2
        there, loss, back = every[:half], every[half : half + 1], every[half + 1 :]
        return there * self._num_forwards + loss + back * self._num_forwards

    def _of_one(self, by_position: Sequence[int]) -> tuple[int, ...]:
        """Return the most that the positions of all forwards have for those of one."""
        half = len(by_position) // 2
        num = half // self._num_forwards
        there, back = by_position[:half], by_position[half + 1 :]
        most = [[max(each[index::num]) for index in range(num)] for each in (there, back)]
        return (*most[0], by_position[half], *most[1])


@final
class _Run:
    """One step under one plan."""

    # Long: all its methods change the same account of memory, copies and time.

    def __init__(
        self,
        profile: StepProfile,
        hardware: Hardware,
        storage_uses: StorageUses,
        plan: Plan,
        awaits_copies: bool,
    ) -> None:
        self._profile, self._plan, self._hardware = profile, plan, hardware
        self._awaits_copies = awaits_copies
        self._storages = storage_uses
        self._uses: Uses = storage_uses.under(plan)
        self._sizes = [memory.size_bytes for memory in storage_uses.memories]
        self._links = CopyQueues(hardware)
        self._window = plan.max_inflight_bytes  # of the pass that runs
        self._own_bytes = 0  # that it still has to bring back itself, if it has a window
        self._now_s = profile.before_s
        self._waited_s = 0.0
        self._copied_bytes = 0  # in both directions
        self._resident_bytes = profile.fixed_bytes
        self._stored_bytes = 0  # in all; at the end of forward everything rests there at once
        self._there: set[int] = set()  # pieces in memory
        self._queue: deque[Copy] = deque()  # on their way down
        self._gradients: list[tuple[int, Copy]] = []  # of layers, on their way or there
        self._queued_bytes = 0
        self._copying: set[int] = set()  # pieces in the queue
        self._in_use: set[int] = set()  # brought back, or never gone, for backward
        self._on_way_up: dict[int, Copy] = {}
        self._buffered_bytes = 0  # reloaded, and not needed yet
        self._reloads: list[int] = []  # pieces in the order of their need
        self._places: dict[int, int] = {}  # in that order, of the pieces still to be needed
        self._next_reload = 0
        on_host = [each for each in storage_uses.owners if plan.layers[each].weights_on_host]
        self._weight_uses = deque([*on_host, *reversed(on_host)])  # still to come
        self._weights: dict[int, Copy] = {}  # on the device, least recently used first
        for layer, chosen in zip(profile.layers, plan.layers, strict=True):
            if chosen.weights_on_host:
                self._stored_bytes += layer.parameter_bytes
            else:
                self._resident_bytes += layer.parameter_bytes
        resting = [each.weights_on_host for each in plan.layers]
        self._coming_gradients = profile.coming_gradients(resting)
        self._resident_bytes -= sum(self._coming_gradients)
        for layer, last, rests in zip(profile.layers, profile.last_calls, resting, strict=True):
            self._coming_gradients[last] += layer.gradient_bytes if rests else 0  # to leave again
        self.peaks: list[int] = []
        self.more_bytes = [0] * (2 * len(profile.layers) + 1)  # by position

    # ---- forward ------------------------------------------------------------------------------

    def forward(self) -> None:
        """Run the forward passes and the loss."""
        self._begin_peak_bytes = self._resident_bytes + self._profile.before_working_bytes
        for index, layer in enumerate(self._profile.layers):
            self._retire()
            self._enter(index)
            self._bring_weights(index)
            as_is = self._plan.layers[index].mode is LayerMode.AS_IS
            if not as_is:
                self._save(index)
            self._begin(self._forward_bytes(index, layer, as_is))
            self._now_s += layer.forward_s
            if as_is:
                self._save(index)
            else:
                self._resident_bytes += layer.copied_bytes
        self._retire()
        self._enter(len(self._profile.layers))
        self._begin(self._profile.loss_working_bytes)
        self._now_s += self._profile.loss_s

    def _enter(self, position: int) -> None:
        """Begin a pass: what is on its way down is to fit into its window."""
        if self._awaits_copies:
            self._wait_until_at_most(0)
        if self._plan.windows:
            down = position <= len(self._profile.layers)
            self._window = self._plan.windows[position]
            self._wait_until_at_most(self._window if down else 0)

    def _begin(self, working_bytes: int) -> None:
        """Note the memory of a pass that begins now."""
        working_bytes += self.more_bytes[len(self.peaks)]
        self.peaks.append(self._resident_bytes + working_bytes)

    def _forward_bytes(self, index: int, layer: LayerProfile, as_is: bool) -> int:
        """Return what a forward pass needs beside what is resident."""
        used = set(self._storages.saves[index]) if as_is else set()
        source = self._storages.inputs[index]
        if source is not None:
            used.add(source)
        missing_bytes = sum(self._sizes[piece] for piece in used - self._there)
        if as_is:
            return missing_bytes + layer.forward_working_bytes
        if layer.unsaved_forward_bytes is not None:
            return missing_bytes + layer.unsaved_forward_bytes
        return missing_bytes + self._storages.inside_bytes[index] + layer.forward_working_bytes

    def _save(self, index: int) -> None:
        for piece in self._uses.saved[index]:
            decision = self._uses.decisions[piece]
            if decision is Decision.REBUILD:
                continue
            self._take(piece)
            if decision is Decision.OFFLOAD:
                self._offload(self._sizes[piece], piece)
                self._stored_bytes += self._sizes[piece]

    def _offload(self, size_bytes: int, piece: int | None) -> None:
        self._retire()
        if not self._plan.windows:
            self._wait_until_at_most(self._plan.max_inflight_bytes - size_bytes)
        copy = self._links.offload(self._now_s, size_bytes)
        self._copied_bytes += size_bytes
        self._queue.append(copy)
        copy.piece = piece
        if piece is not None:
            self._copying.add(piece)
        self._queued_bytes += size_bytes

    def _wait_until_at_most(self, size_bytes: int) -> None:
        """Wait for the oldest copies down until no more than this is on its way."""
        while self._queue and self._queued_bytes > size_bytes:
            self._wait(self._queue[0])
            self._retire()

    def _retire(self) -> None:
        """Let go of the sources whose copies are complete, oldest first."""
        while self._queue and self._links.has_ended(self._queue[0], self._now_s):
            source = self._queue.popleft()
            self._queued_bytes -= source.size_bytes
            if source.piece is None:
                self._resident_bytes -= source.size_bytes
            else:
                self._copying.remove(source.piece)
                if source.piece not in self._in_use:
                    self._drop(source.piece)
                    place = self._places.get(source.piece, self._next_reload)
                    self._next_reload = min(self._next_reload, place)

    # ---- backward -----------------------------------------------------------------------------

    def count_what_stays(self) -> None:
        """Count what is still on its way down when backward begins once more.

        Steps are measured with all copies awaited, and then each storage goes when it has been
        read. A copy that is not complete holds its source for longer.
        """
        for index, saved in enumerate(self._uses.saved):
            staying_bytes = sum(self._sizes[each] for each in saved if each in self._copying)
            self.more_bytes[2 * len(self._profile.layers) - index] += staying_bytes

    def backward(self) -> None:
        """Run the backward passes."""
        self._reloads = list(self._expected())
        self._places = {piece: place for place, piece in enumerate(self._reloads)}
        if self._plan.windows:
            self._window = 0  # until the backward of a layer begins
        for index in reversed(range(len(self._profile.layers))):
            layer, mode = self._profile.layers[index], self._plan.layers[index].mode
            if not layer.between:
                self._enter(2 * len(self._profile.layers) - index)
                self._own_bytes = self._brought_back_by(index)
            self._use_source(index)
            self._retire()
            self._bring_weights(index)
            self._resident_bytes += self._coming_gradients[index]
            self._prefetch()
            self._bring_back(index)
            working_bytes = layer.backward_working_bytes
            if mode is not LayerMode.AS_IS:
                working_bytes = layer.second_working_bytes + self._storages.inside_bytes[index]
            self._begin(working_bytes)
            beside_bytes = self.peaks[-1] - self._resident_bytes
            if mode is not LayerMode.AS_IS:
                self._now_s += layer.second_forward_s
            self._now_s += layer.backward_s
            self._let_go(index, beside_bytes)
            if mode is not LayerMode.AS_IS:
                self._resident_bytes -= layer.copied_bytes
            if self._plan.layers[index].weights_on_host and layer.gradient_bytes:
                self._offload(layer.gradient_bytes, None)
                self._gradients.append((index, self._queue[-1]))

    def _use_source(self, index: int) -> None:
        """Note that backward reads what the layer saved last, before anything is let go of."""
        saves = self._storages.saves[index]
        if self._plan.layers[index].mode is LayerMode.AS_IS and saves:
            piece = saves[-1]
            if piece in self._copying and self._uses.last[piece] == index:
                self._in_use.add(piece)

    def _expected(self) -> Iterator[int]:
        for needed in reversed(self._uses.needed):
            for piece in reversed(needed):
                if self._uses.decisions[piece] is Decision.OFFLOAD:
                    yield piece

    def _brought_back_by(self, index: int) -> int:
        """Return what the backward of a layer, and of the work before it, brings back itself."""
        if not self._plan.windows:
            return 0
        indices = [index]
        while indices[-1] and self._profile.layers[indices[-1] - 1].between:
            indices.append(indices[-1] - 1)
        pieces = [piece for each in indices for piece in self._uses.needed[each]]
        return self._storages.offloaded_bytes(self._uses, pieces)

    def _prefetch(self) -> None:
        while self._next_reload < len(self._reloads):
            piece = self._reloads[self._next_reload]
            if piece not in self._there:
                most_bytes = self._window + self._own_bytes
                over = self._buffered_bytes + self._sizes[piece] > most_bytes
                if over and (self._buffered_bytes or self._plan.windows):
                    return
                self._reload(piece)
            self._next_reload += 1

    def _reload(self, piece: int) -> None:
        self._on_way_up[piece] = self._links.reload(self._now_s, self._sizes[piece])
        self._copied_bytes += self._sizes[piece]
        self._buffered_bytes += self._sizes[piece]
        self._take(piece)

    def _bring_back(self, index: int) -> None:
        """Reload and rebuild what a backward pass needs."""
        needed = self._uses.needed[index]
        for piece in reversed(needed):
            if self._uses.decisions[piece] is not Decision.OFFLOAD:
                continue
            self._in_use.add(piece)
            if piece not in self._there:
                self._reload(piece)
            self._prefetch()
            copy = self._on_way_up.pop(piece, None)
            if copy is not None:
                self._wait(copy)
                self._buffered_bytes -= self._sizes[piece]
            self._own_bytes = max(0, self._own_bytes - self._sizes[piece])
        for piece in needed:
            if self._uses.decisions[piece] is Decision.REBUILD:
                self._take(piece)
                self._now_s += self._storages.memories[piece].rebuild_s or 0.0

    def _let_go(self, index: int, beside_bytes: int) -> None:
        """Let go of what a backward pass reads, what was saved last first.

        A storage that is kept asks for what comes next, too, once the pass has all that it brings
        back. What comes may be larger than the bound, and is there beside what is still to be read.
        """
        saved, brought = self._uses.saved[index], self._uses.needed[index]
        if self._next_reload < len(self._reloads):
            end, decisions = brought[0] if brought else sys.maxsize, self._uses.decisions
            kept = [each for each in saved if each < end and decisions[each] is Decision.KEEP]
            if kept:
                count = saved.index(kept[-1]) + 2  # one operation may read two of them
                for piece in saved[count:]:
                    self._end(piece)
                self._prefetch()
                self.peaks[-1] = max(self.peaks[-1], self._resident_bytes + beside_bytes)
                saved = saved[:count]
        for piece in saved:
            self._end(piece)

    def _end(self, piece: int) -> None:
        """Note that nothing needs a piece any more."""
        self._in_use.discard(piece)
        self._places.pop(piece, None)
        stays = self._profile.retains and self._uses.decisions[piece] is Decision.KEEP
        if not stays and piece not in self._copying:  # otherwise its copy reads it
            self._drop(piece)

    # ---- both ---------------------------------------------------------------------------------

    def _take(self, piece: int) -> None:
        self._there.add(piece)
        self._resident_bytes += self._sizes[piece]

    def _drop(self, piece: int) -> None:
        if piece in self._there:
            self._there.remove(piece)
            self._resident_bytes -= self._sizes[piece]

    def _wait(self, copy: Copy) -> None:
        begin_s, self._now_s = self._now_s, self._links.wait(copy, self._now_s)
        self._waited_s += self._now_s - begin_s

    def _bring_weights(self, index: int) -> None:
        """Bring the weights of a layer to the device, and then those of the next one.

        At most two layers' weights are there at once.
        """
        owner = self._storages.owners[index]
        if not self._plan.layers[owner].weights_on_host:
            return
        self._weight_uses.popleft()
        copy = self._weights.pop(owner, None) or self._load_weights(owner)
        self._weights[owner] = copy  # the most recently used
        self._wait(copy)
        if self._weight_uses and self._weight_uses[0] not in self._weights:
            following = self._weight_uses[0]
            self._weights[following] = self._load_weights(following)

    def _load_weights(self, index: int) -> Copy:
        while len(self._weights) > 1:
            oldest = next(iter(self._weights))
            del self._weights[oldest]
            self._resident_bytes -= self._profile.layers[oldest].weight_bytes
        size_bytes = self._profile.layers[index].weight_bytes
        self._resident_bytes += size_bytes
        self._copied_bytes += size_bytes
        return self._links.reload(self._now_s, size_bytes)

    # ---- the end ------------------------------------------------------------------------------

    def _update_weights(self) -> int:
        """Update the weights on the host; return what that needs for shadows.

        A worker steps each layer ahead as soon as its gradients are there: it copies weights and
        state into shadows, and steps those. The end of the step takes over what the worker has not
        begun, and copies the new weights back. All this is as fast as the host's memory. On a CPU,
        the worker would need the cores that backward needs, so there nothing is hidden.
        """
        layers = zip(self._profile.layers, self._plan.layers, strict=True)
        left_s = sum(layer.host_update_s for layer, chosen in layers if chosen.weights_on_host)
        ahead, free_s, shadow_bytes = self._profile.ahead, 0.0, 0
        if ahead is not None and not self._hardware.computes_on_host:
            room_bytes = ahead.shadow_bytes
            if ahead.host_bytes is not None:
                room_bytes = min(room_bytes, ahead.host_bytes - self._stored_bytes)
            for index, copy in self._gradients:
                layer, begin_s = self._profile.layers[index], max(free_s, copy.end_s)
                if shadow_bytes + layer.shadow_bytes > room_bytes:
                    continue
                shadow_bytes += layer.shadow_bytes
                if begin_s < self._now_s:
                    took_s = layer.host_update_s * layer.ahead_bytes / layer.update_bytes
                    free_s = begin_s + took_s
                    left_s -= (1 - ahead.twice_share) * layer.host_update_s
                    left_s += layer.commit_s
        self._now_s = max(free_s, self._now_s) + left_s
        return shadow_bytes

    def prediction(self) -> Prediction:
        """End the step: wait for the gradients, and update the weights."""
        gradients = [source for source in self._queue if source.piece is None]
        if gradients:
            self._wait(gradients[-1])
        self._retire()
        begin_s, shadow_bytes = self._now_s, self._update_weights()
        update_s = self._now_s - begin_s
        self._now_s += self._profile.after_s
        end_peak_bytes = self._resident_bytes + self._profile.after_working_bytes
        if not self._plan.has_weights_on_host:
            end_peak_bytes += self._profile.at_once_bytes
        return Prediction(
            step_s=self._now_s + self._copied_bytes * (self._hardware.copy_cost_s_per_byte or 0.0),
            peak_bytes=max(self._begin_peak_bytes, end_peak_bytes, *self.peaks),
            peak_by_position=tuple(self.peaks),
            exposed_copy_s=self._waited_s,
            exposed_update_s=update_s,
            host_peak_bytes=self._stored_bytes,
            shadow_bytes=shadow_bytes,
        )


# ---- Predicts steps whose copies may be slower than they were measured, or seen later ----
#
# [Note: a host that runs ahead] On an accelerator, the host queues work and allocates memory long
# before the device gets there. It sees hardly any copy complete, so what is on its way down
# occupies memory up to the plan's bound on bytes in flight: there, compute is made to wait for
# the oldest copy, and the host lets go of its source. What is on its way at the end of the
# forward can stay throughout the backward, in which the host waits for nothing. So the peak is
# that of a link on which no copy down is seen complete by chance, while copies up take no time.
# How much less a step needs is chance, and changes with the load of the host. To compare memory
# with a prediction, a step is measured with all copies awaited at each begin of a pass, and their
# sources held until then; and so it is predicted: see `StepTiming`.

_LATE: Final = 1e9  # how many times slower a link is on which no copy is seen complete by chance


_SLOWER: Final = 8.0
"""How many times slower copies are on a CPU where files grow."""


@final
class CautiousTiming:
    """Predicts the time of a step by arithmetic, and its peak for slow or late copies as well.

    On a CPU, copies share the cores with compute, and a file that grows is slow. What waits for its
    copy occupies memory, so the peak is that of the slower of two links. On an accelerator, see
    [Note: a host that runs ahead].

    Args:
        profile: the step.
        hardware: the link, as it was measured.
        slower: how many times slower copies may be on a CPU.
        more: what was measured beyond the profile; None: nothing.
        num_forwards: how many forwards follow a plan before a backward.
    """

    def __init__(
        self,
        profile: StepProfile,
        hardware: Hardware,
        slower: float = _SLOWER,
        more: MoreBytes | None = None,
        num_forwards: int = 1,
    ) -> None:
        timing = functools.partial(StepTiming, profile, more=more, num_forwards=num_forwards)
        self._timing = timing(hardware)
        self._slow = None
        self._runs_ahead = not hardware.computes_on_host
        if self._runs_ahead:
            late = _slowed(hardware, down=_LATE, up=1 / _LATE)
            self._slow = timing(late)
        elif slower > 1:
            slowed = _slowed(hardware, down=slower, up=slower)
            self._slow = timing(slowed)

    def predict(self, plan: Plan) -> Prediction:
        """Return what a step under a plan costs.

        Raises:
            PolicyError: the plan is not one for this profile.
        """
        expected = self._timing.predict(plan)
        # Even if no bytes may be in flight, the last copy is, where the host runs ahead.
        if self._slow is None or not (plan.max_inflight_bytes or self._runs_ahead):
            return expected
        slow = self._slow.predict(plan)
        peaks = tuple(map(max, expected.peak_by_position, slow.peak_by_position))
        peak_bytes = max(expected.peak_bytes, slow.peak_bytes)
        return expected._replace(peak_bytes=peak_bytes, peak_by_position=peaks)


def _slowed(hardware: Hardware, *, down: float, up: float) -> Hardware:
    """Return hardware whose copies take this many times as long."""
    d2h, h2d = hardware.d2h_bytes_per_s, hardware.h2d_bytes_per_s
    shared = min(1.0, hardware.duplex_bytes_per_s / (d2h + h2d))
    return dataclasses.replace(
        hardware,
        d2h_bytes_per_s=d2h / down,
        h2d_bytes_per_s=h2d / up,
        duplex_bytes_per_s=shared * (d2h / down + h2d / up),
    )


Predictor = StepTiming | CautiousTiming


# ---- Windows: as many bytes in flight in each pass as it has room for ----
#
# [Note: windows] One bound on the bytes in flight for a whole step is what the pass with the
# highest peak has room for, and often that is nothing. With windows, each pass has a bound of its
# own. A forward pass begins when what is on its way down fits into its window; what it saves itself
# leaves without a wait, because the pass needs it in memory anyway. The backward begins when all
# copies down are complete, and a backward pass queues reloads while the bytes that were brought
# back and not used yet fit. Unlike the one bound, a window is never exceeded, not by a single copy
# either: with a window of 0, a pass brings back what it needs itself, and nothing for later passes.
#
# A buffer that was brought back for a later pass also occupies the passes between. So the window of
# a backward pass is never larger than what the passes after it use up and have room for.
#
# Torch tells when a layer's backward begins and not when it ends. So the backward of the work
# before a layer has that layer's window, and the backward of work behind the last layer brings back
# nothing ahead of its need.


def open_windows(
    plan: Plan,
    profile: StepProfile,
    uses: StorageUses,
    peaks: Sequence[int],
    device_bytes: int,
) -> Plan:
    """Return a plan whose windows use the memory that it leaves free.

    Args:
        plan: the plan.
        profile: the step.
        uses: what its layers save.
        peaks: what each position of the step needs if all windows are closed.
        device_bytes: how much each may need.
    """
    count = len(profile.layers)
    rooms = [max(0, device_bytes - peak_bytes) for peak_bytes in peaks]
    windows = rooms[: count + 1] + [0] * count
    used = uses.under(plan)
    ahead_bytes = sum(
        memory.size_bytes for memory in uses.memories
    )  # what may be there for passes after the one that is looked at
    for group in reversed(backward_groups(profile)):
        if group[0] == count:
            windows[count] = min(rooms[position] for position in group)
            break
        window = min(ahead_bytes, *(rooms[position] for position in group))
        ahead_bytes = window
        for position in group:
            windows[position] = window
            ahead_bytes += uses.offloaded_bytes(used, used.needed[2 * count - position])
    return dataclasses.replace(plan, windows=tuple(windows), max_inflight_bytes=max(windows))


def backward_groups(profile: StepProfile) -> list[list[int]]:
    """Return the loss and the positions of the backward passes, by whose window they have.

    Each group but the first begins with the backward of a layer. See [Note: windows].
    """
    count = len(profile.layers)
    groups = [[count]]
    for index in reversed(range(count)):
        if profile.layers[index].between:
            groups[-1].append(2 * count - index)
        else:
            groups.append([2 * count - index])
    return groups


# ---- How much memory a plan may use ----


@final
@dataclass(frozen=True, kw_only=True)
class PlanBudget:
    """How much memory a plan may use, in bytes.

    Args:
        device_bytes: the peak of device memory.
        host_bytes: the peak of what rests in the tier below, all of it page-locked where that is an
            accelerator's; None: no limit.

    Raises:
        PolicyError: a figure is not a whole number, 0 or more.
    """

    device_bytes: int
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        check_number("device_bytes", self.device_bytes, whole=True)
        if self.host_bytes is not None:
            check_number("host_bytes", self.host_bytes, whole=True)

    def excess_bytes(self, prediction: Prediction) -> int:
        """Return by how many bytes a step is over its limits, added up; 0 if it is within all."""
        excess_bytes = max(0, prediction.peak_bytes - self.device_bytes)
        if self.host_bytes is not None:
            excess_bytes += max(0, prediction.host_peak_bytes - self.host_bytes)
        return excess_bytes
