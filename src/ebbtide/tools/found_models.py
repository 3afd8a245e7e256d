"""How `ebbtide run` offloads the models that it finds."""

from __future__ import annotations

import dataclasses
import functools
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from ebbtide.api import offload, refuse_second_offload
from ebbtide.devices.process import watch_forks
from ebbtide.errors import EbbtideError, PolicyError
from ebbtide.handle import OffloadHandle, finished_steps, is_in_step, record_run
from ebbtide.observe.run_record import RunRecord
from ebbtide.planning.follow import load_plan
from ebbtide.planning.planned_step import PlannedStep
from ebbtide.policy import (
    DEFAULT_MIN_BYTES,
    ActivationPolicy,
    WeightPolicy,
    check_budgeted,
)
from ebbtide.runtime.compiled import skip_in_compiler
from ebbtide.runtime.handles import restore
from ebbtide.runtime.layers import class_of, covering_layers
from ebbtide.runtime.parameter_index import home_of
from ebbtide.runtime.stats import StepStats
from ebbtide.runtime.torch_internals import (
    hooks_are_enabled,
    in_backward,
    is_written_down,
    top_hooks,
    transform_level,
    wrap_conversion,
)
from ebbtide.stores.host_memory import parse_host_budget
from ebbtide.stores.measured_memory import AbstractMemory, memory_of
from ebbtide.tools.machine import find_directory
from ebbtide.units import parse_budget_bytes
from ebbtide.weights.parameters import Conversion, moves_to


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
        find_directory(self.store)
        if self.is_planned:
            check_budgeted(self.activations, None, given_twice=None not in (self.budget, self.plan))
        if self.host_budget is not None:
            parse_host_budget(self.host_budget, name="--host-budget")
        if self.budget is not None:
            parse_budget_bytes(self.budget, name="--budget")
        if self.plan is not None:
            if not self.plan.is_file():
                raise PolicyError(f"--plan {self.plan}: there is no such file")
            try:
                load_plan(self.plan)
            except PolicyError as error:
                raise PolicyError(f"--plan {self.plan}: {error}") from None

    @property
    def asks_for_something(self) -> bool:
        """Whether the user has said which modules, or where to, so that it can be wrong."""
        asked = (self.layers, self.weights, self.plan, self.host_budget, self.store != "auto")
        policy = dataclasses.replace(self.activations, min_bytes=DEFAULT_MIN_BYTES)
        return any(asked) or policy != ActivationPolicy()

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


# ---- Tells of the outermost calls of modules that autograd records, before they begin ----
#
# [Note: why no module hooks] `torch.nn` has global forward pre-hooks. They come too late: a
# module has already looked up its forward when they run, so what they attach is not used in that
# call. They also make the call of every module inside slower, and `torch.compile` warns of them.
# So the call of all modules, `nn.Module.__call__`, is replaced. Inside of an outermost call the
# replacement only looks whether it is inside.


def watch_calls(finder: ModelFinder) -> Callable[[], None]:
    """Tell of the outermost calls of modules while autograd records, and of their moves.

    See [Note: why no module hooks]. `nn.Module.to` and its kin are replaced in the same way.

    Args:
        finder: is told of the calls, and of moves before they begin.

    Returns:
        What ends it. If other code has replaced the call meanwhile, that stays.
    """
    call = nn.Module.__call__
    thread = threading.local()  # has `inside` while a thread is inside of a watched call
    is_traced, records = torch.compiler.is_compiling, torch.is_grad_enabled

    @functools.wraps(call)
    def call_module(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_traced() or getattr(thread, "inside", False) or not records():
            return call(self, *args, **kwargs)
        thread.inside = True  # what the finder calls is not of the script
        try:
            if finder.begin_call(self):
                return call(self, *args, **kwargs)
        finally:
            thread.inside = False
        return call(self, *args, **kwargs)

    def watch_moves(convert: Any) -> Any:
        @functools.wraps(convert)
        def convert_module(self: nn.Module, fn: Any, recurse: bool = True) -> Any:
            if getattr(thread, "inside", False):
                return convert(self, fn, recurse)
            thread.inside = True
            try:
                finder.begin_move(self, fn)
                return convert(self, fn, recurse)
            finally:
                thread.inside = False

        return convert_module

    def put_back() -> None:
        if nn.Module.__call__ is call_module:
            nn.Module.__call__ = call  # type: ignore[method-assign]
        put_back_conversion()

    # The compiler would trace from here, with the hooks of the module. It begins inside instead.
    skip_in_compiler(call_module, with_callees=False)
    nn.Module.__call__ = call_module  # type: ignore[method-assign]
    put_back_conversion = wrap_conversion(watch_moves)
    return put_back


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


# ---- A model that a script trains, and what was done about it ----


@final
class FoundModel:
    """A model that a script trains. The model is not kept alive.

    Args:
        model: the model.
        device: the device that it computes on; None: that of its parameters.

    Attributes:
        model: the model; what it refers to is None once the model is gone.
        name: its class.
        num_parameters: number of its weights.
        device: the device that it computes on.
        dtypes: names of their types.
        handle: the handle of its last offload, which also tells of its last step when the model is
            gone; None if it was never offloaded.
        left_alone: why it is not offloaded now; None if it is.
        waits_for_turn: whether other models are planned first.
        notes: what else is to be known.
        last_call: number of its last call among those of all models.
    """

    def __init__(self, model: nn.Module, device: torch.device | None = None) -> None:
        self.model = weakref.ref(model)
        self.name = _name_of(model)
        parameters = [p for p in model.parameters() if not is_lazy(p)]
        self.num_parameters = sum(p.numel() for p in parameters)
        self.device = device or next((home_of(p) for p in parameters), torch.device("cpu"))
        self.dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
        self.handle: OffloadHandle | None = None
        self.left_alone: str | None = None
        self.waits_for_turn = False
        self.notes: list[str] = []
        self.last_call = 0
        self._earlier_steps = 0  # of handles before this one

    @property
    def is_offloaded(self) -> bool:
        """Whether the model is alive, and offloaded by this command."""
        offloaded = self.handle is not None and self.left_alone is None
        return offloaded and self.model() is not None

    def attach(self, handle: OffloadHandle) -> None:
        """Note that the model is offloaded from now on."""
        self._earlier_steps = self.num_steps
        self.handle, self.left_alone = handle, None

    def detach(self, reason: str) -> None:
        """Put the model back as it was, and say why."""
        if self.handle is not None:
            self.handle.detach()
        self.left_alone = reason

    @property
    def num_steps(self) -> int:
        """Number of finished steps, as far as it is known without waiting for the device."""
        return self._earlier_steps + (0 if self.handle is None else finished_steps(self.handle))

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of its layers, as the last forward called them."""
        return () if self.handle is None else self.handle.layers

    @property
    def plan(self) -> PlannedStep | None:
        """The plan of its last step."""
        return None if self.handle is None else self.handle.plan

    @property
    def last_step(self) -> StepStats | None:
        """The figures of its last step; None if it has finished none. The device is waited for."""
        if self.handle is None:
            return None
        stats = self.handle.stats  # first: it ends a step that has been read
        return stats if finished_steps(self.handle) else None

    def record(self) -> RunRecord | None:
        """Return the record of its last step; None if it has finished none."""
        if self.handle is None or not self.last_step:
            return None
        return record_run(self.handle, self.name)


def _name_of(model: nn.Module) -> str:
    if isinstance(model, torch.jit.ScriptModule):
        return str(getattr(model, "original_name", type(model).__name__))
    return class_of(model).__name__


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
        if not other.is_offloaded or newest - other.last_call > _IDLE_CALLS:
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
# one by one trains as many models.


@final
class ModelFinder:
    """Finds and offloads models. See [Note: which module is the model].

    Args:
        options: how to offload them.
        say: tells the user at once what must not wait until the end.
        refuse: ends the process because of what the user asked for.

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
        refuse: Callable[[Exception], NoReturn],
    ) -> None:
        self.found: list[FoundModel] = []
        self.passing: dict[str, str] = {}
        self.memory: AbstractMemory | None = None
        self.budget_bytes: int | None = None
        self._options = options
        self._say = say
        self._refuse = refuse
        self._lock = threading.RLock()
        # To which model each module belongs that was called as one, or as a part of one.
        self._known: MutableMapping[nn.Module, FoundModel]
        self._known = WeakIdKeyDictionary()
        self._num_calls = 0
        self._is_active = True
        self._is_attaching = False
        watch_forks(self)

    def note_fork(self) -> None:
        """Find nothing in a forked child, such as a worker of a data loader."""
        self._is_active = False

    # ---- calls of modules ---------------------------------------------------------------------

    def begin_call(self, module: nn.Module) -> bool:
        """Look at an outermost call that begins now.

        Returns:
            Whether it is that of a model, or of something that cannot be one. If not, the calls
            inside of it are looked at one by one.
        """
        if not self._is_active:
            return False
        model = self._known.get(module)
        if model is None:
            return self._look_at(module)
        if not in_backward():
            self._note_call(model)
        return True

    def begin_move(self, module: nn.Module, convert: Conversion) -> None:
        """Offload a model on the CPU that would not fit on the device where it is about to go.

        What rests then stays where it is, see `SubstitutingDict`.

        Args:
            module: the outermost module that moves.
            convert: what is computed of each of its parameters.
        """
        parameters = list(module.parameters())
        is_sought = self._is_active and self._options.budget is not None
        if not is_sought or not any(p.requires_grad for p in parameters):
            return
        if any(is_lazy(p) or p.device.type != "cpu" for p in parameters):
            return
        device = moves_to(convert, parameters[0])
        if device is None or device.type in ("cpu", "meta"):
            return
        free_bytes = memory_of(device).available_bytes
        most_bytes = min(self._options.budget_bytes(device) or 0, free_bytes)
        if sum(p.nbytes for p in parameters) <= most_bytes:
            return
        with self._lock:
            if self._find_model_around(module) is None:
                self._known[module] = self._meet(module, device)

    def _note_call(self, model: FoundModel) -> None:
        self._num_calls += 1
        model.last_call = self._num_calls
        if model.waits_for_turn and is_next(model, self.found):
            self._plan_now(model)

    def _look_at(self, module: nn.Module) -> bool:
        """Look at a module that has not been met yet."""
        if isinstance(module, DistributedDataParallel):
            return False  # the model is inside
        if next(module.parameters(), None) is None:
            return False  # a loss, or a module that hides its modules
        if in_backward() or not any(p.requires_grad for p in module.parameters()):
            return True
        reason = find_passing_reason()
        if reason is not None:
            self.passing[type(module).__name__] = reason
            return True
        if any(is_lazy(parameter) for parameter in module.parameters()):
            return True  # this forward will make its parameters
        with self._lock:
            model = self._find_model_around(module) or self._meet(module)
            self._known[module] = model
        self._note_call(model)
        return True

    def _find_model_around(self, module: nn.Module) -> FoundModel | None:
        """Return the model that a module is a part of."""
        for model in dict.fromkeys(self._known.values()):
            whole = model.model()
            if whole is not None and any(each is module for each in whole.modules()):
                return model
        return None

    def _parts_of(self, module: nn.Module) -> list[FoundModel]:
        """Return the offloaded models that are a module or parts of it."""
        inside = {id(each) for each in module.modules()}
        return [each for each in self.found if each.is_offloaded and id(each.model()) in inside]

    # ---- what is done about a model -----------------------------------------------------------

    def _meet(self, module: nn.Module, device: torch.device | None = None) -> FoundModel:
        """Decide about a module that is no part of a model that is known.

        Args:
            module: the module.
            device: the device that it is to compute on; None: that of its parameters.
        """
        gc.collect()  # a model that the script has dropped may be in a cycle, and holds memory
        for part in self._parts_of(module):
            part.detach(f"it is now a part of {type(module).__name__}, which is trained as a whole")
            self._forget(part)
        model = FoundModel(module, device)
        others = [each.model() for each in self.found if each.is_offloaded]
        model.left_alone = find_obstacle(module, [each for each in others if each is not None])
        self.found.append(model)
        if self.memory is None and (self._options.budget or model.device.type != "cpu"):
            self.memory = memory_of(model.device)
            self.budget_bytes = self._options.budget_bytes(model.device)
        if model.left_alone is None:
            self._attach(model, module)
        if model.left_alone is not None and model.left_alone != OWN_OFFLOAD:
            self._say(f"{model.name} is left alone: {model.left_alone}")
        return model

    def _forget(self, model: FoundModel) -> None:
        """Treat the modules of a model as if they had not been met."""
        for module in [each for each, known in self._known.items() if known is model]:
            del self._known[module]

    def _attach(self, model: FoundModel, module: nn.Module) -> None:
        """Offload a model, or note why that cannot be done.

        If it is because of what the user asked for, and no other model has been offloaded so, the
        process ends.
        """
        waits = self._options.budget is not None and not is_next(model, self.found)
        model.waits_for_turn = frugal = waits
        arguments = self._options.arguments(module, frugal=frugal)
        if home_of(next(module.parameters())).type != model.device.type:
            arguments["device"] = model.device  # and it does not fit there, see `begin_move`
            arguments["weights"] = WeightPolicy() if frugal else arguments["weights"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._is_attaching = True
            try:
                model.attach(offload(module, **arguments))
            except (EbbtideError, OSError) as error:
                model.left_alone = str(error)
                is_first = all(each.handle is None for each in self.found)
                if is_first and self._options.asks_for_something:
                    self._refuse(PolicyError(f"{model.name}: {error}"))
            finally:
                self._is_attaching = False
        model.notes += [str(each.message) for each in caught]

    def _plan_now(self, model: FoundModel) -> None:
        """Plan a model that has waited for its turn."""
        module, handle = model.model(), model.handle
        if module is None or handle is None:
            model.waits_for_turn = False
        elif not is_in_step(handle):
            model.detach("it could not be offloaded again")
            self._attach(model, module)

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
                if known is None or not model.is_offloaded or not share_modules(known, module):
                    continue
                model.detach(OWN_OFFLOAD if for_good else "torch.jit.script has compiled it")
                if not for_good:
                    self._forget(model)
