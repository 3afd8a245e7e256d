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
import random
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from ebbtide.api import offload as offload_model
from ebbtide.devices.device import AbstractDevice
from ebbtide.devices.provoked import Provocation, ProvokedDevice
from ebbtide.errors import PolicyError
from ebbtide.policy import ActivationPolicy, refuse
from ebbtide.runtime.engine import devices_made_by, make_device
from ebbtide.runtime.module_state import note_random_numbers
from ebbtide.runtime.parameter_index import find_device
from ebbtide.runtime.stats import StepStats
from ebbtide.runtime.torch_internals import tree_leaves
from ebbtide.units import count, format_size
from ebbtide.version import __version__

Loss = Callable[[Any], Tensor]
Values = dict[str, Tensor | None]
"""Copies on the host of what a run computed, by name, in the order in which a run computes them."""

_SEED: Final = 1234  # of the random numbers that the steps begin with
_ATTEMPTS: Final = 5  # of a run whose disk was full
_TIGHT_BYTES: Final = 1  # whatever is larger is alone in flight
_INDENT: Final = 10
_KINDS: Final = "losses, gradients, parameters, buffers, random states"


@final
@dataclasses.dataclass(frozen=True)
class Difference:
    """The first value in which a run differs from the plain one.

    Attributes:
        name: what it is, such as ``step 1: gradient of blocks.3.weight``.
        layer: the module that it belongs to, with its class; "" for a loss or random numbers.
        how: by how much it differs, in words.
        num_different: how many values differ, this one included.
    """

    name: str
    layer: str
    how: str
    num_different: int


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifiedRun:
    """One offloaded run.

    Attributes:
        seed: repeats the run alone; None for the run in which nothing was provoked.
        name: what was provoked, in words.
        order: the order of execution of a device that has several; "" for others.
        difference: from the plain run; None: the same bits.
        error: what the run raised; "" if nothing.
        moved_bytes: offloaded, rebuilt, recomputed, and weights reloaded.
    """

    seed: int | None
    name: str
    order: str = ""
    difference: Difference | None = None
    error: str = ""
    moved_bytes: int = 0

    @property
    def is_same(self) -> bool:
        """Whether the run ended, with the results of the plain one."""
        return self.difference is None and not self.error

    def __str__(self) -> str:
        """Say which run it was, and how it differs."""
        words = "nothing provoked" if self.seed is None else f"seed {self.seed} ({self.name})"
        words += f", order {self.order}" if self.order else ""
        found = self.difference
        if found is None:
            return f"{words}, raised {self.error}" if self.error else words
        layer = f" in {found.layer}" if found.layer else ""
        return (
            f"{words}, in {found.name}{layer}: {found.how}; and in {found.num_different - 1} other "
            f"values"
        )


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
        begin = {"format": "ebbtide-verify", "version": 1, "same": self.same}
        return begin | dataclasses.asdict(self) | {"line": self.line}

    def __str__(self) -> str:
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
        return "\n".join(_laid_out(*row) for row in (rows | {"paste": self.line}).items())


def _laid_out(label: str, text: str) -> str:
    begin = f"{label:<{_INDENT}}"
    return textwrap.fill(
        text, 80, initial_indent=begin, subsequent_indent=" " * _INDENT, max_lines=5
    )


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
    memory is overwritten as soon as it is free, prefetches come in any order, few bytes may be in
    flight, page-locking is refused, the disk is slow or full. Losses, gradients, parameters,
    buffers and the states of random numbers are compared to the bit. The model is left as it was.
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
    put_back = note_random_numbers([trial.device])
    try:
        seeds = range(seed, seed + orders)
        return verify_runs(trial.run, seeds, steps=steps)
    finally:
        trial.restore()
        trial.give_back_gradients()
        put_back()


@final
@dataclasses.dataclass
class Outcome:
    """What came of one run of the training steps.

    Attributes:
        what: what ran: the model, its parameters, its device.
        values: what is compared.
        layers: for the names of parameters and buffers, the modules that they belong to.
        order: the order of execution of the device, if it has several.
        moved_bytes: as of `VerifiedRun`.
    """

    what: str = ""
    values: Values = dataclasses.field(default_factory=dict)
    layers: dict[str, str] = dataclasses.field(default_factory=dict)
    order: str = ""
    moved_bytes: int = 0

    def note_moved(self, stats: StepStats) -> None:
        """Count what moved in a step."""
        self.moved_bytes += stats.offloaded_bytes + stats.rebuilt_bytes
        self.moved_bytes += stats.recomputed_bytes + stats.weight_reload_bytes


Run = Callable[[bool, Provocation | None, bool], Outcome]
"""Runs the training steps from the same beginning each time.

It is told whether they are offloaded, what is provoked, and whether kernels are deterministic.
"""


def verify_runs(
    run: Run,
    seeds: range,
    *,
    steps: int,
    draw: Callable[[int], Provocation] = Provocation.draw,
) -> VerifyReport:
    """Run training steps plainly, and offloaded under provocations.

    Args:
        run: runs the steps.
        seeds: the seeds of the provocations.
        steps: how many steps a run has.
        draw: returns what a seed provokes.

    Raises:
        PolicyError: the model cannot be offloaded like this, or the plain steps give NaN, or
            others each time.
    """
    first = run(False, None, False)
    plain, layers = first.values, first.layers
    difference = _compare(plain, run(False, None, False).values, layers)
    deterministic = difference is not None
    if deterministic:
        plain = run(False, None, True).values
        difference = _compare(plain, run(False, None, True).values, layers)
    if difference is not None:
        raise PolicyError(
            f"the plain steps differ from run to run, by deterministic kernels, too: "
            f"{difference.name}, {difference.how}; give the model the same numbers each time, and "
            f"leave out operators of which torch warns that they have no deterministic kernel"
        )
    for name, value in plain.items():
        if value is not None and value.is_floating_point() and value.isnan().any():
            raise PolicyError(
                f"the plain steps give NaN ({name}), which would hide differences; verify with a "
                f"batch, a loss or an optimizer that gives finite numbers"
            )
    runs = list[VerifiedRun]()
    for number in (None, *seeds):
        provocation = None if number is None else draw(number)
        what = "nothing" if provocation is None else provocation.name
        error, found = "", Outcome()
        try:
            found = run(True, provocation, deterministic)
        except (PolicyError, ImportError):
            if runs and runs[-1].error:
                break  # what went wrong has kept the model from being detached
            raise
        except Exception as raised:
            first_line = str(raised).partition("\n")[0]
            error = f"{type(raised).__name__}: {first_line}"
        difference = None
        if not error:
            difference = _compare(plain, found.values, layers)
        verified = VerifiedRun(
            seed=number, name=what, order=found.order, difference=difference, error=error,
            moved_bytes=found.moved_bytes,
        )  # fmt: skip
        runs.append(verified)
    python = ".".join(map(str, sys.version_info[:3]))
    return VerifyReport(
        what=first.what,
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
        self._inputs = [leaf for leaf in tree_leaves(self.batch) if _wants_gradient(leaf)]
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

    def run(self, offloaded: bool, provocation: Provocation | None, deterministic: bool) -> Outcome:
        """Run the steps; a `Run`."""
        outcome = Outcome(what=describe_model(self.model), layers=layers_of([self.model]))
        with deterministic_kernels(deterministic):
            if offloaded:
                outcome.order = choose_order(self.device, provocation)
                self._train_offloaded(outcome, provocation)
            else:
                self.train(outcome)
        return outcome

    def _train_offloaded(self, outcome: Outcome, provocation: Provocation | None) -> None:
        """Run all steps offloaded, on a device that is provoked.

        Raises:
            OSError: the disk was not full any more, but a forward still says so.
        """
        arguments = dict(self.offload)
        is_planned = arguments.get("budget") is not None or arguments.get("plan") is not None
        if provocation is not None and provocation.is_tight and not is_planned:
            policy = arguments.get("activations") or ActivationPolicy()
            arguments["activations"] = dataclasses.replace(policy, max_inflight_bytes=_TIGHT_BYTES)
        devices = list[AbstractDevice]()

        def make(torch_device: torch.device) -> AbstractDevice:
            devices.append(provoked_device(torch_device, provocation, is_planned=is_planned))
            return devices[-1]

        def end_step() -> None:
            outcome.note_moved(engine.stats)
            if provocation is not None and provocation.shuffles:
                engine.expect_any_order(choices)
            if provocation is not None and provocation.verifies:
                engine.forget_proofs()

        self.restore()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pageable memory, for example, which was provoked
            with devices_made_by(make) as engines:
                handle = offload_model(self.model, **arguments)
            engine = engines[0]
            with handle:
                for attempt in range(1, _ATTEMPTS + 1):
                    choices = random.Random(0 if provocation is None else provocation.seed)
                    outcome.moved_bytes = 0
                    try:
                        self.train(outcome, end_step=end_step)
                        break
                    except OSError as error:
                        if error.errno != errno.ENOSPC or attempt == _ATTEMPTS:
                            raise
                    for device in devices:
                        if isinstance(device, ProvokedDevice):
                            device.is_calm = True

    def train(
        self,
        outcome: Outcome,
        context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        end_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Run all steps, and copy what is compared.

        Args:
            outcome: gets the values.
            context: surrounds the forwards and backwards of each step.
            end_step: called after each step.
        """
        self.restore()
        seed_all()
        optimizer = self.optimizer([p for p in self.model.parameters() if p.requires_grad])
        values = outcome.values = {}
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
        values.update(random_states(self.device))


def provoked_device(
    torch_device: torch.device, provocation: Provocation | None, *, is_planned: bool
) -> AbstractDevice:
    """Make the device that an engine of a run computes on; see `devices_made_by`.

    Args:
        torch_device: torch's device.
        provocation: what is provoked on it; None: nothing.
        is_planned: whether a plan decides. A budget on a CPU is of the process's memory, where a
            simulated device has none, so there is none then.
    """
    device = make_device(torch_device)
    if provocation is None:
        return device
    if is_planned:
        provocation = dataclasses.replace(provocation, eagerness=None)
    return provocation.wrap(device)


def seed_all() -> None:
    """Begin all random numbers of this process anew."""
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(_SEED)


def random_states(device: torch.device) -> Values:
    """Return the states of all random numbers, as tensors."""
    states: Values = {"random state of the CPU": torch.get_rng_state()}
    if device.type != "cpu":
        state = torch.get_device_module(device).get_rng_state(device)
        states[f"random state of {device.type}"] = state
    numbers = list(random.getstate()[1])
    states["random state of Python"] = torch.tensor([n - 2**31 for n in numbers])
    if "numpy" in sys.modules:
        keys = sys.modules["numpy"].random.get_state(legacy=False)["state"]["key"]
        states["random state of NumPy"] = torch.tensor(keys.astype("int64"))
    return states


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def _wants_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_leaf and leaf.requires_grad


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with one argument, a tuple or list of them, or a mapping of them by name."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _mean_square(output: Tensor) -> Tensor:
    real = torch.view_as_real(output) if output.is_complex() else output.float()
    return real.square().mean()


def default_loss(output: Any, reduce: Callable[[Tensor], Tensor] = _mean_square) -> Tensor:
    """Return the loss of a model that was given none: its attribute ``loss``, or a sum.

    Args:
        output: what the model has returned.
        reduce: makes one number of each tensor in it that depends on a parameter.

    Raises:
        PolicyError: there is no such tensor.
    """
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    outputs = [
        reduce(leaf)
        for leaf in tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not outputs:
        raise PolicyError("the model returns no tensor that depends on a parameter; give loss=")
    return torch.stack(outputs).sum() if len(outputs) > 1 else outputs[0]


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


def _compare(plain: Values, got: Values, layers: Mapping[str, str]) -> Difference | None:
    """Return the first difference; None if there is none."""
    names = [*plain, *(name for name in got if name not in plain)]
    different = [name for name in names if not _same_bits(plain.get(name), got.get(name))]
    if not different:
        return None
    name = different[0]
    layer = layers.get(name.rpartition(" ")[2], "")
    return Difference(name, layer, _how(plain.get(name), got.get(name)), len(different))


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


def layers_of(models: Iterable[nn.Module]) -> dict[str, str]:
    """Return for the names of parameters and buffers the modules that they belong to."""
    return {
        f"{path}.{name}" if path else name: f"{path or 'the model'} ({type(module).__name__})"
        for model in models
        for path, module in model.named_modules()
        for name in (*module._parameters, *module._buffers)
    }


def describe_model(model: nn.Module) -> str:
    """Say what is trained, in a few words."""
    device = find_device([model]) or torch.device("cpu")
    number = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__} of {number:,} parameters on {device.type}"
