"""Runs an optimizer's step inside backward, on the host, and commits it in `optimizer.step()`.

[Note: stepping ahead] As soon as the gradients of a layer are complete, a worker copies the layer's
parameters and optimizer state into shadows and lets an optimizer of the same class step over these.
The originals stay as they are until the program calls `step()`. There, what was stepped ahead is
committed if a step taken now would give the same bits: the same parameters, state, gradients,
options and number of threads, and no clipping. Everything else steps then, from the originals. So
parameters and state have at each moment the values that they would have without stepping ahead.

Clipping scales all gradients by one number, which the norm of all gradients decides. The worker
computes the norm of each gradient; `step()` adds them up by the operations of
`torch.nn.utils.clip_grad_norm_`. As long as the norm is within the bound, clipping multiplies by 1.
The norm only grows while gradients land: once it is above the bound, nothing more is stepped ahead.

`step()` waits for the layer that the worker is at, and takes over the layers that it has not begun:
to step ahead moves about twice the memory of a plain step, which pays only beside backward.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer

from ebbtide.devices.device import AbstractEvent
from ebbtide.devices.process import call_weakly, num_processes, watch_forks, watch_optimizers
from ebbtide.errors import PolicyError
from ebbtide.policy import parse_number, refuse
from ebbtide.runtime.engine import Engine
from ebbtide.runtime.events import Subject
from ebbtide.runtime.torch_internals import (
    SCHEDULED,
    count_storage_users,
    group_by_device_and_dtype,
    has_foreach_support,
    has_modes,
    note_step,
)
from ebbtide.stores.host_memory import free_ram_bytes, page_out
from ebbtide.units import format_size, parse_budget_bytes
from ebbtide.weights.hooks import AbstractWeights
from ebbtide.weights.parameters import ALONE, find_overlaps

_LOG = logging.getLogger(__name__)

_STEPS_EACH_ALONE: Final = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta", "Adamax", "Adafactor"),
        *("RMSprop", "Rprop", "ASGD", "Muon"),
    )
)
"""Optimizers that step each parameter by its own gradient and state, and nothing else."""

_LARGE_BYTES: Final = 2**23  # a thread that computes norms is worth starting for as much
_NEWEST: Final = 0.25  # weight of the newest step in the running share of work done twice
_TOO_MUCH: Final = 0.5  # from this share on, nothing is stepped ahead
_COUNT: Final = "a number of threads, 1 or more"


@final
@dataclass(frozen=True)
class OverlapStats:
    """What stepping ahead has done since `OffloadHandle.overlap`; it prints as a table.

    Attributes:
        num_steps: steps of the optimizer.
        num_overlapped: steps that committed something that was stepped ahead.
        num_redone: steps in which something was stepped ahead and then stepped again.
        num_clipped: steps in which gradients were clipped.
        shadow_bytes: host memory, or files, of the shadows.
        worker_s: seconds that the worker computed.
        waited_s: seconds of these that `step()` waited for.
        twice_share: running share of the bytes of parameters whose gradients landed in time and
            that still had to step from the originals, from 0 to 1.
    """

    num_steps: int = 0
    num_overlapped: int = 0
    num_redone: int = 0
    num_clipped: int = 0
    shadow_bytes: int = 0
    worker_s: float = 0.0
    waited_s: float = 0.0
    twice_share: float = 0.0

    @property
    def steps_ahead(self) -> bool:
        """Whether the next step is stepped ahead: `twice_share` is below a half."""
        return self.twice_share < _TOO_MUCH

    @property
    def hidden_share(self) -> float:
        """Share of the worker's seconds that ran beside backward; 0 if it has done nothing."""
        return max(0.0, 1 - self.waited_s / self.worker_s) if self.worker_s else 0.0

    def __str__(self) -> str:
        rows = (
            ("steps", f"{self.num_steps}"),
            ("stepped ahead", f"{self.num_overlapped}"),
            ("stepped again", f"{self.num_redone}"),
            ("clipped", f"{self.num_clipped}"),
            ("shadows", format_size(self.shadow_bytes)),
            ("hidden", f"{self.hidden_share:.0%} of {self.worker_s:.3f} s"),
            ("steps ahead now", "yes" if self.steps_ahead else f"no, {self.twice_share:.0%} twice"),
        )
        return "\n".join(f"{name:<16} {text}" for name, text in rows)


# ---- What must be as it was for a step taken ahead to have the same bits as one taken now


_Mark = tuple[int, int]
"""A tensor's version and place. Changes through `data` or NumPy raise no version."""

_Marked = dict[str, tuple[Any, _Mark | None]]
"""The values of a state or of options by name, with a mark for each tensor.

The tensors are kept, so that no other one can have the identity of one of them.
"""


def _mark(tensor: torch.Tensor) -> _Mark:
    return tensor._version, tensor.data_ptr()


def _marked(values: Mapping[str, Any]) -> _Marked:
    return {
        name: (
            list(value) if isinstance(value, list) else value,
            _mark(value) if isinstance(value, torch.Tensor) else None,
        )
        for name, value in values.items()
        if name != "params"
    }


def _is_as_marked(values: Mapping[str, Any], before: _Marked) -> bool:
    now = _marked(values)
    if now.keys() != before.keys():
        return False
    for (value, mark), (other, its_mark) in ((now[name], before[name]) for name in now):
        is_equal = mark is None and type(value) is type(other) and bool(value == other)
        if mark != its_mark or not (value is other or is_equal):
            return False
    return True


def _num_threads(wanted: int | None) -> int:
    """How many threads a step computes with, on which bits depend.

    0 if the program flushes small numbers to zero: then nothing is stepped ahead. Each thread has
    these settings for itself.

    Args:
        wanted: what the user asks for; None: as many as the program.
    """
    tiny = torch.full((), 1e-30, device="cpu", dtype=torch.float32)
    return (wanted or torch.get_num_threads()) if tiny.mul_(1e-10).item() else 0


def _compute_with(num_threads: int, of_program: int) -> None:
    """Have the calling thread, a worker, compute with so many threads, as a step does."""
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
        if num_threads != of_program:
            # torch gives to each new thread the number that any thread has set last.
            last = threading.Thread(target=torch.set_num_threads, args=(of_program,))
            last.start()
            last.join()
    torch.set_flush_denormal(False)


@contextlib.contextmanager
def _computing_with(num_threads: int | None) -> Iterator[None]:
    """Have the calling thread compute with so many threads for a while; None: as before."""
    before = torch.get_num_threads()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        if num_threads is not None:
            torch.set_num_threads(before)


def _is_plain() -> bool:
    """Whether no mode of the calling thread changes what a step does; the worker has none.

    A default device is no matter: the worker makes no state.
    """
    return not (
        has_modes() or torch.is_autocast_enabled("cpu") or torch.is_inference_mode_enabled()
    )


# ---- Shadows


@final
class _Shadow:
    """A parameter's values and optimizer state as they are after its step.

    Args:
        values: memory like that of the parameter.
        buffers: memory like that of each tensor of its state.
    """

    def __init__(self, values: torch.Tensor, buffers: dict[str, torch.Tensor]) -> None:
        self.values, self.buffers = values, buffers
        self.size_bytes = sum(each.nbytes for each in (values, *buffers.values()))
        self.state: dict[str, Any] = {}

    def fits(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> bool:
        """Whether it has memory for a parameter and for all tensors of its state.

        Arithmetic in another layout may round otherwise.
        """
        needed = {**_tensors_in(state), "": parameter}
        return {name: _layout(each) for name, each in needed.items()} == {
            name: _layout(each) for name, each in {**self.buffers, "": self.values}.items()
        }

    def is_complete(self, state: Mapping[str, Any]) -> bool:
        """Whether a state consists of its tensors, as a step leaves it that has made none anew."""
        self.state = dict(state)
        made = {name: id(each) for name, each in _tensors_in(state).items()}
        return made == {name: id(buffer) for name, buffer in self.buffers.items()}

    def fill(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Copy the values and the state that the step begins with."""
        self.values.copy_(parameter)
        self.state = dict(state)
        for name, buffer in self.buffers.items():
            self.state[name] = buffer.copy_(state[name])


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


def _tensors_in(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


# ---- Parameters, layers, and what has landed


@final
class _Landed:
    """A parameter whose gradient is complete, and what a step of it depends on.

    Attributes:
        norm: of its gradient; None without `max_norm`, and until the worker has computed it.
        shadow: what its step has led to; None as long as it has not stepped.
    """

    def __init__(
        self, member: _Member, gradient: torch.Tensor, state: Mapping[str, Any], options: _Marked
    ) -> None:
        self.member, self.options = member, options
        # Not the gradient itself: its memory is reused when the program lets go of it.
        self._gradient = weakref.ref(gradient)
        self._marks = _mark(member.parameter), _mark(gradient)
        self._state = _marked(state)
        self.norm: torch.Tensor | None = None
        self.shadow: _Shadow | None = None

    def is_current(self, state: Mapping[str, Any]) -> bool:
        """Whether the parameter, its gradient and its state are as they were."""
        parameter = self.member.parameter
        gradient = parameter.grad
        # Guard ahead-of-changes: what was stepped ahead is committed only if gradient, parameter
        # and state are the same objects with the same versions at the same place. A gradient that
        # was clipped by value, or that landed once more, would not count.
        return (
            gradient is not None
            and gradient is self._gradient()
            and (_mark(parameter), _mark(gradient)) == self._marks
            and _is_as_marked(state, self._state)
        )


_Work = tuple[_Landed, torch.Tensor, Mapping[str, Any], _Shadow | None]
"""What the worker does for one parameter: it keeps the gradient, and the state that the step begins
with, for as long as that takes; the shadow, if there is one, is stepped."""


@final
@dataclass(eq=False)
class _Member:
    """A parameter that can step ahead.

    Attributes:
        parameter: the parameter.
        group: the number of its parameter group in the optimizer.
        layer: the name of the layer that it steps with.
        landings: how often its gradient has landed since the last step.
        expected: how often it had landed when the step before began; None if that is not known.
        landed: what has landed as often as expected; None before that, and if it landed again.
        shadow: its shadow, which is made when it first steps ahead.
        has_room: whether `shadow_budget` has room for its shadow.
    """

    parameter: torch.Tensor
    layer: str
    group: int = 0
    landings: int = 0
    expected: int | None = None
    landed: _Landed | None = None
    shadow: _Shadow | None = None
    has_room: bool = True


@final
class StepOverlap:
    """Steps the layers of one optimizer ahead, and commits them.

    Args:
        optimizer: the optimizer.
        engine: the engine of the offload, for its device, its trace and its weights.
        model: the module whose gradients are clipped together; None: those of the optimizer.
        layers: names of the modules whose parameters step together.
        max_norm: as for `torch.nn.utils.clip_grad_norm_`; None: no clipping.
        shadow_budget: the most memory for shadows, as a size; None: half of what is free, and none
            for parameters in the memory of a CPU that computes the model.
        num_threads: how many threads the step and its norms compute with, in the worker and in
            `step`; None: as many as the program.

    Attributes:
        grad_norm: the norm of all gradients in the last step, before clipping; None without
            ``max_norm`` and before the first step.
        is_scaled: whether a scaler is about to step, which has changed gradients.
        max_norm: as given.
        stats: what has been done so far.

    Raises:
        PolicyError: see `_check_optimizer`, or an argument has no meaning.

    Streams:
        The worker reads host memory only: gradients that have landed, parameters, state. The host
        waits for it in `step`, before anything is written that it reads.
    """

    # Long: what a step depends on is noted, checked and committed in one place.

    def __init__(
        self,
        optimizer: Optimizer,
        engine: Engine,
        *,
        model: nn.Module | None,
        layers: Sequence[str],
        max_norm: float | None,
        shadow_budget: int | str | None,
        num_threads: int | None,
    ) -> None:
        _check_optimizer(optimizer)
        if num_threads is not None:
            num_threads = parse_number("num_threads", num_threads, _COUNT)
            num_threads or refuse("num_threads", _COUNT, num_threads)
        self._wanted_threads = num_threads
        if max_norm is not None and (isinstance(max_norm, bool) or not float(max_norm) > 0):
            refuse("max_norm", "a positive number, or None for no clipping", max_norm)
        self._budget_bytes = None
        if shadow_budget is not None:
            self._budget_bytes = parse_budget_bytes(shadow_budget, None, name="shadow_budget")
        self._optimizer = weakref.ref(optimizer)
        self._engine = engine
        self._model = (lambda: None) if model is None else weakref.ref(model)
        self._layer_names = sorted(layers, key=len, reverse=True)
        self.max_norm = None if max_norm is None else float(max_norm)
        # What the worker computes then takes as long from backward, but for waits for files.
        self._shares_cores = engine.transfers.device.computes_on_host
        self._members: dict[int, _Member] = {}
        self._pending: list[AbstractEvent] = []
        self.stats = OverlapStats()
        self.grad_norm: torch.Tensor | None = None
        self._end_watch = watch_optimizers(after=self._forget_stepped)
        self._hooks: dict[int, Any] = {}
        weakref.finalize(self, _remove_hooks, self._hooks).atexit = False
        self.note_fork()  # which makes the lock and the worker
        self.forget(optimizer)
        watch_forks(self)
        engine.transfers.store.use_leftover(self)
        self._wrapped = vars(optimizer).pop("step", None)  # by a learning rate scheduler
        vars(optimizer)[_NAME] = self
        derive: Any = _overlapping_class  # mypy takes the metaclass for unhashable
        optimizer.__class__ = derive(type(optimizer))

    def forget(self, optimizer: Optimizer) -> None:
        """Forget what has landed, because a step has ended, or gradients start from zero."""
        with self._lock:
            # For each layer, the parameters whose gradients are still expected, by `id`, and those
            # that have landed and have not been given to the worker yet.
            self._waiting: defaultdict[str, set[int]] = defaultdict(set)
            self._ready: defaultdict[str, dict[_Member, None]] = defaultdict(dict)
            self._num_threads = 0  # of the running step; 0 as long as nothing has landed in it
            self._squares = 0.0  # the sum of the squared norms that have landed
            self._again_bytes = 0  # of parameters that had landed in time, and landed once more
            self.is_scaled = self._is_clipped = False
            for member in self._members.values():
                member.landings, member.landed = 0, None
                if not self.stats.steps_ahead:
                    member.shadow = None
            self._find_members(optimizer)

    # ---- which parameters ---------------------------------------------------------------------

    def _find_members(self, optimizer: Optimizer) -> None:
        """Find the parameters that can step ahead, as the optimizer and the program have them now.

        Those on an accelerator step when the program says so, and so do those whose memory others
        of the optimizer share: each of them steps from what the one before has left.
        """
        groups = enumerate(optimizer.param_groups)
        own = [(p, n) for n, group in groups for p in group["params"] if _can_have_shadow(p)]
        shared = find_overlaps([p for p, _ in own])
        own = [each for place, each in enumerate(own) if place not in shared]
        before, self._members = self._members, {}
        are_known = all(id(parameter) in before for parameter, _ in own)
        names = {} if are_known else self._find_layers()
        for parameter, number in own:
            key = id(parameter)
            member = before.get(key) or _Member(parameter, names.get(key, ""))
            member.group = number
            self._members[key] = member
            if member.expected:
                self._waiting[member.layer].add(key)
            if parameter.requires_grad and not self._comes_last(parameter):
                if key in self._hooks:
                    self._hooks.pop(key).remove()
                land = call_weakly(self._land)
                self._hooks[key] = parameter.register_post_accumulate_grad_hook(land)

    def _comes_last(self, parameter: torch.Tensor) -> bool:
        """Whether no other hook is called after `_land`, which could replace the gradient."""
        own, hooks = self._hooks.get(id(parameter)), parameter._post_accumulate_grad_hooks or {}
        return own is not None and own.id == next(reversed(hooks), None)

    def _find_layers(self) -> dict[int, str]:
        """The name of the layer of each parameter of the model, by `id`.

        Outside layers, each module counts as one.
        """
        model = self._model()
        found = {}
        for name, parameter in model.named_parameters() if model is not None else ():
            owners = (each for each in self._layer_names if name.startswith(f"{each}."))
            found[id(parameter)] = next(owners, name.rpartition(".")[0])
        return found

    # ---- in backward --------------------------------------------------------------------------

    def _land(self, parameter: torch.Tensor) -> None:
        """Note that a gradient has been accumulated; called by autograd."""
        with self._lock:
            member = self._members.get(id(parameter))
            if member is None:
                return
            self._give_layers()
            member.landings += 1
            if member.landed is not None:  # one backward more than in the step before
                member.landed = None
                self._again_bytes += parameter.nbytes
            self._ready[member.layer].pop(member, None)
            if member.landings == member.expected:
                self._ready[member.layer][member] = None
                self._waiting[member.layer].discard(id(parameter))
            # Otherwise when the next gradient lands: this one may be replaced.
            if self._comes_last(parameter):
                self._give_layers()

    def _forget_stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """Forget what has landed of parameters that another optimizer has stepped.

        A fused step raises no versions.
        """
        if optimizer is self._optimizer():
            return
        with self._lock:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                member = self._members.get(id(parameter))
                if member is not None:
                    member.landed = None

    def _give_layers(self) -> None:
        """Let the worker step the layers whose gradients are complete."""
        optimizer = self._optimizer()
        for layer in [each for each in self._ready if not self._waiting[each]]:
            members = self._ready.pop(layer)
            # Several processes may sum gradients after they have landed, without a version.
            if members and optimizer is not None and num_processes() == 1:
                self._give(optimizer, members)

    def _give(self, optimizer: Optimizer, members: Iterable[_Member]) -> None:
        """Give parameters, whose gradients are complete, to the worker."""
        self._num_threads = self._num_threads or _num_threads(self._wanted_threads)
        if not self._num_threads:
            return  # clipping would flush gradients, too
        options: dict[int, _Marked] = {}
        job = []
        for member in members:
            gradient = member.parameter.grad
            if gradient is None or not _can_step(member.parameter, gradient):
                continue
            if member.group not in options:
                options[member.group] = _marked(optimizer.param_groups[member.group])
            state = optimizer.state.get(member.parameter, {})
            member.landed = _Landed(member, gradient, state, options[member.group])
            shadow = self._find_shadow(member, state) if self._goes_on() else None
            job.append((member.landed, gradient, dict(state), shadow))
        only_norms = not any(shadow for *_, shadow in job)
        if not job or (only_norms and (self.max_norm is None or self._shares_cores)):
            return
        threads = self._num_threads, torch.get_num_threads()
        run = functools.partial(self._run, optimizer, job, threads)
        event = self._worker.submit(run)
        self._pending.append(event)
        recorder = self._engine.transfers.account.recorder
        if recorder is not None:
            ahead = [landed.member.parameter for landed, _, _, shadow in job if shadow is not None]
            size_bytes = sum(each.nbytes for each in ahead)
            recorder.copy("step", Subject(None, 0, size_bytes), event)

    def _goes_on(self) -> bool:
        """Whether stepping ahead pays, and clipping is not certain yet."""
        within = self.max_norm is None or self._squares <= self.max_norm**2
        return self.stats.steps_ahead and within

    def _find_shadow(self, member: _Member, state: Mapping[str, Any]) -> _Shadow | None:
        """The parameter's shadow, which is made if the budget has room for it."""
        parameter, tensors = member.parameter, _tensors_in(state)
        if any(each.device.type != "cpu" or each.requires_grad for each in tensors.values()):
            return None
        if member.shadow is not None and not member.shadow.fits(parameter, state):
            member.shadow, member.has_room = None, True
        if member.shadow is None and member.has_room:
            need_bytes = parameter.nbytes + sum(each.nbytes for each in tensors.values())
            member.has_room = need_bytes <= self._room_bytes(parameter)
            if member.has_room:
                made = {name: self._make(parameter, each) for name, each in tensors.items()}
                shadow = _Shadow(self._make(parameter, parameter), made)
                member.has_room = shadow.fits(parameter, state)
                member.shadow = shadow if member.has_room else None
        return member.shadow

    def _make(self, parameter: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Make memory like that of a tensor, in a file if the parameter rests in one."""
        made = torch.empty_like(like, requires_grad=False)
        resting = self._engine.weights
        if isinstance(resting, AbstractWeights):
            resting.move_beside(parameter, made)
        return made

    def _room_bytes(self, parameter: torch.Tensor) -> int:
        """How many bytes the shadow of a parameter may have."""
        store = self._engine.transfers.store
        if self._budget_bytes is None and self._shares_cores and not store.maps(parameter):
            return 0
        room_bytes = self.most_shadow_bytes - self._shadow_bytes()
        return room_bytes if store.maps(parameter) else min(room_bytes, store.leftover_bytes)

    @property
    def most_shadow_bytes(self) -> int:
        """The most memory that the shadows may have, if the store needs none of it."""
        if self._budget_bytes is not None:
            return self._budget_bytes
        return self._shadow_bytes() + free_ram_bytes() // 2

    def _shadow_bytes(self, *, in_files: bool = True) -> int:
        maps = self._engine.transfers.store.maps
        shadows = (m.shadow for m in self._members.values() if in_files or not maps(m.parameter))
        return sum(shadow.size_bytes for shadow in shadows if shadow is not None)

    @property
    def leftover_bytes(self) -> int:
        """Host memory of the shadows, for which `host_budget` has to have room."""
        return self._shadow_bytes(in_files=False)

    def give_way(self) -> None:
        """Free the shadows, because the store needs their memory, and make no others."""
        self._wait()  # the worker writes to them
        with self._lock:
            for member in self._members.values():
                member.shadow, member.landed, member.has_room = None, None, False

    # ---- in the worker ------------------------------------------------------------------------

    def _run(self, optimizer: Optimizer, job: Sequence[_Work], threads: tuple[int, int]) -> None:
        begin_s = time.perf_counter()
        try:
            _compute_with(*threads)
            with torch.no_grad():
                if self.max_norm is not None:
                    norms = _norms([gradient for _, gradient, *_ in job], *threads)
                    for (landed, *_), norm in zip(job, norms, strict=True):
                        landed.norm = norm
                    with self._lock:
                        self._squares += sum(float(norm) ** 2 for norm in norms)
                work = [(*each, shadow) for *each, shadow in job if shadow is not None]
                if work and self._goes_on():
                    self._step_shadows(optimizer, work)
        finally:
            for landed, gradient, *_ in job:  # which have been read here, away from their layer
                self._page_out(landed.member.parameter, gradient)
            self._count(worker_s=time.perf_counter() - begin_s)

    def _step_shadows(self, optimizer: Optimizer, work: Sequence[tuple[Any, ...]]) -> None:
        groups: dict[int, dict[str, Any]] = {}
        states: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for landed, gradient, state, shadow in work:
            shadow.fill(landed.member.parameter, state)
            shadow.values.grad = self._as_clipping_leaves(gradient)
            if shadow.state:
                states[shadow.values] = shadow.state
            # The options of then: the program may change those of the optimizer meanwhile.
            options = {name: value for name, (value, _) in landed.options.items()}
            group = groups.setdefault(id(landed.options), {**options, "params": []})
            group["params"].append(shadow.values)
        try:
            # A scaler may give the optimizer its scale meanwhile, and the kernel would scale the
            # gradients, which are not copies.
            _step_over(optimizer, list(groups.values()), states, grad_scale=None, found_inf=None)
            for landed, _, _, shadow in work:
                if shadow.is_complete(states.get(shadow.values, {})):
                    landed.shadow = shadow
        finally:
            for _, _, state, shadow in work:
                shadow.values.grad = None
                self._page_out(shadow.values, *shadow.state.values(), *state.values())

    def _as_clipping_leaves(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient as clipping leaves it if it does not bite: multiplied by 1.

        That changes nothing but the signs of zeros of complex numbers.
        """
        if self.max_norm is None or not gradient.is_complex():
            return gradient
        return gradient * torch.ones((), device=gradient.device)

    def _page_out(self, *values: Any) -> None:
        for each in values:
            if isinstance(each, torch.Tensor) and self._engine.transfers.store.maps(each):
                begin = each.data_ptr() - each.data_ptr() % mmap.PAGESIZE
                page_out(begin, each.data_ptr() + each.nbytes - begin)

    # ---- in step() ----------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Clip, commit what was stepped ahead, and step everything else.

        Args:
            optimizer: the optimizer.
            closure: computes the gradients, as for `torch.optim.Optimizer.step`.

        Returns:
            What the closure returned; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            with _computing_with(self._wanted_threads):
                self._step(optimizer)
        finally:
            for member in self._members.values():
                member.expected = member.landings  # as often as in this step
            self.forget(optimizer)
            self._count(shadow_bytes=self._shadow_bytes() - self.stats.shadow_bytes)
        return loss

    def clip(self, optimizer: Optimizer) -> torch.Tensor | None:
        """Clip the gradients now, so that `step` will not; return their norm before that."""
        if self.max_norm is None:
            raise PolicyError("there is no norm to clip to; call handle.overlap with max_norm")
        self._is_clipped = True
        with _computing_with(self._wanted_threads):
            self._clip(optimizer, self._find_current(optimizer, self._landed()))
        return self.grad_norm

    def _step(self, optimizer: Optimizer) -> None:
        landed = self._landed()
        current = self._find_current(optimizer, landed)
        clips = self.max_norm is not None and not self._is_clipped
        clips = clips and self._clip(optimizer, current)
        ahead = [] if clips else [each for each in current if each.shadow is not None]
        if not ahead:
            _step_over(optimizer, optimizer.param_groups, optimizer.state)
        else:
            done = {id(each.member.parameter) for each in ahead}
            rest = [
                {**group, "params": [p for p in group["params"] if id(p) not in done]}
                for group in optimizer.param_groups
            ]
            if any(p.grad is not None for group in rest for p in group["params"]):
                _step_over(optimizer, rest, optimizer.state)
            # Last: if the step above raises, nothing has been committed.
            self._commit(optimizer, ahead)
        num_stepped = sum(each.shadow is not None for each in landed)
        self._count(
            num_steps=1,
            num_overlapped=int(bool(ahead)),
            num_redone=int(num_stepped > len(ahead) or self._again_bytes > 0),
        )
        self._learn(landed, [] if clips else current)

    def _wait(self) -> None:
        """Take back what the worker has not begun, and wait for the rest."""
        with self._lock:
            pending, self._pending = self._pending, []
        begin_s = time.perf_counter()
        for event in [each for each in pending if not each.withdraw()]:
            try:
                event.synchronize()
            except Exception as error:  # the step will raise it, if it fails from the originals too
                _LOG.info("stepping ahead failed: %r", error)
        self._count(waited_s=time.perf_counter() - begin_s)

    def _landed(self) -> list[_Landed]:
        """What has landed, after waiting for the worker."""
        self._wait()
        members = self._members.values()
        return [member.landed for member in members if member.landed is not None]

    def _find_current(self, optimizer: Optimizer, landed: Sequence[_Landed]) -> list[_Landed]:
        """Find what has landed and is still what a step taken now would begin with."""
        # With another number of threads, norms can have other bits.
        is_same = self._num_threads == _num_threads(self._wanted_threads)
        if self.is_scaled or not _is_plain() or not is_same:
            return []
        groups = optimizer.param_groups
        group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        known: dict[int, bool] = {}
        current = []
        for each in landed:
            member = each.member
            if group_of.get(id(member.parameter)) != member.group:
                continue
            # Guard ahead-of-options: a step taken ahead counts only with the options of now. A
            # scheduler may have changed the learning rate since.
            if id(each.options) not in known:
                known[id(each.options)] = _is_as_marked(groups[member.group], each.options)
            state = optimizer.state.get(member.parameter, {})
            if known[id(each.options)] and each.is_current(state):
                current.append(each)
        return current

    def _clip(self, optimizer: Optimizer, current: Sequence[_Landed]) -> bool:
        """Clip the gradients as `torch.nn.utils.clip_grad_norm_` does; return whether that bites.

        Sets `grad_norm`.
        """
        assert self.max_norm is not None
        model = self._model()
        own = (p for group in optimizer.param_groups for p in group["params"])
        parameters = list(own if model is None else model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        # Before `step`, a scaler may have unscaled the gradients, which raises no version.
        known = [] if self._is_clipped else current
        norms = {id(n.member.parameter.grad): n.norm for n in known if n.norm is not None}
        self.grad_norm = _total_norm(gradients, norms)
        factor = torch.clamp(self.max_norm / (self.grad_norm + 1e-6), max=1.0)
        # Guard unclipped-only: what was stepped ahead with gradients as they landed is committed
        # only if clipping multiplies by 1. NaN is not 1.
        bites = factor.item() != 1.0
        if current and not bites:
            # Others do not change, for nothing has landed where small numbers are flushed to zero.
            parameters = [p for p in parameters if p.is_complex()]
        torch.nn.utils.clip_grads_with_norm_(parameters, self.max_norm, self.grad_norm)
        self._count(num_clipped=int(bites))
        return bites

    def _commit(self, optimizer: Optimizer, ahead: Sequence[_Landed]) -> None:
        """Give parameters and state the values of their shadows.

        A parameter keeps its memory: it may be part of its layer's memory at rest, and others may
        refer to it. A tensor of the state exchanges memory with its shadow if nobody could notice.
        """
        shadows = [each.shadow for each in ahead if each.shadow is not None]
        with torch.no_grad():
            parameters = [each.member.parameter for each in ahead]
            torch._foreach_copy_(parameters, [shadow.values for shadow in shadows])
            for parameter, shadow in zip(parameters, shadows, strict=True):
                state, shadow.state = shadow.state, {}
                own = optimizer.state[parameter] if state else state
                for name, value in state.items():
                    if not isinstance(value, torch.Tensor):
                        own[name] = value
                    elif self._can_exchange(own[name], value):
                        own[name].data, value.data = value.data, own[name].data
                    else:
                        own[name].copy_(value)

    def _can_exchange(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether two tensors can exchange memory: nobody else refers to it."""
        if one.numel() < 2:
            return False
        maps = self._engine.transfers.store.maps
        return maps(one) == maps(other) and all(
            count_storage_users(each) == ALONE
            and not each.is_shared()  # type: ignore[no-untyped-call]
            and (maps(each) or each.untyped_storage().resizable())
            for each in (one, other)
        )

    def _learn(self, landed: Sequence[_Landed], current: Sequence[_Landed]) -> None:
        """Learn from a step whether stepping ahead pays."""
        num_bytes = self._again_bytes + sum(each.member.parameter.nbytes for each in landed)
        if num_bytes:
            good_bytes = sum(each.member.parameter.nbytes for each in current)
            share = self.stats.twice_share
            self._count(twice_share=_NEWEST * (1 - good_bytes / num_bytes - share))

    def note_fork(self) -> None:
        """Forget what was stepped ahead, in a forked child, which does not have the worker."""
        self._lock, self._pending = threading.RLock(), []
        device = self._engine.transfers.device
        self._worker = device.lane("ebbtide-optimizer", "cpu_optimizer")
        for member in self._members.values():
            member.landed = None

    def _count(self, **more: float) -> None:
        with self._lock:
            counted = {name: getattr(self.stats, name) + value for name, value in more.items()}
            self.stats = replace(self.stats, **counted)

    def close(self) -> None:
        """Let the optimizer be as it was before. What was stepped ahead is forgotten."""
        self._end_watch()
        _remove_hooks(self._hooks)
        self._worker.close()  # which finishes what it works at: it reads what rests on the host
        optimizer = self._optimizer()
        if optimizer is not None and vars(optimizer).get(_NAME) is self:
            optimizer.__class__ = _plain_class(optimizer)
            del vars(optimizer)[_NAME]
            if self._wrapped is not None:
                vars(optimizer)["step"] = self._wrapped
        self._members.clear()


def _can_have_shadow(parameter: torch.Tensor) -> bool:
    return (
        parameter.device.type == "cpu"
        and parameter.layout is torch.strided
        and not parameter.is_nested
        and not parameter.is_inference()
        and type(parameter) in (torch.Tensor, nn.Parameter)
    )


def _can_step(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether a parameter is still on the host, and its gradient no part of a graph.

    The worker waits for no stream: it must not read what kernels of a device are still writing.
    """
    return (
        _can_have_shadow(parameter)
        and type(gradient) is torch.Tensor
        and gradient.layout is torch.strided
        and gradient.device == parameter.device
        and not gradient.requires_grad
        and not gradient.is_inference()
        and not (gradient.is_conj() or gradient.is_neg())
    )


def _total_norm(
    gradients: Sequence[torch.Tensor], known: Mapping[int, torch.Tensor]
) -> torch.Tensor:
    """The norm of all gradients, by the operations of `torch.nn.utils.get_total_norm`.

    Args:
        gradients: in the order in which torch would be given them.
        known: the norms of some of them, by `id`.
    """
    if not known and not (gradients and _is_plain() and all(map(_is_ordinary, gradients))):
        return torch.nn.utils.get_total_norm(gradients)
    grouped: Any = group_by_device_and_dtype([list(gradients)])
    norms = []
    with torch.no_grad():
        for (device, _), ((tensors, *_), _) in grouped.items():
            missing = [each for each in tensors if id(each) not in known]
            if missing and has_foreach_support(missing, device):
                num_threads = torch.get_num_threads()
                computed = list(_norms(missing, num_threads, num_threads))
            else:
                computed = [torch.linalg.vector_norm(each, 2.0) for each in missing]
            new = iter(computed)
            norms += [known[id(each)] if id(each) in known else next(new) for each in tensors]
        home = gradients[0].device
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack([n.to(home) for n in norms]))
        return total


def _norms(
    gradients: Sequence[torch.Tensor], num_threads: int, of_program: int
) -> Sequence[torch.Tensor]:
    """The norm of each gradient, by the operation of `torch.nn.utils.get_total_norm`.

    That operation reads a gradient on the host with one core, so several threads share them.

    Args:
        gradients: on one device, and of one type.
        num_threads: how many threads the step computes with.
        of_program: how many the program does.
    """
    num_bytes = sum(each.nbytes for each in gradients)
    num_readers = min(num_threads, len(gradients), num_bytes // _LARGE_BYTES)
    on_host = gradients[0].device.type == "cpu"
    if num_readers < 2 or not on_host or not all(map(_is_ordinary, gradients)):
        return torch._foreach_norm(list(gradients), 2.0)
    order = sorted(range(len(gradients)), key=lambda number: -gradients[number].nbytes)
    shares = [order[first::num_readers] for first in range(num_readers)]
    norms: dict[int, torch.Tensor] = {}
    start = functools.partial(_compute_with, num_threads, of_program)
    with ThreadPoolExecutor(num_readers, initializer=start) as pool:
        work = ([gradients[number] for number in share] for share in shares)
        for share, computed in zip(shares, pool.map(_foreach_norm, work), strict=True):
            norms.update(zip(share, computed, strict=True))
    return [norms[number] for number in range(len(gradients))]


@torch.no_grad()
def _foreach_norm(gradients: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    return torch._foreach_norm(gradients, 2.0)


def _is_ordinary(gradient: torch.Tensor) -> bool:
    return type(gradient) in (torch.Tensor, nn.Parameter) and gradient.layout is torch.strided


def _remove_hooks(hooks: dict[int, Any]) -> None:
    while hooks:
        hooks.popitem()[1].remove()


# ---- The optimizer: of a class that is derived from its own, and otherwise the same object

_NAME: Final = "_ebbtide_overlap"


def find_overlap(optimizer: Optimizer) -> StepOverlap | None:
    """Return what lets an optimizer step inside backward; None if it does not."""
    return vars(optimizer).get(_NAME)


def _plain_class(optimizer: Optimizer) -> type[Optimizer]:
    return next(each for each in type(optimizer).__mro__ if each in _STEPS_EACH_ALONE)


def _step_over(
    optimizer: Optimizer,
    groups: list[dict[str, Any]],
    state: defaultdict[torch.Tensor, Any],
    **others: Any,
) -> None:
    """Step over some parameters as the optimizer would, without calling its hooks.

    Args:
        optimizer: the optimizer.
        groups: parameter groups.
        state: the state of the parameters, which is changed.
        others: attributes that are to differ from those of the optimizer.
    """
    plain = _plain_class(optimizer)
    step = plain.step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    twin = plain.__new__(plain)
    vars(twin).update(vars(optimizer), param_groups=groups, state=state, **others)
    step(twin)


@functools.cache
def _overlapping_class(plain: type[Optimizer]) -> type[Optimizer]:
    """Derive the class of an overlapping optimizer from its own class."""

    class Overlapping(plain):  # type: ignore[misc, valid-type]
        _ebbtide_overlap: StepOverlap

        @property
        def grad_norm(self) -> torch.Tensor | None:
            """The norm of all gradients in the last step, before clipping."""
            return self._ebbtide_overlap.grad_norm

        @property
        def overlap(self) -> OverlapStats:
            """What stepping ahead has done so far."""
            return self._ebbtide_overlap.stats

        def clip_grad_norm_(self) -> torch.Tensor | None:
            """Clip the gradients before `step`, which then does not; return their norm."""
            return self._ebbtide_overlap.clip(self)

        @property
        def _step_supports_amp_scaling(self) -> bool:
            # A scaler asks this before a step, and has unscaled the gradients, which raises no
            # version; or it would have the kernel unscale them, after they were clipped.
            self._ebbtide_overlap.is_scaled = True
            supports = vars(self).get("_step_supports_amp_scaling", False)
            return self._ebbtide_overlap.max_norm is None and bool(supports)

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            note_step(self)
            return self._ebbtide_overlap.step(self, closure)

        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)
            self._ebbtide_overlap.forget(self)

        def __repr__(self) -> str:
            return f"{super().__repr__()}\n{self.overlap}"

        def __reduce_ex__(self, protocol: Any) -> Any:
            return object.__new__, (plain,), self.__getstate__()

    Overlapping.__name__ = Overlapping.__qualname__ = plain.__name__
    Overlapping.__doc__ = plain.__doc__
    step: Any = Optimizer.profile_hook_step(Overlapping.step)  # calls the hooks around a step
    step.hooked = True
    setattr(step, SCHEDULED, True)
    Overlapping.step = step  # type: ignore[method-assign]
    return Overlapping


def _check_optimizer(optimizer: object) -> None:
    """Check that the step of an optimizer can be split by parameters.

    Raises:
        PolicyError: it cannot, or nobody knows.
    """
    if not isinstance(optimizer, Optimizer):
        refuse("optimizer", "an optimizer of torch.optim", optimizer)
    name = type(optimizer).__name__
    if _NAME in vars(optimizer):
        raise PolicyError(f"the step of this {name} overlaps already; call overlap once for each")
    if type(optimizer) not in _STEPS_EACH_ALONE:
        known = ", ".join(sorted(each.__name__ for each in _STEPS_EACH_ALONE))
        raise PolicyError(
            f"{name} may need all gradients at once, so its step cannot begin inside backward; use "
            f"one of {known}, or leave overlap out"
        )
    if "step" in vars(optimizer) and not hasattr(optimizer.step, SCHEDULED):
        raise PolicyError(
            f"the step of this {name} was replaced by other code; call handle.overlap before that"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise PolicyError(f"{name}(differentiable=True) steps inside a graph; leave overlap out")
