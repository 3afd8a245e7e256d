"""How `ebbtide run` offloads the models that it finds."""

from __future__ import annotations

import dataclasses
import functools
import gc
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from ebbtide.api import offload, refuse_second_offload
from ebbtide.devices.process import watch_forks
from ebbtide.errors import BudgetError, EbbtideError, PolicyError
from ebbtide.handle import (
    LastingFigures,
    OffloadHandle,
    is_in_step,
    lasting_figures,
    record_run,
)
from ebbtide.observe.inspection import inspect_engine
from ebbtide.observe.recording import last_trace, trace_of
from ebbtide.observe.run_record import RunRecord, complete_record
from ebbtide.observe.trace import Trace
from ebbtide.planning.budget import assumed_hardware, parse_budget_bytes
from ebbtide.planning.budget_study import BudgetStudy
from ebbtide.planning.contest import keep_all
from ebbtide.planning.follow import layers_of, load_plan
from ebbtide.planning.planned_step import PlannedStep
from ebbtide.planning.recorded import PassWatch, profile_recorded_step
from ebbtide.policy import (
    DEFAULT_MIN_BYTES,
    ActivationPolicy,
    WeightPolicy,
    check_budget_unit,
    check_budgeted,
)
from ebbtide.runtime.compiled import skip_in_compiler
from ebbtide.runtime.handles import restore
from ebbtide.runtime.layers import class_of, covering_layers
from ebbtide.runtime.parameter_index import home_of
from ebbtide.runtime.stats import Account, StepStats
from ebbtide.runtime.torch_internals import (
    current_graph_task,
    hooks_are_enabled,
    is_written_down,
    top_hooks,
    transform_level,
)
from ebbtide.stores.build import parse_store
from ebbtide.stores.host_memory import parse_host_budget
from ebbtide.stores.measured_memory import AbstractMemory, memory_of
from ebbtide.units import format_size

_LARGEST_BYTES = 2**60  # a share of it can be read before there is a device


class WrongSettingError(PolicyError):
    """What the user asked for fits no model of the script, so going on would hide a mistake."""


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What `ebbtide.offload` is called with for each model.

    Args:
        activations: what is offloaded where there is no budget; of it, a budget takes `min_bytes`.
        budget: the most memory that training may take, as text; None: no budget.
        plan: file of a plan that is followed; None: none.
        store: where offloaded bytes go.
        host_budget: the most host memory to take, or all ranks of a host (``"96GiB/node"``), as
            text; None: all that is free.
        layers: patterns of the names of layers; empty: the model's repeated blocks.
        weights: whether the weights rest in host memory, too.
        trace: whether each step is recorded.

    Raises:
        PolicyError: one of them cannot be read, or they do not go together.
        OSError: the file of the plan cannot be read.
    """

    activations: ActivationPolicy = dataclasses.field(default_factory=ActivationPolicy)
    budget: str | None = None
    plan: Path | None = None
    store: str = "auto"
    host_budget: str | None = None
    layers: tuple[str, ...] = ()
    weights: bool = False
    trace: bool = False

    def __post_init__(self) -> None:
        if self.budget is not None and self.plan is not None:
            raise PolicyError("--budget makes a plan and --plan follows one; leave one of them out")
        _, directory = parse_store(self.store)
        if directory is not None and not directory.is_dir():
            raise PolicyError(f"--store {self.store}: there is no such directory")
        if self.plan is not None and not self.plan.is_file():
            raise PolicyError(f"--plan {self.plan}: there is no such file")
        if self.host_budget is not None:
            parse_host_budget(self.host_budget, name="--host-budget")
        if self.budget is not None:
            check_budget_unit(self.budget, name="--budget ")
            parse_budget_bytes(self.budget, _LARGEST_BYTES)
        if self.plan is not None:
            load_plan(self.plan)
            if self.layers:
                raise PolicyError(
                    "a plan names the layers that it was made for; leave out --layers"
                )
        if self.is_planned and _but_for_sizes(self.activations) != ActivationPolicy():
            raise PolicyError(
                "a plan says itself what leaves; leave out --num-layers, --keep-last and --mode"
            )

    @property
    def asks_for_something(self) -> bool:
        """Whether the user has said which modules, or where to, so that it can be wrong."""
        asked = (self.layers, self.weights, self.plan, self.host_budget, self.store != "auto")
        return any(asked) or _but_for_sizes(self.activations) != ActivationPolicy()

    @property
    def is_planned(self) -> bool:
        """Whether a plan decides what is offloaded."""
        return self.budget is not None or self.plan is not None

    def arguments(self, model: nn.Module, *, frugal: bool) -> dict[str, Any]:
        """Return the arguments of `ebbtide.offload` for a model.

        Args:
            model: the model.
            frugal: whether the model follows no plan although there is a budget; all that can leave
                then leaves.
        """
        arguments: dict[str, Any] = {
            "activations": self.activations,
            "store": self.store,
            "host_budget": self.host_budget,
            "layers": list(self.layers) or None,
            "weights": WeightPolicy() if self.weights else None,
            "trace": self.trace,
        }
        if frugal:
            arguments["activations"] = check_budgeted(self.activations, None, given_twice=False)
            arguments["layers"] = list(self.layers) or covering_layers(model)
        elif self.is_planned:
            arguments.update(budget=self.budget, plan=self.plan)
        return arguments

    def budget_bytes(self, device: torch.device) -> int | None:
        """Return the budget in bytes; None without one."""
        if self.budget is None:
            return None
        return parse_budget_bytes(self.budget, memory_of(device).total_bytes)

    def describe(self) -> str:
        """Say in a line what is done where no plan decides."""
        policy = self.activations
        which = "activations" if policy.num_layers is None else f"{policy.num_layers} layers"
        if policy.keep_last:
            which += f" but the last {policy.keep_last} layers"
        what = {
            "offload": f"{which} of {format_size(int(policy.min_bytes))} or more leave",
            "recompute": f"{which} computed again in backward",
            "recompute+offload": f"{which} computed again in backward, inputs leave",
        }[policy.mode]
        return what + (", and so do weights" if self.weights else "")


def _but_for_sizes(policy: ActivationPolicy) -> ActivationPolicy:
    return dataclasses.replace(policy, min_bytes=DEFAULT_MIN_BYTES)


# ---- Tells of the outermost calls of modules that autograd records, before they begin ----
#
# [Note: why no module hooks] `torch.nn` has global forward pre-hooks. They come too late: a
# module has already looked up its forward when they run, so what they attach is not used in that
# call. They also make the call of every module inside slower, and `torch.compile` warns of them.
# So the call of all modules, `nn.Module.__call__`, is replaced. Inside of an outermost call the
# replacement only looks whether it is inside.

Call = Callable[..., Any]

NoteError = Callable[[Exception], None]
"""Is told of an error that a call has raised."""

BeginCall = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], NoteError | None]
"""Is called before a module is called, unless that happens inside of a watched call.

It returns what is told of the error if the call raises one, which also makes it a watched call;
None if the calls inside of it are to be told of one by one.
"""


class _Thread(threading.local):
    """Whether the thread is inside of a watched call."""

    inside = False


@final
class ModuleCalls:
    """Tells of the outermost calls of modules while autograd records.

    See [Note: why no module hooks].

    Args:
        begin: is told of them.
    """

    def __init__(self, begin: BeginCall) -> None:
        self._begin = begin
        self._before: Call | None = None
        self._replacement: Call | None = None

    def install(self) -> None:
        """Watch the calls of all modules, until `remove`."""
        self._before = nn.Module.__call__
        self._replacement = _watched(self._before, self._begin)
        nn.Module.__call__ = self._replacement  # type: ignore[method-assign]

    def remove(self) -> None:
        """Watch no longer. If other code has replaced the call since then, nothing is told of."""
        if self._before is None or nn.Module.__call__ is not self._replacement:
            return
        nn.Module.__call__ = self._before  # type: ignore[method-assign]
        self._before = self._replacement = None


def _watched(call: Call, begin: BeginCall) -> Call:
    thread = _Thread()
    is_traced, records = torch.compiler.is_compiling, torch.is_grad_enabled

    @functools.wraps(call)
    def call_module(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_traced() or thread.inside or not records():
            return call(self, *args, **kwargs)
        thread.inside = True  # what `begin` calls is not of the script
        try:
            note_error = begin(self, args, kwargs)
            if note_error is not None:
                try:
                    return call(self, *args, **kwargs)
                except Exception as error:
                    note_error(error)
                    raise
        finally:
            thread.inside = False
        return call(self, *args, **kwargs)

    # The compiler would trace from here, with the hooks of the module. It begins inside instead.
    skip_in_compiler(call_module, with_callees=False)
    return call_module


# ---- Why a module that is called as a model would be is not offloaded ----

OWN_OFFLOAD: Final = "the script offloads it itself"

_MOST_MODELS: Final = 16  # that are offloaded at a time: each has threads and a store of its own


def find_passing_reason() -> str | None:
    """Return why the forward that begins now is passed over; None if it is not.

    The next forward may be another matter, so nothing of this is remembered of a module.
    """
    if transform_level() is not None:
        return "its forward runs inside a transform of torch.func"
    if is_written_down():
        return "its forward is only exported or traced"
    if not hooks_are_enabled():
        return "saved-tensor hooks are disabled around its forward"
    hooks = top_hooks()
    if hooks is None:
        return None
    if hooks[1] is restore:
        return OWN_OFFLOAD
    return "saved-tensor hooks of other code are active around its forward"


def find_obstacle(module: nn.Module, offloaded: Sequence[nn.Module]) -> str | None:
    """Return why a model cannot be offloaded; None if nothing is known to be in the way.

    Args:
        module: the model.
        offloaded: the models that `ebbtide run` has offloaded, and that are alive.
    """
    for other in offloaded:
        if share_modules(module, other):
            return f"it shares modules with {type(other).__name__}, which is offloaded"
    if any(isinstance(each, torch.jit.ScriptModule) for each in module.modules()):
        return "torch.jit has compiled it or a part of it, which has no hooks"
    try:
        refuse_second_offload(module)
    except PolicyError:
        return OWN_OFFLOAD
    if len(offloaded) >= _MOST_MODELS:
        return (
            f"{_MOST_MODELS} models are offloaded already; if these are parts of one model, put "
            f"them into one nn.Module, or use ebbtide.OffloadSession"
        )
    return None


def share_modules(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules are the same, or one of them holds a module that the other holds."""
    inside = {id(each) for each in one.modules()}
    return any(id(each) in inside for each in other.modules())


# ---- Plans a model from its first step, in which nothing leaves, for `ebbtide run --dry` ----


class DryPlan(NamedTuple):
    """What would be done with a model.

    Attributes:
        layers: names of the modules whose calls are its layers.
        saved_bytes: bytes of the saved tensors of a step that are large enough to leave.
        planned: the plan; None without a budget.
    """

    layers: tuple[str, ...]
    saved_bytes: int
    planned: PlannedStep | None


@final
class DryStep:
    """The first training step of a model, in which nothing leaves the device.

    Args:
        model: the model, whose first training forward is about to begin.
        args: the positional arguments of the forward.
        kwargs: its keyword arguments.
        options: how the model would be offloaded.

    Raises:
        PolicyError: it could not be.
        OSError: the file of the plan cannot be read.
    """

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: RunOptions
    ) -> None:
        self._options = options
        self._given = None if options.plan is None else load_plan(options.plan)
        layers = options.layers or covering_layers(model)  # only what layers save is planned
        if self._given is not None:
            layers = layers_of(self._given, model)
        policy = ActivationPolicy(num_layers=0, min_bytes=options.activations.min_bytes)
        self._handle = offload(model, activations=policy, layers=layers, trace=True)
        self._engine = self._handle._engine
        self._memory = memory_of(self._engine.torch_device)
        self._memory.return_at_once(True)
        held = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        self._watch = PassWatch(self._memory, None, None, self._engine.find_record, held)
        self._engine.passes = self._watch
        self._begin_s = time.perf_counter()

    def result(self) -> DryPlan | None:
        """Return what would be done, and leave the model alone from now on.

        Returns:
            None while the step has not ended.

        Raises:
            PolicyError: the model cannot be planned.
            BudgetError: no plan fits into the budget.
        """
        engine = self._engine
        if engine.is_in_step() or not engine.num_steps or not engine.had_backward:
            return None
        step_s = time.perf_counter() - self._begin_s
        self._watch.finish()
        storages, trace = inspect_engine(engine).storages, trace_of(engine)
        names = self._handle.layers
        self.end()
        saved_bytes = sum(each.size_bytes for each in storages)
        if self._options.budget is None:
            return DryPlan(names, saved_bytes, self._given)
        hardware = assumed_hardware(engine.torch_device)
        profile = profile_recorded_step(
            storages,
            self._watch.calls,
            hardware,
            min_bytes=engine.placement.min_bytes,
            keeps_all=True,
        )
        budget_bytes = parse_budget_bytes(self._options.budget, self._memory.total_bytes)
        begin_bytes = self._watch.begin_bytes
        study = BudgetStudy(profile, hardware, budget_bytes, begin_bytes, keep_all(profile))
        study.learn_record(self._watch, trace, step_s)
        return DryPlan(names, saved_bytes, study.estimate())

    def end(self) -> None:
        """Put the model back as it was."""
        self._engine.passes = None
        self._memory.return_at_once(False)
        self._handle.detach()


# ---- A model that a script trains, and what was done about it ----


@final
class FoundModel:
    """A model that a script trains. The model is not kept alive.

    Args:
        model: the model.
        died: called when the model is gone.

    Attributes:
        model: the model; what it refers to is None once the model is gone.
        name: its class.
        num_parameters: number of its weights.
        device: the device of its parameters.
        dtypes: names of their types.
        layers: names of its layers, as the last forward called them.
        left_alone: why it is not offloaded; None if it is.
        waits_for_turn: whether other models are planned first.
        notes: what else is to be known.
        budget_error: the last one that its calls have raised; None if none has.
        dry_step: its first step with `--dry`, until that has ended.
        dry: what `--dry` found that would be done.
        last_call: number of its last call among those of all models.
    """

    def __init__(self, model: nn.Module, died: Callable[[object], None]) -> None:
        self.model = weakref.ref(model, died)
        self.name = _name_of(model)
        parameters = [p for p in model.parameters() if not is_lazy(p)]
        self.num_parameters = sum(p.numel() for p in parameters)
        self.device = next((home_of(p) for p in parameters), torch.device("cpu"))
        self.dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
        self.layers: tuple[str, ...] = ()
        self.left_alone: str | None = None
        self.waits_for_turn = False
        self.notes: list[str] = []
        self.budget_error: BudgetError | None = None
        self.dry_step: DryStep | None = None
        self.dry: DryPlan | None = None
        self.last_call = 0
        self._handle: weakref.ref[OffloadHandle] | None = None
        self._figures: LastingFigures | None = None
        self._counts: StepStats | None = None
        self._last_trace: Trace | None = None  # as of its last `freeze`, or of its end
        self._last_plan: PlannedStep | None = None  # of a model that is gone
        self._steps_before_error = 0
        self._earlier_steps = 0  # of accounts that others have followed

    @property
    def handle(self) -> OffloadHandle | None:
        """The handle of its offload; None if it is not offloaded, or gone."""
        return None if self._handle is None else self._handle()

    def attach(self, handle: OffloadHandle) -> None:
        """Note that the model is offloaded from now on.

        The forward that `ebbtide.offload` has put in place keeps the handle alive, and so lets it
        die with the model.
        """
        model = self.model()
        assert model is not None
        model.__dict__["forward"].handle = handle
        self._handle = weakref.ref(handle)
        self.left_alone = None
        self.layers = handle.layers
        self.refresh()

    def detach(self, reason: str) -> None:
        """Put the model back as it was, and say why."""
        handle = self.handle
        if handle is not None:
            self.refresh()
            handle.detach()
        self._handle = None
        self.left_alone = reason

    def refresh(self) -> None:
        """Read what changes from call to call. It waits for nothing."""
        handle = self.handle
        if handle is None:
            return
        figures = lasting_figures(handle)
        account = None if self._figures is None else self._figures.account
        if account is not None and account is not figures.account:
            self._end_account(account)
        self._figures = figures

    def freeze(self) -> None:
        """Keep the figures as they are now. The device is waited for."""
        handle = self.handle
        if handle is not None:
            self.layers = handle.layers
            self._counts = handle.stats  # first: it ends a step that has been read
            self.refresh()
        if self._figures is not None:
            self._note_counts(self._figures.account)

    def note_death(self) -> None:
        """Keep the figures of a model that is gone, and nothing that belonged to it."""
        self._last_plan = self.plan
        if self._figures is not None:
            self._end_account(self._figures.account)
        self._figures = self._handle = None

    def note_budget_error(self, error: BudgetError) -> None:
        """Note that a call found no plan within the budget."""
        self.budget_error = error
        self._steps_before_error = self.num_steps

    @property
    def has_recovered(self) -> bool:
        """Whether steps have been finished since no plan was found."""
        return self.num_steps > self._steps_before_error

    @property
    def num_steps(self) -> int:
        """Number of finished steps."""
        account = None if self._figures is None else self._figures.account
        return self._earlier_steps + (0 if account is None else account.num_steps)

    @property
    def last_step(self) -> StepStats | None:
        """The figures of its last step, as of the last `freeze`; None if it has finished none."""
        return self._counts if self.num_steps else None

    def record(self) -> RunRecord | None:
        """Return the record of its last step; None if it has finished none.

        Of a model that is gone there are statistics, the trace and the plan.
        """
        handle = self.handle
        if handle is not None and handle.stats.num_saved:
            return record_run(handle, self.name)
        if self._counts is None or not self.num_steps:
            return None
        record = RunRecord(title=self.name, stats=self._counts, notes=tuple(self.notes))
        return complete_record(record, self.device, trace=self._last_trace, planned=self.plan)

    @property
    def plan(self) -> PlannedStep | None:
        """The plan of its last step."""
        return self._last_plan if self._figures is None else self._figures.plan()

    def _end_account(self, account: Account) -> None:
        self._earlier_steps += account.num_steps
        self._note_counts(account)

    def _note_counts(self, account: Account) -> None:
        if account.num_steps:
            self._counts = account.stats
            self._last_trace = last_trace(account)


def _name_of(model: nn.Module) -> str:
    if isinstance(model, torch.jit.ScriptModule):
        return str(getattr(model, "original_name", type(model).__name__))
    return class_of(model).__name__


# ---- Which modules have been met, and to which model each belongs ----


class KnownModule(NamedTuple):
    """A module that has been met.

    Attributes:
        module: the module.
        model: the model that it is, or is a part of.
        note_error: notes for the model what a call of the module has raised.
    """

    module: weakref.ref[nn.Module]
    model: FoundModel
    note_error: NoteError


@final
class KnownModules:
    """The modules that have been called as models, and the parts of models that were."""

    def __init__(self) -> None:
        self._known: dict[int, KnownModule] = {}  # by identity: modules may define what is equal

    def get(self, module: nn.Module) -> KnownModule | None:
        """Return what is known of a module; None if it has not been met."""
        known = self._known.get(id(module))
        return None if known is None or known.module() is not module else known

    def add(self, module: nn.Module, model: FoundModel) -> NoteError:
        """Note to which model a module belongs. Returns what is told of errors in its calls."""

        def note(error: Exception) -> None:
            if isinstance(error, BudgetError):
                model.note_budget_error(error)

        key = id(module)
        known = self._known
        reference = weakref.ref(module, lambda _: known.pop(key, None) and None)
        known[key] = KnownModule(reference, model, note)
        return note

    def forget(self, model: FoundModel) -> None:
        """Treat the modules of a model as if they had not been met."""
        for key in [key for key, known in self._known.items() if known.model is model]:
            del self._known[key]

    def find_model_around(self, module: nn.Module) -> FoundModel | None:
        """Return the model that a module is a part of."""
        for model in self._alive():
            whole = model.model()
            if whole is not None and any(each is module for each in whole.modules()):
                return model
        return None

    def parts_of(self, module: nn.Module) -> list[FoundModel]:
        """Return the offloaded models that are a module or parts of it."""
        inside = {id(each) for each in module.modules()}
        return [m for m in self._alive() if m.handle is not None and id(m.model()) in inside]

    def find_common_owner(self, module: nn.Module, least: int) -> nn.Module | None:
        """Return the smallest module that holds a module and some offloaded models.

        Args:
            module: the module.
            least: how many offloaded models it must hold.
        """
        if sum(model.handle is not None for model in self._alive()) < least:
            return None
        owners = [
            each
            for each in _all_modules()
            if any(inner is module for inner in each.modules())
            and len(self.parts_of(each)) >= least
        ]
        return min(owners, key=lambda owner: sum(1 for _ in owner.modules()), default=None)

    def _alive(self) -> Iterator[FoundModel]:
        models = {id(known.model): known.model for known in list(self._known.values())}
        return (model for model in models.values() if model.model() is not None)


def _all_modules() -> Iterator[nn.Module]:
    # Not isinstance: some objects pretend to have another class, and run code to do so.
    return (each for each in gc.get_objects() if issubclass(type(each), nn.Module))


# ---- Says which of several models may plan its steps now ----
#
# [Note: one budget for several models] A budget bounds the memory of the device, or of the
# process on a CPU, whatever model it is for. Two models that both look for a plan would both
# count on the same free memory. So they plan one after the other. A model that waits for its turn
# offloads all that can leave. What is measured of a step includes the memory of all models, so
# each plan leaves room for the models before it. A model that has not been called for a while
# keeps no other one waiting.

_IDLE_CALLS: Final = 20  # calls of other models after which one is taken to be done with


def is_next(model: FoundModel, models: Sequence[FoundModel]) -> bool:
    """Whether a model may plan now. See [Note: one budget for several models].

    Args:
        model: the model.
        models: all models, in the order in which they were found.
    """
    newest = max(each.last_call for each in models)
    for other in models:
        if other is model:
            return True  # those that were found later wait for this one
        if other.handle is None or newest - other.last_call > _IDLE_CALLS:
            continue
        if other.waits_for_turn or not _is_settled(other):
            return False
    return True


def _is_settled(model: FoundModel) -> bool:
    """Whether a model keeps its plan, or could not be planned from its first step."""
    plan = model.plan
    return model.num_steps > 1 if plan is None else plan.settled


# ---- Finds the models that a script trains, at the first forward of each, and offloads them ----
#
# [Note: which module is the model] A model is the outermost module that is called while autograd
# records, that has trained parameters, and that is not called by a backward, as a checkpoint
# does. A module that is called inside of it is a part of it. Code that calls the parts of a model
# one by one seems to train many models. If the third of them has a module around it that also
# holds two others, that module is offloaded in their place: its hooks also notice calls of its
# parts.

_MOST_PARTS: Final = 2  # of one module that count as models of their own


@final
class ModelFinder:
    """Finds and offloads models. See [Note: which module is the model].

    Args:
        options: how to offload them.
        say: tells the user at once what must not wait until the end.
        show: shows a model at once that was planned, as the script may run out of memory.
        is_dry: whether models are only found and planned.

    Attributes:
        found: all models, in the order in which they were found.
        passing: why calls of modules that would have been models were none, by class.
        memory: measures the memory of all models; None before the first, and for a model on a CPU
            without a budget, where the peak of the process is what counts.
        budget_bytes: the budget, in bytes; None without one, and before the first model.
    """

    def __init__(
        self,
        options: RunOptions,
        say: Callable[[str], None],
        show: Callable[[FoundModel], None],
        *,
        is_dry: bool = False,
    ) -> None:
        self.found: list[FoundModel] = []
        self.passing: dict[str, str] = {}
        self.memory: AbstractMemory | None = None
        self.budget_bytes: int | None = None
        self._options = options
        self._say = say
        self._show = show
        self._is_dry = is_dry
        self._lock = threading.RLock()
        self._known = KnownModules()
        self._num_calls = 0
        self._is_active = True
        self._is_attaching = False
        watch_forks(self)

    def note_fork(self) -> None:
        """Find nothing in a forked child, such as a worker of a data loader."""
        self._is_active = False

    # ---- calls of modules ---------------------------------------------------------------------

    def begin_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> NoteError | None:
        """Look at an outermost call, as `BeginCall` describes it.

        Raises:
            WrongSettingError: what the user asked for fits no model.
        """
        if not self._is_active:
            return None
        known = self._known.get(module)
        if known is None:
            return self._look_at(module, args, kwargs)
        if current_graph_task() == -1:
            self._note_call(known.model)
        return known.note_error

    def _note_call(self, model: FoundModel) -> None:
        self._num_calls += 1
        model.last_call = self._num_calls
        model.refresh()
        if model.dry_step is not None:
            self._end_dry(model)
        if model.waits_for_turn and is_next(model, self.found):
            self._plan_now(model)

    def _look_at(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> NoteError | None:
        """Look at a module that has not been met yet."""
        if isinstance(module, DistributedDataParallel):
            return None  # the model is inside
        first = next(module.parameters(), None)
        if first is None:
            return None  # a loss, or a module that hides its modules
        if current_graph_task() != -1 or not _is_trained(module):
            return _ignore
        reason = find_passing_reason()
        if reason is not None:
            self.passing[type(module).__name__] = reason
            return _ignore
        if any(is_lazy(parameter) for parameter in module.parameters()):
            return _ignore  # this forward will make its parameters
        with self._lock:
            model = self._known.find_model_around(module) or self._meet(module, args, kwargs)
        self._note_call(model)
        return self._known.add(module, model)

    # ---- what is done about a model -----------------------------------------------------------

    def _meet(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FoundModel:
        """Decide about a module that is no part of a model that is known."""
        gc.collect()  # a model that the script has dropped may be in a cycle, and holds memory
        owner = None
        if not self._known.parts_of(module):
            owner = self._known.find_common_owner(module, _MOST_PARTS)
        chosen = module if owner is None else owner
        for part in self._known.parts_of(chosen):
            part.detach(f"it is now a part of {type(chosen).__name__}, which is trained as a whole")
            self._known.forget(part)
        model = FoundModel(chosen, self._note_death)
        self.found.append(model)
        if self.memory is None and (self._options.budget or model.device.type != "cpu"):
            self.memory = memory_of(model.device)
            self.budget_bytes = self._options.budget_bytes(model.device)
        if owner is not None:
            model.notes.append("its parts are called one by one")
            self._known.add(owner, model)
        others = [each.model() for each in self.found if each.handle is not None]
        model.left_alone = find_obstacle(chosen, [each for each in others if each is not None])
        if model.left_alone is None and self._is_dry:
            self._begin_dry(model, chosen, args, kwargs)
        elif model.left_alone is None:
            self._attach(model, chosen, by_parts=owner is not None)
        if self._is_dry:
            if model.dry_step is None:
                self._show(model)
        elif model.left_alone is not None and model.left_alone != OWN_OFFLOAD:
            self._say(f"{model.name} is left alone: {model.left_alone}")
        return model

    def _attach(self, model: FoundModel, module: nn.Module, *, by_parts: bool = False) -> None:
        """Offload a model, or note why that cannot be done."""
        budgeted = self._options.budget is not None
        model.waits_for_turn = budgeted and not by_parts and not is_next(model, self.found)
        frugal = budgeted and (by_parts or model.waits_for_turn)
        if by_parts and budgeted:
            model.notes.append("so there is no plan: all that can leave does")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._is_attaching = True
            try:
                handle = offload(module, **self._options.arguments(module, frugal=frugal))
            except (EbbtideError, OSError) as error:
                self._leave_alone(model, error)
                return
            finally:
                self._is_attaching = False
        model.notes += [str(each.message) for each in caught]
        model.attach(handle)

    def _leave_alone(self, model: FoundModel, error: Exception) -> None:
        """Note why a model cannot be offloaded.

        Raises:
            WrongSettingError: it is because of what the user asked for, and no other model has
                been offloaded so.
        """
        model.left_alone = str(error)
        is_first = all(each.handle is None and each.dry is None for each in self.found)
        if is_first and self._options.asks_for_something:
            raise WrongSettingError(f"{model.name}: {error}") from error

    def _plan_now(self, model: FoundModel) -> None:
        """Plan a model that has waited for its turn."""
        module, handle = model.model(), model.handle
        if module is None or handle is None:
            model.waits_for_turn = False
        elif not is_in_step(handle):
            model.detach("it could not be offloaded again")
            self._attach(model, module)

    def _begin_dry(
        self, model: FoundModel, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record the training step of a model that begins now."""
        self._is_attaching = True
        try:
            model.dry_step = DryStep(module, args, kwargs, self._options)
        except (EbbtideError, OSError) as error:
            self._leave_alone(model, error)
        finally:
            self._is_attaching = False

    def _end_dry(self, model: FoundModel) -> None:
        """Plan a model whose recorded step has ended, and say what would be done with it."""
        step = model.dry_step
        assert step is not None
        try:
            model.dry = step.result()
            if model.dry is None:
                return
            model.layers = model.dry.layers
        except BudgetError as error:
            model.note_budget_error(error)
        except (EbbtideError, OSError) as error:
            model.left_alone = str(error)
        model.dry_step = None
        self._show(model)

    def end_dry_steps(self) -> None:
        """Plan the models whose recorded step was the last one of the script."""
        for model in self.found:
            if model.dry_step is not None:
                self._end_dry(model)

    # ---- other code that wants a model as it was ----------------------------------------------

    def give_way_for_good(self, module: nn.Module) -> None:
        """Give way to the script's own call of `ebbtide.offload`."""
        if not self._is_attaching:
            self.give_way(module, for_good=True)

    def give_way(self, module: nn.Module, *, for_good: bool) -> None:
        """Put models back as they were that share modules with one.

        Args:
            module: the module.
            for_good: whether they stay so. Otherwise their next training forward finds them again.
        """
        with self._lock:
            for model in self.found:
                known = model.model()
                if known is None or model.handle is None:
                    continue
                if share_modules(known, module):
                    reason = OWN_OFFLOAD if for_good else "torch.jit.script has compiled it"
                    model.detach(reason)
                    if not for_good:
                        self._known.forget(model)

    def _note_death(self, reference: object) -> None:
        for model in self.found:
            if model.model is reference:
                model.note_death()


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _ignore(_: Exception) -> None:
    """Nothing is to be done about an error in a module that is no model."""
