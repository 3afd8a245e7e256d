"""How long a step takes under a plan and what memory it needs, from arithmetic.

[Note: timing] The model of a step is that of the engine, pass by pass. What a layer saves is there
from the begin of its forward pass. Copies down begin when the pass has ended, those of the inputs
of recomputed layers when it begins; they run in order, and a source is let go of at the first begin
of a pass, or save, that finds its copy complete. If more than the plan's bound would be in flight,
compute waits for the oldest copy. At the begin of each backward pass, reloads are queued in the
order in which backward needs them, as far as the bound allows. A pass begins when all that it needs
is there; it holds that until the backward of the layer that saved it first has ended. Where a plan
has windows, they take the place of the bound: see [Note: windows] in `pass_windows`. A source
whose copy is not complete when backward needs it is used as it is. Where copies need the processor
that computes, what they cost it is added to the time of the step as a whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Protocol, final

from ebbtide.planning.hardware import Hardware
from ebbtide.planning.plan import Decision, LayerMode, Plan
from ebbtide.planning.prediction.copy_queues import Copy, CopyQueues
from ebbtide.planning.prediction.step_record import DOWN, UP, MemoryParts, PassRecord, StepRecord
from ebbtide.planning.prediction.storage_uses import StorageUses, Uses
from ebbtide.planning.step_profile import LayerProfile, StepProfile


class Prediction(NamedTuple):
    """What a step under a plan is predicted to cost.

    Attributes:
        step_s: seconds of the step.
        peak_bytes: the peak of device memory.
        peak_by_position: the peaks of the passes F0, F1, ..., the loss, ..., B1, B0, in bytes.
        exposed_copy_s: seconds in which compute waits for copies.
        host_peak_bytes: the peak of what rests in the tier below.
        pinned_bytes: how much of that is page-locked.
    """

    step_s: float
    peak_bytes: int
    peak_by_position: tuple[int, ...]
    exposed_copy_s: float
    host_peak_bytes: int
    pinned_bytes: int


class Predictor(Protocol):
    """Predicts steps, by arithmetic (`StepTiming`) or by running the engine in virtual time."""

    def predict(self, plan: Plan) -> Prediction:
        """Return what a step under a plan costs."""


@final
class StepTiming:
    """Predicts steps of one profile on one machine by arithmetic. See [Note: timing].

    Args:
        profile: the step.
        hardware: the link, and whether the tier below is page-locked.

    Not modelled: kernels that are slower while copies use the memory, a host that queues work late,
    a host that runs ahead and so sees copies complete late, copies of the step before that are
    still under way when a step begins, the allocator's fragments, packing of masks, rounding of
    page-locked memory, storages that are reloaded twice, weights that several layers share.
    """

    def __init__(self, profile: StepProfile, hardware: Hardware) -> None:
        self._profile = profile
        self._hardware = hardware
        self._uses = StorageUses(profile)

    def predict(self, plan: Plan) -> Prediction:
        """Return what a step under a plan costs.

        Raises:
            PolicyError: the plan is not one for this profile.
        """
        return self._run(plan, None)

    def record(self, plan: Plan) -> StepRecord:
        """Return what happens in a step under a plan.

        Raises:
            PolicyError: the plan is not one for this profile.
        """
        record = StepRecord()
        self._run(plan, record)
        return record

    def _run(self, plan: Plan, record: StepRecord | None) -> Prediction:
        run = _Run(self._profile, self._hardware, self._uses, plan, record)
        run.forward()
        run.backward()
        return run.prediction()


class _Source(NamedTuple):
    """A source, or a gradient, whose copy down is in the queue. A gradient has piece None."""

    copy: Copy
    size_bytes: int
    piece: int | None


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
        record: StepRecord | None,
    ) -> None:
        self._profile, self._plan, self._hardware = profile, plan, hardware
        self._record = record
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
        self._queue: deque[_Source] = deque()  # on their way down
        self._queued_bytes = 0
        self._copying: set[int] = set()  # pieces in the queue
        self._in_use: set[int] = set()  # brought back, or never gone, for backward
        self._on_way_up: dict[int, Copy] = {}
        self._buffered_bytes = 0  # reloaded, and not needed yet
        self._reloads: list[int] = []  # pieces in the order of their need
        self._places: dict[int, int] = {}  # in that order, of the pieces still to be needed
        self._next_reload = 0
        on_host = [i for i, each in enumerate(plan.layers) if each.weights_on_host]
        self._weight_uses = deque([*on_host, *reversed(on_host)])  # still to come
        self._weights: dict[int, Copy] = {}  # on the device, least recently used first
        for layer, chosen in zip(profile.layers, plan.layers, strict=True):
            if chosen.weights_on_host:
                self._stored_bytes += layer.parameter_bytes
            else:
                self._resident_bytes += layer.parameter_bytes
        self.peaks: list[int] = []

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
            self._begin("forward", index, self._forward_bytes(index, layer, as_is))
            self._now_s += layer.forward_s
            if as_is:
                self._save(index)
        self._retire()
        self._enter(len(self._profile.layers))
        self._begin("loss", None, self._profile.loss_working_bytes)
        self._now_s += self._profile.loss_s

    def _enter(self, position: int) -> None:
        """Begin a pass: what is on its way down is to fit into its window."""
        if not self._plan.windows:
            return
        down = position <= len(self._profile.layers)
        self._window = self._plan.windows[position]
        self._wait_until_at_most(self._window if down else 0)

    def _begin(self, what: str, index: int | None, working_bytes: int) -> None:
        """Note the memory of a pass that begins now."""
        self.peaks.append(self._resident_bytes + working_bytes)
        if self._record is None:
            return
        profile, recompute_s = self._profile, 0.0
        duration_s = profile.loss_s
        if index is not None:
            layer = profile.layers[index]
            duration_s = layer.forward_s if what == "forward" else layer.backward_s
            if what == "backward" and self._plan.layers[index].mode is not LayerMode.AS_IS:
                recompute_s = layer.second_forward_s
        saved_bytes = sum(self._sizes[piece] for piece in self._there)
        decisions = self._uses.decisions
        back = self._there & {*self._in_use, *self._on_way_up} - self._copying
        returned = [piece for piece in back if decisions[piece] is Decision.OFFLOAD]
        parts = MemoryParts(
            parameters_bytes=self._resident_bytes - saved_bytes - profile.fixed_bytes,
            fixed_bytes=profile.fixed_bytes,
            saved_bytes=saved_bytes,
            leaving_bytes=sum(self._sizes[piece] for piece in self._copying),
            returning_bytes=sum(self._sizes[piece] for piece in returned),
            working_bytes=working_bytes,
        )
        end_s = self._now_s + duration_s + recompute_s
        self._record.passes.append(PassRecord(what, index, self._now_s, end_s, recompute_s, parts))

    def _forward_bytes(self, index: int, layer: LayerProfile, as_is: bool) -> int:
        """Return what a forward pass needs beside what is resident."""
        used = {piece for _, piece in self._storages.saves[index]} if as_is else set()
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
        if self._record is not None and piece is not None:
            self._record.note_copy(DOWN, self._uses.first[piece], size_bytes, copy)
        self._queue.append(_Source(copy, size_bytes, piece))
        if piece is not None:
            self._copying.add(piece)
        self._queued_bytes += size_bytes

    def _wait_until_at_most(self, size_bytes: int) -> None:
        """Wait for the oldest copies down until no more than this is on its way."""
        while self._queue and self._queued_bytes > size_bytes:
            self._wait(self._queue[0].copy)
            self._retire()

    def _retire(self) -> None:
        """Let go of the sources whose copies are complete, oldest first."""
        while self._queue and self._links.has_ended(self._queue[0].copy, self._now_s):
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
            if self._plan.layers[index].weights_on_host:
                self._resident_bytes += layer.gradient_bytes
            self._prefetch()
            self._bring_back(index)
            working_bytes = layer.backward_working_bytes
            if mode is not LayerMode.AS_IS:
                working_bytes = layer.second_working_bytes + self._storages.inside_bytes[index]
            self._begin("backward", index, working_bytes)
            if mode is not LayerMode.AS_IS:
                self._now_s += layer.second_forward_s
            self._now_s += layer.backward_s
            for piece in self._uses.saved[index]:
                self._end(piece)
            if self._plan.layers[index].weights_on_host and layer.gradient_bytes:
                self._offload(layer.gradient_bytes, None)

    def _use_source(self, index: int) -> None:
        """Note that backward reads what the layer saved last, before anything is let go of."""
        saves = self._storages.saves[index]
        if self._plan.layers[index].mode is LayerMode.AS_IS and saves:
            piece = saves[-1][1]
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
        copy = self._on_way_up[piece] = self._links.reload(self._now_s, self._sizes[piece])
        self._copied_bytes += self._sizes[piece]
        if self._record is not None:
            self._record.note_copy(UP, self._uses.first[piece], self._sizes[piece], copy)
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
        begin_s = self._now_s
        for piece in needed:
            if self._uses.decisions[piece] is Decision.REBUILD:
                self._take(piece)
                self._now_s += self._storages.memories[piece].rebuild_s or 0.0
        if self._record is not None:
            self._record.note_rebuild(begin_s, self._now_s, index)

    def _end(self, piece: int) -> None:
        """Note that nothing needs a piece any more."""
        self._in_use.discard(piece)
        self._places.pop(piece, None)
        if piece not in self._copying:  # otherwise its copy reads it
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
        if self._record is not None:
            self._record.note_wait(begin_s, self._now_s)

    def _bring_weights(self, index: int) -> None:
        """Bring the weights of a layer to the device, and then those of the next one.

        At most two layers' weights are there at once.
        """
        if not self._plan.layers[index].weights_on_host:
            return
        self._weight_uses.popleft()
        copy = self._weights.pop(index, None) or self._load_weights(index)
        self._weights[index] = copy  # the most recently used
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

    def prediction(self) -> Prediction:
        """End the step: wait for the gradients, and update the weights."""
        gradients = [source for source in self._queue if source.piece is None]
        if gradients:
            self._wait(gradients[-1].copy)
        self._retire()
        layers = zip(self._profile.layers, self._plan.layers, strict=True)
        self._now_s += sum(layer.host_update_s for layer, on in layers if on.weights_on_host)
        self._now_s += self._profile.after_s
        end_peak_bytes = self._resident_bytes + self._profile.after_working_bytes
        pinned_bytes = 0 if self._hardware.computes_on_host else self._stored_bytes
        return Prediction(
            step_s=self._now_s + self._copied_bytes * (self._hardware.copy_cost_s_per_byte or 0.0),
            peak_bytes=max(self._begin_peak_bytes, end_peak_bytes, *self.peaks),
            peak_by_position=tuple(self.peaks),
            exposed_copy_s=self._waited_s,
            host_peak_bytes=self._stored_bytes,
            pinned_bytes=pinned_bytes,
        )
