"""Keeps a model's training within a budget: records, plans and follows each kind of step."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn

from ebbtide.devices.hardware import Hardware
from ebbtide.devices.process import watch_forks, watch_optimizers
from ebbtide.errors import BudgetError, PolicyError, StoreFullError, warn_user
from ebbtide.observe.inspection import inspect_engine
from ebbtide.observe.passes import PassWatch
from ebbtide.observe.recording import trace_of
from ebbtide.planning.budget_study import SURE, BudgetStudy, Phase
from ebbtide.planning.follow import place
from ebbtide.planning.plan import Plan
from ebbtide.planning.planned_step import PlannedStep
from ebbtide.planning.profile import StepAhead, StepProfile
from ebbtide.planning.recorded import (
    profile_recorded_step,
    with_copied_bytes,
    with_weight_bytes,
)
from ebbtide.planning.relaxation import load_solver
from ebbtide.runtime.engine import INFLIGHT_BYTES, Engine
from ebbtide.runtime.rebuild import PlannedLayers, mark_not_offload
from ebbtide.runtime.torch_internals import in_backward, tree_flatten, tree_leaves
from ebbtide.stores.measured_memory import AbstractMemory, memory_of
from ebbtide.units import format_size, parse_budget_bytes
from ebbtide.weights.hooks import parameters_of
from ebbtide.weights.model_weights import ADAM_STATES, ModelWeights

# ---- Tells steps apart that need plans of their own, and remembers the plans of a few of them ----
#
# [Note: kinds of steps] Two forwards are of one kind if autograd saves the same tensors in them,
# as far as their arguments tell: types and shapes of tensors, truth values and text, the modes of
# the modules, which layers are still the model's, which parameters are trained, autocast. A number,
# such as the step or an annealing factor, is taken to change nothing. Where it does, a step that is
# over the budget leads to a plan that leaves room for it.
#
# Shapes that change from step to step share what they can. A step with smaller tensors than a
# planned one follows that one's plan and needs less, until its shapes have come so often that a
# plan of their own pays. Larger tensors are always planned for. Only the kinds that came last are
# remembered.

_MOST_KINDS: Final = 8  # that are remembered; each has up to a few hundred KiB
_LAST_STEPS: Final = 64  # among which shapes that have no plan yet must come
_OFTEN: Final = 8  # this many times to get one


class Kind(NamedTuple):
    """A kind of step. See [Note: kinds of steps].

    Attributes:
        structure: all but the sizes of the arguments' tensors.
        sizes: number of elements of each tensor.
        shapes: their shapes.
    """

    structure: Hashable
    sizes: tuple[int, ...]
    shapes: tuple[Hashable, ...]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        layers: Iterable[Callable[[], nn.Module | None]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
    ) -> Kind:
        """Return the kind of a forward.

        Args:
            model: the model.
            layers: weak references to its layers, of which the program may have replaced some.
            args: the positional arguments of the forward.
            kwargs: its keyword arguments.
            device: where the model computes, which weights that rest do not tell.
        """
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        modes = {module: module.training for module in model.modules()}
        own = hash((*modes.values(), *(known() in modes for known in layers)))
        trained = hash(tuple(each.requires_grad for each in model.parameters()))
        casts = torch.is_autocast_enabled(device.type)
        autocast = casts and torch.get_autocast_dtype(device.type)
        kinds = tuple(map(_describe, leaves))
        return cls(
            (kinds, str(structure), own, trained, autocast),
            tuple(each.numel() for each in tensors),
            tuple(each.shape for each in tensors),
        )

    def covers(self, other: Kind) -> bool:
        """Whether each tensor of another kind, alike in all else, is no larger."""
        pairs = zip(self.sizes, other.sizes, strict=True)
        return self.structure == other.structure and all(one >= two for one, two in pairs)


def _describe(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.dim(), leaf.dtype, leaf.device, leaf.requires_grad
    if isinstance(leaf, bool | str | None):
        return leaf
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}"


@final
class StudiesByKind:
    """The studies of the kinds of steps that came last."""

    def __init__(self) -> None:
        self._studies: OrderedDict[Kind, BudgetStudy | None] = (
            OrderedDict()
        )  # the last one used comes last
        self._latest: deque[Kind] = deque(maxlen=_LAST_STEPS)

    def find(self, kind: Kind) -> tuple[Kind, BudgetStudy | None] | None:
        """Return the study that a step is to follow, with its kind; None if it needs a new one.

        Args:
            kind: the kind of the step.
        """
        self._latest.append(kind)
        found = kind
        if kind not in self._studies:
            covering = [each for each in self._studies if each.covers(kind)]
            if not covering or self._latest.count(kind) >= _OFTEN:
                return None
            found = min(covering, key=lambda each: sum(each.sizes))
        self._studies.move_to_end(found)
        return found, self._studies[found]

    def add(self, kind: Kind, study: BudgetStudy | None) -> None:
        """Remember a study, and forget the one that was used longest ago if there are many."""
        self._studies[kind] = study
        if len(self._studies) > _MOST_KINDS:
            self._studies.popitem(last=False)

    def forget(self, kind: Kind) -> None:
        """Forget the study of a kind, so that the next step of it is recorded."""
        self._studies.pop(kind, None)

    def clear(self) -> None:
        """Forget all studies."""
        self._studies.clear()
        self._latest.clear()


# ---- Follows a budget from step to step: says which plan each forward follows, and measures ----

_LOG = logging.getLogger(__name__)

# [Note: weights under a budget] If the parameters, their gradients and the step of an Adam, which
# has two states and computes as much again, could need more than the budget beside all else, all
# weights rest on the host before the first step; otherwise, as soon as no plan fits with them on
# the device, or a first step runs out of memory. A plan for a step with all weights at rest says
# which of them pay to be on the device, with their gradients and their state; what was measured
# with all of them on the device says what such a step needs. Plans of other kinds of steps take
# the weights as they are. If none of theirs fits, all weights rest again, for good.

# [Note: an optimizer that has not stepped] Where gradients are added up over several forwards, the
# first steps are measured, and planned, before an optimizer has made its state. If gradients stay
# and none has stepped, an Adam is expected: two states of each trained weight, and as much again in
# its step where all are on the device. When it has stepped, its state is known.

# [Note: several models] Budgets of models on one device bound the same memory. Each plan counts
# what is there, and the gradients and the state of an Adam of the others whose training has begun
# and whose optimizers have not stepped yet. When a model comes, all others count that may be
# trained: its weights rest if not all have room. Where no plan fits, those of the others rest.

# [Note: what counts] A budget is of what tensors use at once. Torch also caches what was freed, and
# returns that by itself where the device has no more. It is not returned here, and makes no plan
# smaller: to return it before passes that need room waits for the device, and all pages are mapped
# anew (H100: steps of an FNO took 478 ms, others 1.3 to 4 times as long); a plan that left room for
# it took 324 ms. Without either it was 245 ms, with 20.0 GiB in use and 24.2 reserved.

_SHARE: Final = 0.9  # of a device's memory is the budget if none is given
_MOST_RESTED: Final = 2
_PART_IN_FLIGHT: Final = 20  # of the budget may be in flight in a step that has no plan
_MOST_VERIFYING: Final = 4  # steps in a row that verify what a plan recomputes
_CONTROLLERS: Final = weakref.WeakValueDictionary[int, "BudgetController"]()  # by identity


class _Running(NamedTuple):
    """The step that runs, if it is to be learned from.

    Attributes:
        kind: its kind.
        study: its study; None if the step is recorded, so that there will be one.
        watch: measures the memory of its passes; None if that is not measured.
        is_timed: whether its seconds are learned, and not its memory.
        begin_s: when it began.
        number: number of steps that had finished by then.
        failures: how often memory had been short by then.
        num_refused: how often the store had been full by then.
        is_own: whether the study is of this kind, and not of one with larger tensors.
        num_optimized: how often optimizers had stepped by then.
        versions: the sum of the trained weights' versions, if it is asked for when the step ends.
    """

    kind: Kind
    study: BudgetStudy | None
    watch: PassWatch | None
    is_timed: bool
    begin_s: float
    number: int
    failures: int
    num_refused: int
    is_own: bool = True
    num_optimized: int = 0
    versions: int | None = None


@final
class BudgetController:
    """Plans the steps of one model to a budget.

    Args:
        model: the model. It is not kept alive.
        layers: its layers. They are not kept alive.
        engine: the engine of the model.
        budget: bytes, text such as ``"24GiB"``, or a share of all memory such as ``"90%"``. None:
            most of what the device has for this process. Then no error is raised.
        min_bytes: smaller storages stay where they are.
        memory: what is measured; None means the process on a CPU, else the device.
        weights: places the model's weights, which the budget then decides about, too. See
            [Note: weights under a budget]. None: the weights stay where they are.

    Raises:
        PolicyError: the budget cannot be read.
    """

    # Long: it follows a step from its begin to its end, and each of its methods is short.

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[nn.Module],
        engine: Engine,
        budget: int | str | None,
        min_bytes: int,
        memory: AbstractMemory | None = None,
        weights: ModelWeights | None = None,
    ) -> None:
        self._weights = weights
        self._resting: frozenset[str] = frozenset()  # layers whose weights rest
        self._num_rested = 0  # times that all weights were told to rest
        self._placing: BudgetStudy | None = None  # the study that decides about the weights
        self._model = weakref.ref(model)
        self._layers = [weakref.ref(layer) for layer in layers]
        # Several threads may run the model, and a signal handler in the one that chooses a plan.
        self._lock = threading.RLock()
        watch_forks(self)
        self._engine = engine
        self._traced = engine.is_traced
        self._budget = budget
        self._min_bytes = min_bytes
        self._given = memory
        self._studies: StudiesByKind = StudiesByKind()  # None: has no plan
        self._running: _Running | None = None
        self._last: BudgetStudy | None = None  # of the last step; None: it could not be planned
        self._is_short = False  # whether a recorded step has run out of memory
        self._num_verifying = 0  # steps in a row that have verified layers
        self._followed: tuple[Any, ...] | None = None  # what the engine follows, and whose plan
        self._num_forwards = 1  # that the step has had; several share a plan
        self._most_forwards: dict[Kind, int] = {}  # of kinds whose steps differ in that
        self._has_fitted = False  # whether a step was within the budget
        self._said: set[str] = set()  # what the user knows
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._num_optimized = 0  # times that optimizers of the model have stepped
        watch_optimizers(after=self._note_optimized)
        self._memory = memory or memory_of(engine.torch_device)
        self._loosen: Callable[[], object] = lambda: None
        self._begin_on(engine.torch_device)
        self._thread: int | None = None  # that has trained the model last
        _CONTROLLERS[id(self)] = self
        if weights is not None:
            if self._may_be_over(self._others_bytes(begun=False)):
                self._rest_all()
            if not self._resting:
                try:
                    weights.place(())
                except torch.OutOfMemoryError:  # other programs use the device, too
                    if not self._rest_all():
                        raise
        load_solver()

    @property
    def plan(self) -> PlannedStep | None:
        """The plan of the last step; None before the first, or if it could not be planned."""
        return None if self._last is None else self._last.step

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Choose the plan of a forward that begins now.

        Args:
            args: its positional arguments.
            kwargs: its keyword arguments.

        Raises:
            BudgetError: no plan fits into the budget.
        """
        if in_backward():
            return  # other code computes the forward again
        with self._lock:
            model = self._model()
            saves = model is not None and _needs_gradients(model, args, kwargs)
            if self._engine.is_in_step():
                self._num_forwards += saves
                return
            running = self._running
            if not saves and running is not None and self._num_optimized == running.num_optimized:
                return  # an evaluation before the optimizer steps, which belongs to the step
            self._learn()
            if model is None or not saves:
                return  # autograd saves nothing
            if running is None and self._memory.peak_bytes() > self._budget_bytes:
                self._memory.reset_peak()  # no step had that, but an evaluation
            if self._engine.torch_device != self._device:
                self._begin_on(self._engine.torch_device)
            kind = Kind.of(model, self._layers, args, kwargs, self._device)
            self._begin(kind, args, kwargs)

    def detach(self) -> None:
        """Let the policy decide again, and measure nothing any more."""
        _CONTROLLERS.pop(id(self), None)
        self._running = self._engine.transfers.account.passes = None
        self._loosen()
        self._engine.follow(None, None)

    def note_fork(self) -> None:
        """Make a new lock in a forked child: a thread of the parent may have held the old one."""
        self._lock = threading.RLock()

    def _begin_on(self, device: torch.device) -> None:
        self._device = device
        self._loosen()
        self._memory = self._given or memory_of(device)
        self._hardware = assumed_hardware(device)
        if self._budget is None:
            self._budget_bytes = int(_SHARE * self._memory.available_bytes)
        else:
            self._budget_bytes = parse_budget_bytes(self._budget, self._memory.total_bytes)
        self._memory.keep_tight(True)
        self._loosen = weakref.finalize(self, self._memory.keep_tight, False)
        self._studies.clear()
        self._running = None

    def _may_be_over(self, others_bytes: int) -> bool:
        """Whether the memory in use, and what training may add to it, is more than the budget.

        Args:
            others_bytes: what the training of other models may bring.
        """
        # What is in use has the weights of a model that is on the device already.
        model, used_bytes = self._model(), self._memory.now_bytes()
        most_bytes = 0 if model is None else _most_weight_bytes(model, self._device)
        return used_bytes + most_bytes + others_bytes > self._budget_bytes

    def _others(self) -> list[BudgetController]:
        """Return the budgets of other models on the device. See [Note: several models]."""
        alive = (known() for known in _CONTROLLERS.valuerefs())  # other threads may add some
        others = (each for each in alive if each is not None and each is not self)
        return [each for each in others if each._device == self._device]

    def _others_bytes(self, *, begun: bool = True) -> int:
        """Return the memory that other models' training will add. See [Note: several models].

        Args:
            begun: whether only those count that have been trained.
        """
        return sum(
            each._trained_bytes(self._device) * (ADAM_STATES + (not each._have_gradients()))
            for each in self._others()
            if not each._num_optimized and (each._thread is not None or not begun)
        )

    def _rest_others(self) -> bool:
        """Have the weights of other models rest if nothing reads them; return whether any do."""
        rested = False
        for each in self._others():
            transfers = each._engine.transfers
            is_used = transfers.live or transfers.running  # or by another thread, perhaps
            if each._thread in (None, threading.get_ident()) and not is_used:
                rested |= each._rest_all()
        return rested

    def _renew_others(self) -> None:
        """Have other models of this thread recorded anew: their plans were for a fuller device."""
        for each in self._others():
            if each._thread == threading.get_ident():
                each._running = each._engine.transfers.account.passes = each._placing = None
                each._studies.clear()

    def _begin(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_first, self._thread = self._thread is None, threading.get_ident()
        found = self._studies.find(kind)
        self._num_forwards = 1
        self._last = None if found is None else found[1]
        if found is None:
            # Since the model was offloaded, others may have come to the device.
            comes_late = is_first and self._may_be_over(self._others_bytes())
            if (self._is_short or comes_late) and self._rest_all():
                self._is_short = False  # a step with all weights on the host needs less
            _LOG.info("a new kind of step is recorded, with everything offloaded")
            self._record(kind, args, kwargs)
            return
        known, study = found
        if study is None:
            self._offload_all()
            return
        try:
            self._follow(kind, known, study)
        except (BudgetError, torch.OutOfMemoryError) as error:
            were_there = not self._resting
            if self._rest_all():
                self._renew_others()
                _LOG.info("no plan fits beside the weights: all of them rest on the host now")
                if not were_there:
                    self._last = None
                    self._record(kind, args, kwargs)
                    return
                begin_bytes = self._memory.now_bytes()
                self._last = rested = self._study(study.profile, begin_bytes, study.num_forwards)
                rested.learn_from(study)
                self._studies.add(kind, rested)
                self._follow(kind, kind, rested)
                return
            if self._rest_others():
                self._renew_others()
                self._placing = self._last = None
                self._studies.clear()
                self._record(kind, args, kwargs)
                return
            goes_on = self._budget is None or any(
                each._has_fitted for each in (self, *self._others())
            )
            if not goes_on or not isinstance(error, BudgetError):
                raise
            _LOG.info("no plan fits, so the one that needs least is followed: %s", error)
            study.follow_least()
            self._warn_of_excess(
                f"no plan fits into the budget of {format_size(self._budget_bytes)} any more. From "
                f"now on the one that needs least is followed, which is predicted to take "
                f"{format_size(study.plan.peak_bytes or 0)}"
            )
            self._follow(kind, known, study)

    def _follow(self, kind: Kind, known: Kind, study: BudgetStudy) -> None:
        """Follow the plan of a study in the step that begins now.

        Args:
            kind: the kind of the step.
            known: the kind that the study is of, with larger tensors perhaps.
            study: the study.

        Raises:
            BudgetError: no plan fits into the budget, and no step has been within it.
        """
        # Smaller tensors than those that were planned for say nothing of the plan.
        is_own = known == kind
        if is_own and study.expects_state and self._num_optimized:
            self._learn_state(study)
        measures = is_own and study.phase is not Phase.SETTLED
        if measures:
            self._memory.return_freed()
            if self._device.type != "cpu":
                self._finish_copies()
            self._note_weights(study)
            study.others_bytes = self._others_bytes()
        plan = study.choose(self._memory.now_bytes()) if measures else study.plan
        followed = self._followed
        self._followed = (study, plan.layers, plan.max_inflight_bytes, plan.windows)
        if self._followed != followed:
            self._place_weights(study, plan)
            planned = place(study.profile, plan)._replace(keeps_if_full=True)
            self._engine.follow(planned, plan.max_inflight_bytes)
            if _LOG.isEnabledFor(logging.INFO):
                _LOG.info("the next step follows another plan: %s", study.step.summary)
        measures = measures and study.phase is not Phase.SETTLED  # choosing may settle it
        is_timed = measures and (study.num_forwards > 1 or study.is_to_be_timed)
        watch = None
        if is_timed:
            self._memory.reset_peak()
        elif measures:
            self._note_weights(study)  # some may have moved
            watch = self._watch(study.profile)
        passes = watch
        if passes is None and self._memory.keeps_freed:
            passes = self._watch(study.profile, measures=False)
        self._engine.transfers.account.passes = passes
        self._engine.record_steps(traced=self._traced or measures)
        running = self._begun(kind, study, watch)
        self._running = running._replace(is_own=is_own, is_timed=is_timed)

    def _note_optimized(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        model = self._model()
        if optimizer not in self._optimizers and model is not None:
            if set(parameters_of(optimizer)).isdisjoint(model.parameters()):
                return
            self._optimizers.add(optimizer)
        self._num_optimized += 1

    def _trained(self) -> list[nn.Parameter]:
        model = self._model()
        return [] if model is None else [each for each in model.parameters() if each.requires_grad]

    def _versions(self) -> int:
        """Return a number that grows when a weight is written, other than through ``.data``."""
        return sum(each._version for each in self._trained())

    def _have_gradients(self) -> bool:
        return any(each.grad is not None for each in self._trained())

    def _awaits_optimizer(self) -> bool:
        """Whether gradients are added up for an optimizer that has not stepped yet."""
        return not self._num_optimized and self._have_gradients()

    def _trained_bytes(self, device: torch.device | None = None) -> int:
        """Return what the trained weights occupy, all of them or those on one device."""
        there = (each for each in self._trained() if device is None or each.device == device)
        return sum(getattr(each, "_local_tensor", each).nbytes for each in there)

    def _learn_state(self, study: BudgetStudy) -> None:
        """Tell a study the state of an optimizer that had not stepped when the study was made."""
        states = (each for of in self._optimizers for each in of.state.values())
        tensors = (each for state in states for each in state.values() if isinstance(each, Tensor))
        sizes = self._weights.sizes() if self._weights and study is self._placing else {}
        study.learn_state(sum(each.nbytes for each in tensors), sizes)

    def _note_weights(self, study: BudgetStudy) -> None:
        """Tell the study that places the weights which of them are on the device now."""
        if self._weights is not None and study is self._placing:
            study.note_weights(
                self._weights.there_bytes(),
                self._engine.transfers.account.weight_bytes,
                self._trained_bytes() if study.expects_state else self._weights.at_once_bytes(),
            )

    def _rest_all(self) -> bool:
        """Let all weights rest on the host; return whether that is new.

        See [Note: weights under a budget].
        """
        if self._weights is None or not self._can_rest_more():
            return False
        try:
            self._weights.place()
        except (PolicyError, StoreFullError) as error:
            _LOG.info("the weights stay on the device: %s", error)
            self._num_rested = _MOST_RESTED
            try:
                self._weights.place(self._resting)
            except torch.OutOfMemoryError:
                raise error from None  # it says what to change
            return False
        self._resting, self._num_rested = self._weights.names, self._num_rested + 1
        self._placing = None
        self._studies.clear()
        self._memory.return_cached()
        if self._budget is None and self._is_news("weights-rest"):
            warn_user(
                "weights-rest",
                "this model may not fit on its device with gradients and optimizer state, so these "
                "and its weights rest on the host, but for those that a plan brings back: they are "
                "tensors of the host outside of its forward. To leave them on the device, give "
                "activations=ebbtide.ActivationPolicy()",
                UserWarning,
            )
        return True

    def _can_rest_more(self) -> bool:
        """Whether weights that are on the device may rest."""
        if self._weights is None or self._num_rested == _MOST_RESTED or not self._weights.may_move:
            return False
        return self._resting != self._weights.names

    def _place_weights(self, study: BudgetStudy, plan: Plan) -> None:
        """Move the weights to where a plan has them, if the plan decides about them."""
        if self._weights is None or study is not self._placing or not self._weights.may_move:
            return
        owners = study.profile.weight_owners()
        resting = self._weights.names - {
            name for name, calls in owners.items() if not plan.layers[calls[0]].weights_on_host
        }
        if resting != self._resting:
            _LOG.info("the weights of %d layers rest on the host now", len(resting))
            self._resting = resting
            self._weights.place(resting)

    def _begun(self, kind: Kind, study: BudgetStudy | None, watch: PassWatch | None) -> _Running:
        """Return a description of the step that begins now."""
        number, failures = self._engine.num_steps, self._memory.num_failures()
        num_refused = self._engine.transfers.offloads.num_refused
        is_asked = watch is not None or (study is not None and study.expects_state)
        versions = self._versions() if is_asked else None
        begin_s = time.perf_counter()
        return _Running(
            kind,
            study,
            watch,
            False,
            begin_s,
            number,
            failures,
            num_refused,
            num_optimized=self._num_optimized,
            versions=versions,
        )

    def _record(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the step that begins now, which offloads all that can leave."""
        leaves = tree_leaves((args, kwargs))
        held = [each for each in leaves if isinstance(each, torch.Tensor)]
        mark_not_offload(*held)  # the loop holds the batch, so that would save nothing
        # A disk is slow, and of a first step on a CPU no seconds are learned.
        self._offload_all(waits=self._device.type == "cpu")
        self._memory.return_cached()  # what others have left there is not this step's
        find = self._engine.activations.find
        watch = self._watch(None, find, held)
        self._engine.transfers.account.passes = watch
        self._engine.record_steps(traced=True)
        self._running = self._begun(kind, None, watch)

    def _watch(
        self, profile: StepProfile | None, *recorded: Any, measures: bool = True
    ) -> PassWatch:
        """Measure the step that begins now. See `PassWatch`."""
        account = self._engine.transfers.account
        # See [Note: a host that runs ahead]. On a CPU the host sees how far copies are.
        finish = None if self._device.type == "cpu" else self._finish_copies
        return PassWatch(
            self._memory,
            account,
            profile,
            finish,
            *recorded,
            count_live=self._count_live,
            has_gradients=self._have_gradients(),
            measures=measures,
        )

    def _count_live(self) -> int:
        self._engine.transfers.poll()  # which notes what has died
        return self._engine.transfers.live

    def _offload_all(self, *, waits: bool = False) -> None:
        """Offload all that can leave in the step that begins now.

        Args:
            waits: whether each copy is waited for, so that least is there at once.
        """
        nothing: frozenset[int] = frozenset()
        bound_bytes = min(INFLIGHT_BYTES, self._budget_bytes // _PART_IN_FLIGHT)
        bound_bytes = 0 if waits or self._is_short else bound_bytes
        planned = PlannedLayers({}, nothing, nothing, rebuilds=True, keeps_if_full=True)
        self._engine.follow(planned, bound_bytes)
        self._engine.record_steps(traced=self._traced)
        self._followed = None

    def _finish_copies(self) -> None:
        """Wait for the copies under way, and free what they needed."""
        transfers = self._engine.transfers
        transfers.device.finish_copies()
        with transfers, transfers.gate:
            transfers.offloads.hold_to(0)
        transfers.poll()

    def _study_recorded(
        self, kind: Kind, watch: PassWatch, step_s: float, *, was_full: bool
    ) -> BudgetStudy | None:
        """Return the study of the step that was recorded last; None if it cannot be planned."""
        try:
            profile = profile_recorded_step(
                inspect_engine(self._engine).storages,
                watch.calls,
                self._hardware,
                min_bytes=self._min_bytes,
            )
        except PolicyError as error:
            if self._budget is not None and self._is_news("budget-not-planned"):
                warn_user(
                    "budget-not-planned",
                    f"the budget cannot be planned, so everything is offloaded: {error}",
                    UserWarning,
                )
            return None
        model = self._model()
        profile = profile if model is None else with_copied_bytes(profile, model)
        num_forwards = max(self._num_forwards, self._most_forwards.get(kind, 1))
        study = self._study(profile, watch.begin_bytes, num_forwards)
        watch.bind(study.profile)
        if was_full:
            study.learn_full_store()
        elif study.has_all_passes(watch):
            # Its seconds say little of others, unless another such step would be over the budget.
            is_over = watch.peak_bytes > SURE * self._budget_bytes
            if not is_over and (self._device.type != "cpu" or self._num_forwards > 1):
                study.learn_memory(watch)
                is_over = self._device.type != "cpu" and not study.is_to_be_timed
            if is_over:
                study.learn(trace_of(self._engine), step_s, watch.peak_bytes, watch)
        return study

    def _study(self, profile: StepProfile, begin_bytes: int, num_forwards: int) -> BudgetStudy:
        """Return the study of a step, which decides about the weights if none does and they rest.

        Args:
            profile: the step, without weights.
            begin_bytes: memory in use when it begins.
            num_forwards: its number of forwards before a backward.
        """
        # The first kind of step decides about the weights, as two would have them move for ever.
        weights = None if self._placing else self._weights
        if weights is not None and self._resting and self._num_rested < _MOST_RESTED:
            sizes = weights.sizes(expects_state=self._awaits_optimizer())
            profile = with_weight_bytes(profile, sizes, self._hardware)
            profile = dataclasses.replace(profile, keeps_gradients=weights.have_gradients())
        resting_bytes = sum(each.parameter_bytes for each in profile.layers)
        others_bytes = self._others_bytes()
        study = BudgetStudy(
            profile,
            self._hardware,
            self._budget_bytes,
            begin_bytes + others_bytes,
            host_bytes=self._engine.transfers.store.room_bytes + resting_bytes,
            num_forwards=num_forwards,
        )
        study.others_bytes = others_bytes
        self._placing = self._placing or (study if study.places_weights else None)
        study.weights_can_leave = self._can_rest_more() and not study.places_weights
        study.refuse(self._engine.refused_layers)
        self._note_ahead(study)
        if self._awaits_optimizer():
            study.expect_state(self._trained_bytes(self._device))
        return study

    def _learn(self) -> None:
        """Learn from the step that has ended."""
        running, self._running = self._running, None
        self._engine.transfers.account.passes = None
        if running is None:
            return
        is_unseen = self._num_optimized == running.num_optimized and running.versions is not None
        if is_unseen and self._versions() != running.versions:
            self._num_optimized += 1  # the loop itself writes weights
        study, watch, step_s = running.study, running.watch, time.perf_counter() - running.begin_s
        if watch is not None:
            watch.finish()
            is_known = not self._num_optimized and not self._awaits_optimizer()
            watch.has_update = is_known or self._num_optimized > running.num_optimized
        else:
            self._memory.return_freed()
        peak_bytes = self._memory.peak_bytes() if watch is None else watch.peak_bytes
        was_full = self._engine.transfers.offloads.num_refused > running.num_refused
        if study is None:
            ended = self._engine.num_steps > running.number and self._engine.had_backward
            if self._memory.num_failures() > running.failures:
                self._is_short = True
                self._memory.reset_peak()
                self._warn_of_shortage(self._budget_bytes)
            elif watch is not None and ended:
                self._warn_of_peak(peak_bytes)
                # On a CPU it had nothing in flight, and no room was left for an optimizer's state.
                is_alike = self._device.type != "cpu"
                self._has_fitted |= is_alike and peak_bytes <= self._budget_bytes
                found = self._study_recorded(running.kind, watch, step_s, was_full=was_full)
                self._studies.add(running.kind, found)
            return
        if self._memory.num_failures() > running.failures:
            self._learn_shortage(study)
            return
        if self._engine.num_steps == running.number:
            return
        self._has_fitted |= peak_bytes <= self._budget_bytes
        study.refuse(self._engine.refused_layers)
        self._note_ahead(study)
        if self._engine.transfers.account.num_verifying:
            self._num_verifying += 1
            if self._num_verifying <= _MOST_VERIFYING:
                # What the plan recomputes was offloaded: the step says nothing of the plan.
                self._memory.reset_peak()
                return
        else:
            self._num_verifying = 0
        if was_full:
            study.learn_full_store()
            return
        if running.is_own and self._num_forwards > study.num_forwards:
            self._studies.forget(running.kind)  # the next one is recorded, and planned for so many
            self._most_forwards[running.kind] = self._num_forwards
            return
        is_whole = running.is_timed if watch is None else study.has_all_passes(watch)
        if is_whole:
            study.learn(trace_of(self._engine), step_s, peak_bytes, watch)
        else:
            study.note(peak_bytes, step_s)
        self._warn_of_peak(peak_bytes)
        if peak_bytes > self._budget_bytes:
            self._memory.reset_peak()

    def _note_ahead(self, study: BudgetStudy) -> None:
        """Tell a study whether the optimizer steps inside backward, and in which shadows."""
        overlaps = [] if self._weights is None else self._weights.overlaps()
        shadow_bytes = sum(each.most_shadow_bytes for each in overlaps)
        twice_share = max((each.stats.twice_share for each in overlaps), default=0.0)
        study.note_ahead(StepAhead(shadow_bytes, None, twice_share) if overlaps else None)

    def _warn_of_peak(self, peak_bytes: int) -> None:
        """Warn once of a step that was measured to be over the budget."""
        if peak_bytes > self._budget_bytes:
            self._warn_of_excess(
                f"a step needed {format_size(peak_bytes)} under a budget of "
                f"{format_size(self._budget_bytes)}. From now on a plan that needs less is followed"
            )

    def _warn_of_excess(self, what: str) -> None:
        """Warn once that the budget is not kept."""
        if self._budget is not None and self._is_news("over-budget"):
            warn_user(
                "over-budget", f"{what}; give a larger budget or a smaller batch", UserWarning
            )

    def _is_news(self, name: str) -> bool:
        """Return whether the user has not been warned of something yet, which is done now."""
        is_news = name not in self._said
        self._said.add(name)
        return is_news

    def _learn_shortage(self, study: BudgetStudy) -> None:
        """Learn that the device had not enough memory for the last step."""
        study.learn_shortage()
        self._memory.reset_peak()
        self._warn_of_shortage(study.budget_bytes)

    def _warn_of_shortage(self, budget_bytes: int) -> None:
        """Warn once that the device had not enough memory.

        Args:
            budget_bytes: what is planned for from now on.
        """
        if self._is_news("out-of-memory"):
            warn_user(
                "out-of-memory",
                f"the device ran out of memory in a step under a budget of "
                f"{format_size(self._budget_bytes)}: other programs, or other parts of this one, "
                f"use the rest. The next steps follow the plan that needs least, and then one for "
                f"{format_size(budget_bytes)}. No parameter has changed. Where the step has raised "
                f"torch.OutOfMemoryError, repeat it; give a smaller budget to be spared this",
                UserWarning,
            )


def _most_weight_bytes(model: nn.Module, device: torch.device) -> int:
    """Return what a model adds to a device: weights, gradients, and what an Adam needs at most.

    These are its two states, and the tensors that its step computes for all weights at once.
    """
    return sum(
        each.nbytes * ((each.device != device) + 4 * each.requires_grad)
        for each in model.parameters()
    )


def _needs_gradients(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a parameter is trained, or a gradient of an argument is wanted."""
    if not torch.is_grad_enabled():
        return False
    if any(parameter.requires_grad for parameter in model.parameters()):
        return True
    return any(getattr(leaf, "requires_grad", False) for leaf in tree_leaves((args, kwargs)))


def assumed_hardware(device: torch.device) -> Hardware:
    """Return the bandwidths that are assumed of a device until copies have been measured."""
    return Hardware.named("cpu" if device.type == "cpu" else "a100-80gb")
