"""`verify`: the same training steps plainly and offloaded, in adverse orders, compared to the bit.

The plain steps run twice first. If the two differ, all runs take deterministic kernels. Then the
same steps run offloaded, from the same values and random numbers: once as they are, and then
under one `Provocation` after the other, each of which a seed can repeat alone.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import inspect
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from ebbtide.api import offload as offload_model
from ebbtide.devices.device import (
    AbstractDevice,
    AbstractEvent,
    AbstractLane,
    AbstractStream,
    Origin,
)
from ebbtide.devices.simulated import POISON, SimulatedDevice
from ebbtide.errors import PolicyError
from ebbtide.policy import ActivationPolicy, WeightPolicy, refuse
from ebbtide.runtime.engine import devices_made_by, make_device
from ebbtide.runtime.parameter_index import find_device
from ebbtide.runtime.stats import StepStats
from ebbtide.runtime.torch_internals import tree_leaves, tree_map_only
from ebbtide.tools.models import call_model, default_loss, find_function, read_task
from ebbtide.units import count, format_size
from ebbtide.version import __version__

if TYPE_CHECKING:
    from ebbtide.tools.found_models import RunOptions
    from ebbtide.tools.run import MainScript

Loss = Callable[[Any], Tensor]
Values = dict[str, Tensor | None]
"""Copies on the host of what a run computed, by name, in the order in which a run computes them."""

_SEED: Final = 1234  # of the random numbers that the steps begin with
_LABEL_WIDTH: Final = 9
_KINDS: Final = "losses, gradients, parameters, buffers, random states"


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifiedRun:
    """One offloaded run.

    Attributes:
        seed: repeats the run alone; None for the run in which nothing was provoked.
        name: what was provoked, in words.
        order: the order of execution of a device that has several; "" for others.
        difference: the first value that differs from the plain run's, such as ``step 1: gradient of
            blocks.3.weight``; "" if all bits are the same.
        how: by how much it differs, in words.
        num_different: how many values differ.
        error: what the run raised; "" if nothing.
        moved_bytes: offloaded, rebuilt, recomputed, and weights reloaded.
    """

    seed: int | None
    name: str
    order: str = ""
    difference: str = ""
    how: str = ""
    num_different: int = 0
    error: str = ""
    moved_bytes: int = 0

    @property
    def is_same(self) -> bool:
        """Whether the run ended, with the results of the plain one."""
        return not self.difference and not self.error

    def __str__(self) -> str:
        """Say which run it was, and how it differs."""
        words = "nothing provoked" if self.seed is None else f"seed {self.seed} ({self.name})"
        words += f", order {self.order}" if self.order else ""
        if not self.difference:
            return f"{words}, raised {self.error}" if self.error else words
        others = f"and in {self.num_different - 1} other values"
        return f"{words}, in {self.difference}: {self.how}; {others}"


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What `verify` found. It prints as a report of at most 20 lines.

    Attributes:
        what: what ran: the model, its parameters, its device.
        steps: training steps in each run.
        compared: how many values of a run were compared.
        runs: the offloaded runs.
        versions: of ebbtide, torch and Python.
        deterministic: whether torch had to take deterministic kernels, as plain runs differed
            without.
    """

    what: str
    steps: int
    compared: int
    runs: tuple[VerifiedRun, ...]
    versions: str = ""
    deterministic: bool = False

    @property
    def same(self) -> bool:
        """Whether every run gave the plain results, and something was offloaded in them."""
        return self.has_moved and all(run.is_same for run in self.runs)

    @property
    def has_moved(self) -> bool:
        """Whether anything was offloaded; if not, nothing was verified."""
        return any(run.moved_bytes for run in self.runs)

    @property
    def first_different(self) -> VerifiedRun | None:
        """The first run that differs or raised an error; None if all are the same."""
        return next((run for run in self.runs if not run.is_same), None)

    @property
    def result(self) -> str:
        """The result in words."""
        orders = count(len(self.runs), "order")
        bad = [run for run in self.runs if not run.is_same]
        if bad:
            return f"DIFFERENT in {len(bad)} of {orders}, first with {bad[0]}"
        if not self.has_moved:
            return "NOTHING WAS OFFLOADED, so nothing was verified; have smaller tensors offloaded"
        seeds = [run.seed for run in self.runs if run.seed is not None]
        return f"THE SAME in {orders}" + (f", seeds {seeds[0]} to {seeds[-1]}" if seeds else "")

    @property
    def line(self) -> str:
        """The result in one line, to be pasted into an issue."""
        return f"ebbtide verify: {self.what}: {self.result}; to the bit; {self.versions}"

    def document(self) -> dict[str, Any]:
        """Return the report for JSON."""
        begin = {"format": "ebbtide-verify", "version": 3, "same": self.same}
        return begin | dataclasses.asdict(self) | {"line": self.line}

    def __str__(self) -> str:
        from ebbtide.tools.layout import labelled, render

        moved_bytes = max((run.moved_bytes for run in self.runs), default=0)
        kernels = ", by deterministic kernels" if self.deterministic else ""
        rows = {
            "ran": f"{self.what}; {count(self.steps, 'step')} plainly, twice, and in "
            f"{count(len(self.runs), 'order')} offloaded{kernels}; up to "
            f"{format_size(moved_bytes)} moved in a run",
            "compared": f"{self.compared} values of a run, to the bit: {_KINDS}",
            "result": self.result,
        }
        bad = self.first_different
        if bad is not None:
            again = "orders=0" if bad.seed is None else f"seed={bad.seed}, orders=1"
            rows["do"] = f"run it again with {again}; report the line below"
        return render(labelled((rows | {"paste": self.line}).items(), _LABEL_WIDTH, indent=0))


# ---- Provokes the faults of whoever uses a device: late work, overwritten memory, failures ----
#
# Everything that is provoked is allowed: a copy may take long, memory that was freed may have other
# contents at once, the target of a copy may contain anything until the copy has ended, the system
# may refuse to page-lock memory, and a disk may be slow. Code that waits for what it reads,
# and holds what others read, gives the same results to the bit.

_PIECE_BYTES: Final = 2**20  # of poison, and of the copies that hold others up
_MOST_WATCHED: Final = 4096
_SLEEP_CYCLES: Final = 400_000  # 0.2 to 0.3 ms on a GPU
_JOB_S: Final = 0.002  # the most that a worker is held up before a job, and after it


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class Provocation:
    """What is provoked in one run.

    Attributes:
        seed: decides every choice.
        name: what is provoked, in words.
        late_copies: the chance that a copy is held up before it begins, and after it has ended.
        late_compute: the chance that kernels are held up after the engine has queued something.
        refused_pins: the chance that the system refuses to page-lock memory.
        eagerness: of a `SimulatedDevice`, in the place of a CPU; None: the CPU itself.
    """

    seed: int
    name: str
    late_copies: float = 0.0
    late_compute: float = 0.0
    refused_pins: float = 0.0
    eagerness: float | None = None

    @classmethod
    def draw(cls, seed: int) -> Provocation:
        """Return what a seed stands for. Five in a row provoke everything there is."""
        chance = random.Random(seed)
        some, most = chance.uniform(0.1, 0.4), chance.uniform(0.5, 0.9)
        kinds: tuple[tuple[str, dict[str, float]], ...] = (
            ("copies late", {"late_copies": most, "eagerness": some / 8}),
            ("compute late", {"late_compute": some, "eagerness": most}),
            ("disk slow", {"late_copies": most}),
            ("no page-locking", {"refused_pins": most, "eagerness": some}),
            ("everything", {"late_copies": some, "late_compute": some, "eagerness": some}),
        )
        name, chances = kinds[seed % len(kinds)]
        return cls(seed=seed, name=name, **chances)

    def wrap(self, device: AbstractDevice, *, is_planned: bool) -> AbstractDevice:
        """Return the device that a run under this provocation computes on.

        Args:
            device: a real one. In the place of a CPU there may be a simulated one, which runs
                copies in adversarial orders and looks for races itself.
            is_planned: whether a plan decides. A budget on a CPU is of the process's memory, where
                a simulated device has none, so there is none then.
        """
        if device.computes_on_host and self.eagerness is not None and not is_planned:
            simulated = SimulatedDevice(self.seed, self.eagerness)
            simulated.refusals = self.refused_pins
            return simulated
        return ProvokedDevice(device, self)


@final
class ProvokedDevice(AbstractDevice):
    """A real device whose work is late, and whose freed memory is overwritten.

    Args:
        device: the real device.
        provocation: what is provoked.
    """

    def __init__(self, device: AbstractDevice, provocation: Provocation) -> None:
        self._device = device
        self._provocation = provocation
        self._choices = random.Random(provocation.seed)
        super().__init__(device.torch_device)
        self.pins_host_memory = device.pins_host_memory
        self.pins_by_torch = device.pins_by_torch
        self.computes_on_host = device.computes_on_host
        self.has_memory = device.has_memory
        self._freed = FreedMemoryPoison()
        if not device.computes_on_host:
            self._sleep = find_sleep(device.torch_device)
            poison = torch.full((_PIECE_BYTES,), POISON, dtype=torch.uint8, device="cpu")
            self._host_poison, self._host_scratch = poison.pin_memory(), poison.clone().pin_memory()
            self._poison = poison.to(device.torch_device)
            self._scratch = self._poison.clone()
            device.compute_stream().record().synchronize()

    def origin(self) -> Origin:
        return self._device.origin()

    def compute_stream(self) -> AbstractStream:
        return self._device.compute_stream()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        # Kernels may write to new memory, and a copy into it must wait for them.
        return self._device.allocate(size_bytes).fill_(POISON)

    def note_use(
        self,
        memory: torch.Tensor,
        home: AbstractStream,
        current: AbstractStream,
        ready: AbstractEvent | None = None,
    ) -> bool:
        return self._device.note_use(memory, home, current, ready)

    def pin(self, address: int, size_bytes: int) -> Callable[[], None]:
        if self._happens(self._provocation.refused_pins):
            raise OSError(errno.ENOMEM, "page-locking was refused on purpose")
        return self._device.pin(address, size_bytes)

    def copy_down(
        self, target: torch.Tensor, source: torch.Tensor, *after: AbstractEvent
    ) -> AbstractEvent:
        return self._copy(self._device.copy_down, source, target, source, *after)

    def copy_up(
        self, target: torch.Tensor, source: torch.Tensor, *after: AbstractEvent
    ) -> AbstractEvent:
        return self._copy(self._device.copy_up, target, target, source, *after)

    def _copy(
        self,
        copy: Callable[..., AbstractEvent],
        here: torch.Tensor,
        target: torch.Tensor,
        source: torch.Tensor,
        *after: AbstractEvent,
    ) -> AbstractEvent:
        """Copy between copies that take time, into a target that was poisoned.

        Args:
            copy: copies in one direction.
            here: of target and source, the one on the device.
            target: as for `copy_down` and `copy_up`,
            source: and this,
            *after: and these.
        """
        if self.computes_on_host:
            return copy(target, source, *after)
        self._device.keeps_time = self.keeps_time
        self._freed.watch(here)
        # Poison, and the target and the source of the copies that only take time.
        poison, *scratch = self._poison, self._host_scratch, self._scratch
        if here is target:
            poison, *scratch = self._host_poison, self._scratch, self._host_scratch
        for begin in range(0, target.numel(), _PIECE_BYTES):
            piece = target[begin : begin + _PIECE_BYTES]
            copy(piece, poison[: piece.numel()], *after)
        if self._happens(self._provocation.late_copies):
            for _ in range(self._choices.randint(1, 8)):
                copy(*scratch)  # which nobody needs, before one that somebody waits for
        copied = copy(target, source, *after)
        if self._happens(self._provocation.late_copies):
            copied = copy(*scratch)
        if self._happens(self._provocation.late_compute):
            self._sleep()
        self._freed.poison()
        return copied

    def _happens(self, chance: float) -> bool:
        return self._choices.random() < chance

    def lane(self, name: str, lane: str) -> AbstractLane:
        return _ProvokedLane(self._device.lane(name, lane), self)

    def defer(self, work: Callable[[], None]) -> None:
        self._device.defer(work)

    def finish_copies(self) -> None:
        self._device.finish_copies()

    def finish_other_streams(self) -> None:
        self._device.finish_other_streams()

    def provoke_job(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a worker's job that is held up."""
        chance = self._provocation.late_copies
        before_s, after_s = (
            self._choices.uniform(0, _JOB_S) if self._happens(chance) else 0.0 for _ in range(2)
        )

        def provoked() -> None:
            time.sleep(before_s)
            work()
            time.sleep(after_s)

        return provoked


@final
class FreedMemoryPoison:
    """Overwrites memory of a device as soon as it has been freed.

    The allocator hands out what was freed last, in the order of the stream that it belongs to, so
    whoever is given the memory next may do the same.
    """

    def __init__(self) -> None:
        self._watched: list[tuple[StorageWeakRef, int, torch.device]] = []

    def watch(self, tensor: torch.Tensor) -> None:
        """Overwrite the memory of a tensor once it has been freed."""
        if len(self._watched) < _MOST_WATCHED:
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._watched.append((reference, storage.nbytes(), tensor.device))

    def poison(self, *streams: torch.Stream) -> None:
        """Overwrite what was freed.

        Args:
            *streams: those that it may belong to; by default the current one.
        """
        watched, self._watched = self._watched, []
        for each in watched:
            reference, size_bytes, device = each
            if not reference.expired():  # type: ignore[no-untyped-call]
                self._watched.append(each)
                continue
            for stream in streams or (None,):
                with torch.get_device_module(device).stream(stream):
                    torch.full((size_bytes,), POISON, dtype=torch.uint8, device=device)


@final
class _ProvokedLane(AbstractLane):
    """A worker whose jobs are held up."""

    def __init__(self, lane: AbstractLane, device: ProvokedDevice) -> None:
        self._lane = lane
        self._device = device

    def submit(
        self, work: Callable[[], None], then: Callable[[], None] | None = None
    ) -> AbstractEvent:
        return self._lane.submit(self._device.provoke_job(work), then)

    def close(self) -> None:
        self._lane.close()


def find_sleep(device: torch.device) -> Callable[[], object]:
    """Return what queues a kernel that takes a fraction of a millisecond."""
    sleep = getattr(torch.get_device_module(device), "_sleep", None)
    if sleep is not None:
        return lambda: sleep(_SLEEP_CYCLES)
    busy = torch.ones(1024, 1024, device=device)
    return lambda: torch.mm(busy, busy)


# ---- The verification ----


def verify(
    model: nn.Module,
    batch: Any,
    loss: Loss | None = None,
    *,
    steps: int = 3,
    offload: Mapping[str, Any] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    microbatches: int = 1,
    orders: int = 7,
    seed: int = 0,
) -> VerifyReport:
    """Check that offloading leaves every bit of a model's training steps as it is.

    The same steps run plainly, and offloaded in several adverse orders: copies or kernels are late,
    memory is overwritten as soon as it is free, page-locking is refused, the disk is slow. Losses,
    gradients, parameters, buffers and the states of random numbers are compared to the bit. The
    model is left as it was.
    The host keeps copies of the gradients of all steps, and of the parameters, twice.

    Args:
        model: the model, not offloaded, on the device on which it trains.
        batch: what it is called with: a tensor, a tuple of positional or a mapping of keyword
            arguments. Tensors that require gradients have theirs compared, too.
        loss: computes the loss from what the model returns. None: its attribute ``loss`` if it has
            one, else the mean square of all that it returns.
        steps: training steps in each run.
        offload: arguments of `ebbtide.offload`. None: all activations are offloaded, however small.
        optimizer: makes the optimizer from the parameters. None: SGD with momentum.
        microbatches: forwards in a step before their backwards, as in a pipeline. With 2, two
            graphs are alive at once.
        orders: how many provocations are tried, beside the run without any.
        seed: the seed of the first; the others have the next ones.

    Returns:
        The report; ``report.same`` says whether everything is the same.

    Raises:
        PolicyError: the model cannot be offloaded like this, the plain steps give NaN, which hides
            differences, or others each time, or an argument is wrong.
    """
    if not isinstance(model, nn.Module):
        refuse("model", "a torch.nn.Module", model)
    numbers = {"steps": (steps, 1), "microbatches": (microbatches, 1), "orders": (orders, 0)}
    for name, (value, least) in numbers.items():
        if not isinstance(value, int) or value < least:
            refuse(name, f"a number of at least {least}", value)
    if offload is None:
        offload = {"activations": ActivationPolicy(min_bytes=1)}
    loss, optimizer = loss or default_loss, optimizer or sgd
    trial = Trial(model, batch, loss, steps, microbatches, optimizer, offload)
    with kept_random_numbers(trial.device):
        try:
            seeds = range(seed, seed + orders)
            return verify_runs(trial.run, model, seeds, steps=steps)
        finally:
            trial.restore()
            trial.give_back_gradients()


Run = Callable[[bool, Provocation | None, bool], tuple[Values, str, int]]
"""Runs the training steps from the same beginning each time.

It is told whether they are offloaded, what is provoked, and whether kernels are deterministic. It
returns the values to compare, and the order and the moved bytes of a `VerifiedRun`.
"""


def verify_runs(run: Run, model: nn.Module, seeds: range, *, steps: int) -> VerifyReport:
    """Run training steps plainly, and offloaded under provocations.

    Args:
        run: runs the steps.
        model: the model that they train.
        seeds: the seeds of the provocations.
        steps: how many steps a run has.

    Raises:
        PolicyError: the model cannot be offloaded like this, or the plain steps give NaN, or
            others each time.
    """
    plain = run(False, None, False)[0]
    found = _compare(plain, run(False, None, False)[0])
    deterministic = bool(found)
    if deterministic:
        plain = run(False, None, True)[0]
        found = _compare(plain, run(False, None, True)[0])
    if found:
        raise PolicyError(
            f"the plain steps differ from run to run, by deterministic kernels, too: "
            f"{found['difference']}, {found['how']}; give the model the same numbers each time, "
            f"and leave out operators of which torch warns that they have no deterministic kernel"
        )
    for name, value in plain.items():
        if value is not None and value.is_floating_point() and value.isnan().any():
            raise PolicyError(
                f"the plain steps give NaN ({name}), which would hide differences; verify with a "
                f"batch, a loss or an optimizer that gives finite numbers"
            )
    runs = list[VerifiedRun]()
    for number in (None, *seeds):
        provocation = None if number is None else Provocation.draw(number)
        name = "nothing" if provocation is None else provocation.name
        try:
            values, order, moved_bytes = run(True, provocation, deterministic)
        except (PolicyError, ImportError):
            if runs and runs[-1].error:
                break  # what went wrong has kept the model from being detached
            raise
        except Exception as raised:
            first_line = str(raised).partition("\n")[0]
            error = f"{type(raised).__name__}: {first_line}"
            runs.append(VerifiedRun(seed=number, name=name, error=error))
            continue
        found = _compare(plain, values)
        runs.append(
            VerifiedRun(seed=number, name=name, order=order, moved_bytes=moved_bytes, **found)
        )
    python = ".".join(map(str, sys.version_info[:3]))
    return VerifyReport(
        what=describe_model(model),
        steps=steps,
        compared=len(plain),
        runs=tuple(runs),
        versions=f"ebbtide {__version__}, torch {torch.__version__}, Python {python}",
        deterministic=deterministic,
    )


def choose_order(device: torch.device, provocation: Provocation | None) -> str:
    """Choose the order of execution of a device that has several; "" for others.

    Its module offers `choose_order` and `ORDERS_TO_TRY`, as that of the accelerator in software
    does.
    """
    module = None if device.type == "cpu" else torch.get_device_module(device)
    names = list(getattr(module, "ORDERS_TO_TRY", ()))
    if not names:
        return ""
    order = str(names[0 if provocation is None else provocation.seed % len(names)])
    module.choose_order(order)  # type: ignore[union-attr]
    return order


@contextlib.contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Within the block torch takes deterministic kernels where it has them, if they are wanted."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if enabled:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


# ---- The steps, and what is compared of them ----


@final
@dataclasses.dataclass
class Trial:
    """The steps of a model, and the values with which every run begins. The fields are of `verify`.

    Attributes:
        device: the device on which the model trains.
    """

    model: nn.Module
    batch: Any
    loss: Loss
    steps: int
    microbatches: int
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    offload: Mapping[str, Any]

    def __post_init__(self) -> None:
        model, device = self.model, find_device([self.model])
        if device is None:
            raise PolicyError(
                f"{type(model).__name__} has no parameters, so nothing can be trained"
            )
        self.device = device
        given = (leaf for leaf in tree_leaves(self.batch) if isinstance(leaf, Tensor))
        self._inputs = [leaf for leaf in given if leaf.is_leaf and leaf.requires_grad]
        self._gradients = [(t, t.grad) for t in [*model.parameters(), *self._inputs]]
        tensors = [*model.parameters(), *model.buffers()]
        self._tensors = [(tensor, tensor.detach().cpu().clone()) for tensor in tensors]
        self._attributes = [(m, _plain_attributes(m)) for m in model.modules()]

    def restore(self) -> None:
        """Put back the values with which every run begins."""
        torch.clear_autocast_cache()  # of a region that surrounds all runs
        with torch.no_grad():
            for tensor, values in self._tensors:
                tensor.copy_(values)
        for module, attributes in self._attributes:
            module.__dict__.update(copy.deepcopy(attributes))

    def give_back_gradients(self) -> None:
        """Put back the gradients that there were before."""
        for tensor, gradient in self._gradients:
            tensor.grad = gradient

    def run(
        self, offloaded: bool, provocation: Provocation | None, deterministic: bool
    ) -> tuple[Values, str, int]:
        """Run the steps; a `Run`."""
        with deterministic_kernels(deterministic):
            if not offloaded:
                return self.train(), "", 0
            order = choose_order(self.device, provocation)
            values, moved_bytes = self._train_offloaded(provocation)
            return values, order, moved_bytes

    def _train_offloaded(self, provocation: Provocation | None) -> tuple[Values, int]:
        """Run all steps offloaded, on a device that is provoked.

        Returns:
            What is compared, and the bytes that moved.
        """
        is_planned = any(self.offload.get(name) is not None for name in ("budget", "plan"))

        def make(torch_device: torch.device) -> AbstractDevice:
            device = make_device(torch_device)
            if provocation is None:
                return device
            return provocation.wrap(device, is_planned=is_planned)

        self.restore()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pageable memory, for example, which was provoked
            with devices_made_by(make) as engines:
                handle = offload_model(self.model, **self.offload)
            moved_bytes = list[int]()
            with handle:
                values = self.train(end_step=lambda: moved_bytes.append(moved(engines[0].stats)))
        return values, sum(moved_bytes)

    def train(
        self,
        context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        end_step: Callable[[], None] = lambda: None,
    ) -> Values:
        """Run all steps, and return copies of what is compared.

        Args:
            context: surrounds the forwards and backwards of each step.
            end_step: called after each step.
        """
        self.restore()
        seed_all()
        optimizer = self.optimizer([p for p in self.model.parameters() if p.requires_grad])
        values: Values = {}
        for step in range(1, self.steps + 1):
            for tensor, _ in self._gradients:
                tensor.grad = None
            with context():
                losses = [
                    self.loss(call_model(self.model, self.batch)) for _ in range(self.microbatches)
                ]
                for loss in losses:
                    loss.backward()  # type: ignore[no-untyped-call]
            # Only now: to read a loss before is to wait until all copies have ended.
            for number, loss in enumerate(losses):
                values[f"step {step}: loss" + (f" {number}" if number else "")] = copy_of(loss)
            del losses, loss
            # Backward comes to the last parameters first, so the first difference is among them.
            for name, parameter in reversed(list(self.model.named_parameters())):
                values[f"step {step}: gradient of {name}"] = copy_of(parameter.grad)
            for number, tensor in enumerate(self._inputs):
                values[f"step {step}: gradient of input {number}"] = copy_of(tensor.grad)
            optimizer.step()
            torch.clear_autocast_cache()
            end_step()
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            values[f"last step: {name}"] = copy_of(tensor)
        return values | random_states(self.device)


def moved(stats: StepStats) -> int:
    """Return the bytes that moved in a step, as of `VerifiedRun`."""
    moved_bytes = stats.offloaded_bytes + stats.rebuilt_bytes
    return moved_bytes + stats.recomputed_bytes + stats.weight_reload_bytes


def seed_all() -> None:
    """Begin all random numbers of this process anew."""
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    np.random.seed(_SEED)


def random_states(device: torch.device) -> Values:
    """Return the states of all random numbers, as tensors."""
    states: Values = {"random state of the CPU": torch.get_rng_state()}
    if device.type != "cpu":
        state = torch.get_device_module(device).get_rng_state(device)
        states[f"random state of {device.type}"] = state
    numbers = list(random.getstate()[1])
    states["random state of Python"] = torch.tensor([n - 2**31 for n in numbers])
    keys = np.random.get_state(legacy=False)["state"]["key"]
    states["random state of NumPy"] = torch.tensor(keys.astype("int64"))
    return states


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


@contextlib.contextmanager
def kept_random_numbers(*devices: torch.device) -> Iterator[None]:
    """Keep the states of the random numbers of torch, Python and NumPy over the block.

    Args:
        *devices: the devices whose random numbers are kept beside the host's.
    """
    drawing = [each for each in devices if each.type not in ("cpu", "meta")]
    python_state, numpy_state = random.getstate(), np.random.get_state(legacy=False)
    with torch.random.fork_rng(drawing, device_type=drawing[0].type if drawing else "cpu"):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes that are numbers, texts and the like: counters, for example."""
    return {
        name: copy.deepcopy(value)
        for name, value in vars(module).items()
        if not name.startswith("_")
        and all(isinstance(leaf, bool | int | float | str | None) for leaf in tree_leaves(value))
    }


def copy_of(tensor: Tensor | None) -> Tensor | None:
    """Return a copy on the host."""
    return None if tensor is None else tensor.detach().resolve_conj().cpu().clone()


# ---- The comparison ----


def _bytes_of(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.contiguous().view(-1).view(torch.uint8)


def _same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    return torch.equal(_bytes_of(one), _bytes_of(other))


def _compare(plain: Values, got: Values) -> dict[str, Any]:
    """Return what a `VerifiedRun` says of differences; nothing if there are none."""
    names = [*plain, *(name for name in got if name not in plain)]
    different = [name for name in names if not _same_bits(plain.get(name), got.get(name))]
    if not different:
        return {}
    name = different[0]
    return {
        "difference": name,
        "how": _how(plain.get(name), got.get(name)),
        "num_different": len(different),
    }


def _how(expected: Tensor | None, got: Tensor | None) -> str:
    if expected is None or got is None:
        return "missing" if got is None else "there, but plainly there is none"
    if expected.shape != got.shape or expected.dtype is not got.dtype:
        return f"{got.dtype} {tuple(got.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    of = f"{int((expected != got).sum()):,} of {expected.numel():,} elements"
    if not (got.is_floating_point() or got.is_complex()):
        return of
    wide = torch.complex128 if got.is_complex() else torch.float64
    apart, largest = (got.to(wide) - expected.to(wide)).abs().max(), expected.to(wide).abs().max()
    if not apart.isfinite():
        return f"{of}, {int((~got.isfinite()).sum()):,} of them not finite"
    return f"{of}, at most by {float(apart / largest):.2g} of the largest"


def describe_model(model: nn.Module) -> str:
    """Say what is trained, in a few words."""
    device = find_device([model]) or torch.device("cpu")
    number = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__} of {number:,} parameters on {device.type}"


# ---- What `ebbtide verify` names: the model of a script, or what a function returns ----


def verify_script(
    script: MainScript, options: RunOptions, steps: int, seeds: range
) -> VerifyReport:
    """Verify the first model that a script trains, with the first batch that it gives the model.

    The script runs until then. The steps are those of `verify`, with its loss and optimizer.

    Args:
        script: the script.
        options: how the model is offloaded.
        steps: training steps in each run.
        seeds: the seeds of the provocations.

    Raises:
        PolicyError: the script ends before it trains a model, or the model cannot be verified.
    """
    found = list[VerifyReport | Exception]()
    call = nn.Module.__call__

    def call_module(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_model = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        if not is_model or isinstance(self, DistributedDataParallel):  # the model is inside
            return call(self, *args, **kwargs)
        nn.Module.__call__ = call  # type: ignore[method-assign]
        batch = inspect.signature(self.forward).bind(*args, **kwargs)
        try:
            found.append(_verify_with(options, self, batch, None, steps, seeds))
        except Exception as error:  # which the script might catch
            found.append(error)
        raise SystemExit  # which no `except Exception` of the script catches

    nn.Module.__call__ = call_module  # type: ignore[method-assign]
    ending = ""
    try:
        script.run()
    except SystemExit:
        pass
    except Exception as error:
        ending = f": {type(error).__name__}: {error}"
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]
    if not found:
        raise PolicyError(
            f"{script.name} cannot be verified: it ended before it trained a model{ending}"
        )
    (report,) = found
    if isinstance(report, Exception):
        raise report
    return dataclasses.replace(report, what=f"{script.name}: {report.what}")


def verify_function(
    address: str, device: str | None, options: RunOptions, steps: int, seeds: range
) -> VerifyReport:
    """Verify the training step that a user's function returns.

    Args:
        address: the function, as ``module:function``.
        device: where it trains; None: where the function has put it.
        options: how the model is offloaded.
        steps: training steps in each run.
        seeds: the seeds of the provocations.
    """
    model, batch, loss, *_ = read_task(address, find_function(address)())
    if device is not None:
        model = model.to(device)
        batch = tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
    return _verify_with(options, model, batch, loss, steps, seeds)


def _verify_with(
    options: RunOptions, model: nn.Module, batch: Any, loss: Loss | None, steps: int, seeds: range
) -> VerifyReport:
    offload = options.arguments(model, frugal=False)
    if options.weights:
        offload["weights"] = WeightPolicy(min_bytes=1)
    return verify(
        model, batch, loss, steps=steps, offload=offload, orders=len(seeds), seed=seeds.start
    )
