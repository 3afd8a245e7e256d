"""Profiles a training step with fake tensors: no memory, no accelerator, no arithmetic.

What can be rebuilt is what `ebbtide.runtime.rebuild.find_recipe` finds in training, too. Whether a
recipe gives the same bits is known only once it has run; where it does not, the engine keeps the
storage or offloads it.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import dataclasses
import functools
import operator
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Final, NamedTuple, TypeVar, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from ebbtide.devices.hardware import Hardware
from ebbtide.errors import PolicyError
from ebbtide.observe.inspection import InspectedStorage
from ebbtide.observe.passes import Positions, RecordedCall
from ebbtide.planning.contest import rule_plans
from ebbtide.planning.prediction import StepTiming
from ebbtide.planning.profile import LayerProfile, StepProfile
from ebbtide.planning.recorded import (
    profile_recorded_step,
    with_weight_bytes,
)
from ebbtide.policy import DEFAULT_MIN_BYTES, refuse
from ebbtide.runtime.handles import Saved, pass_through, restore
from ebbtide.runtime.parameter_index import ParameterIndex
from ebbtide.runtime.rebuild import find_recipe
from ebbtide.runtime.record import MOST_STEPS
from ebbtide.runtime.torch_internals import (
    FakeTensorMode,
    TorchDispatchMode,
    current_node,
    in_backward,
    sequence_number,
    tree_leaves,
    tree_map_only,
)
from ebbtide.tools.models import call_model, default_loss
from ebbtide.tools.roofline import operator_seconds, strided_tensors
from ebbtide.tools.verify import kept_random_numbers
from ebbtide.weights.model_weights import WeightBytes

# ---- Which part of a step runs, and which storages are alive in it ----


class Part(NamedTuple):
    """A part of a step: the forward or the backward of a layer, or of what comes right after it.

    Attributes:
        backward: whether it is the backward.
        layer: index of the layer; -1 for what comes before the first one. One more than that of
            the last layer stands for the loss, once the model's forward has ended.
        inside: whether it is the layer itself, and not what comes after it.
    """

    backward: bool
    layer: int
    inside: bool


START: Final = Part(backward=False, layer=-1, inside=False)


@final
class StorageLedger:
    """Numbers the storages of a step and notes when each is allocated and freed.

    Attributes:
        sizes: sizes in bytes of all storages that there ever were, by key.
        part: the part of the step that runs now.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.part = START
        # A part begins (no key), or a storage comes, or goes (less than 0 bytes).
        self._entries: list[tuple[Part, int | None, int]] = [(START, None, 0)]
        self._alive: dict[int, tuple[int, Any]] = {}  # key and weak reference, by address

    def enter(self, part: Part) -> None:
        """Note that a part of the step runs from now on."""
        if part != self.part:
            self.part = part
            self._entries.append((part, None, 0))

    def key_of(self, tensor: Tensor) -> int:
        """Return the key of a tensor's storage, which is noted as allocated if it is new."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        known = self._alive.get(address)
        if known is not None:
            return known[0]
        key, size_bytes = len(self.sizes), storage.nbytes()
        self.sizes.append(size_bytes)
        # The reference's callback runs when the storage itself is freed, so an address that comes
        # back is never taken for the storage that had it before.
        self._alive[address] = key, weakref.ref(storage, functools.partial(self._free, address))
        self._entries.append((self.part, key, size_bytes))
        return key

    def known_key_of(self, tensor: Tensor) -> int | None:
        """Return the key of a tensor's storage; None if it has none yet."""
        known = self._alive.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[0]

    def _free(self, address: int, _: object) -> None:
        key, _reference = self._alive.pop(address)
        self._entries.append((self.part, key, -self.sizes[key]))

    def peaks(self, without: Set[int]) -> dict[Part, int]:
        """Return the most bytes that were alive in each part of the step.

        Args:
            without: keys of storages that do not count.
        """
        live_bytes = 0
        peaks: dict[Part, int] = {}
        for part, key, size_bytes in self._entries:
            if key is None or key not in without:
                live_bytes += size_bytes
            peaks[part] = max(peaks.get(part, 0), live_bytes)
        return peaks


# ---- Notes which layer's call runs during a forward, and what it gets as input ----


@final
class LayerCalls:
    """Numbers the calls of layers in a forward and tells which of them a backward node belongs to.

    [Note: nodes of layers] Autograd numbers the nodes of a graph in the order in which the forward
    makes them. So the number of a node that runs in backward tells which part of the forward has
    made it.

    Args:
        ledger: is told which part of the step runs.

    Attributes:
        calls: the calls so far: the name of the module, and the keys of its inputs' storages.
        changing: indices of the calls that changed an input in place. A second forward would find
            other values.
    """

    def __init__(self, ledger: StorageLedger) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.changing: set[int] = set()
        self._ledger = ledger
        # The calls that run, by their indices, with their input tensors and the versions of these.
        self._open: list[tuple[int, list[tuple[Tensor, int]]]] = []
        self._begins = [0]  # the first node of each part of the forward
        self._parts = [START]
        self._end_number = 0

    def hook(self, model: nn.Module, names: Iterable[str]) -> None:
        """Hook the layers of a model, for good.

        Args:
            model: a copy of the model, which is used once.
            names: names of the modules whose calls count.
        """
        for name in names:
            module = model.get_submodule(name)
            begin = functools.partial(self._begin, name)
            module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._end, always_call=True)

    def _begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        if in_backward():
            return  # a checkpoint computes the layer again
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        keys = dict.fromkeys(self._ledger.key_of(tensor) for tensor in tensors)
        self._open.append((len(self.calls), [(tensor, tensor._version) for tensor in tensors]))
        self.calls.append((name, tuple(keys)))
        self._enter()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        if self._open and not in_backward():
            index, inputs = self._open.pop()
            if any(tensor._version != version for tensor, version in inputs):
                self.changing.add(index)
            self._enter()

    def _enter(self) -> None:
        inside = bool(self._open)
        self._begin_part(self._open[-1][0] if inside else len(self.calls) - 1, inside=inside)

    def _begin_part(self, layer: int, *, inside: bool) -> None:
        part = Part(backward=False, layer=layer, inside=inside)
        self._begins.append(sequence_number())
        self._parts.append(part)
        self._ledger.enter(part)

    @property
    def open(self) -> Sequence[int]:
        """Indices of the calls that run now in the forward, the outermost first."""
        return [index for index, _ in self._open]

    def end_forward(self) -> None:
        """Note that the model's forward has ended, and the loss begins."""
        self._begin_part(len(self.calls), inside=False)

    @property
    def is_in_forward(self) -> bool:
        """Whether the model's forward has not ended."""
        return self._parts[-1].layer < len(self.calls)

    def close(self) -> None:
        """Note that the loss has ended. Nodes made from now on are no layer's."""
        self._end_number = sequence_number()

    def part_of(self, node_number: int) -> Part | None:
        """Return the part of the backward that a node belongs to.

        Args:
            node_number: the number that autograd gave to the node.

        Returns:
            The part; None for nodes that no forward made, such as those that accumulate gradients.
        """
        if node_number >= self._end_number:
            return None
        forward = self._parts[bisect.bisect_right(self._begins, node_number) - 1]
        return forward._replace(backward=True)


# ---- Copies of tensors that have no memory: shapes, types and shared storages, but no values ----


def fake_copies(
    mode: FakeTensorMode, model: nn.Module, batch: Any, meta_as: torch.device
) -> tuple[nn.Module, Any]:
    """Return copies of a model and of its batch, whose parameters, buffers and tensors are fake.

    Tensors that share a storage get copies that share one. Whatever the copy's code stores in its
    attributes, the model itself stays as it is.

    Args:
        mode: the mode that makes fake tensors.
        model: the model.
        batch: nested containers of tensors.
        meta_as: the device that tensors on the meta device are taken to be on, so that a model that
            was built there can be profiled.

    Raises:
        PolicyError: a parameter has no shape yet, or is no plain tensor, or the model or a part of
            it cannot be copied.
    """
    copies: dict[int, tuple[Tensor, Tensor]] = {}  # with the original, by its id
    storages: dict[tuple[int, torch.dtype], Tensor] = {}

    def make(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        place = storage._cdata, tensor.dtype
        device = meta_as if tensor.device.type == "meta" else tensor.device
        with mode, torch.no_grad():
            if place not in storages:
                count = storage.nbytes() // tensor.itemsize
                storages[place] = torch.empty(count, dtype=tensor.dtype, device=device)
            view = storages[place].as_strided(
                tensor.shape, tensor.stride(), tensor.storage_offset()
            )
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(view.detach(), requires_grad=tensor.requires_grad)
        return view.detach().requires_grad_(tensor.requires_grad)

    def copied(tensor: Tensor, name: str = "a tensor of batch") -> Tensor:
        if id(tensor) not in copies:
            if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
                raise PolicyError(
                    f"{name} is a {type(tensor).__name__} of layout {tensor.layout}, which cannot "
                    f"be profiled with fake tensors; profile before the model is sharded, "
                    f"quantized or compiled"
                )
            copies[id(tensor)] = make(tensor), tensor
        return copies[id(tensor)][0]

    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise PolicyError(  # a copy of it shares its parameters
            f"{type(model).__name__} contains a script module, which cannot be copied to run with "
            f"fake tensors; plan for the model before torch.jit scripts or traces a part of it"
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise PolicyError(f"{name} has no shape yet; run the model once, then profile it")
        copied(tensor, name)
    # What is in the memo is not copied but replaced.
    memo = {address: fake for address, (fake, _) in copies.items()}
    fake_model = copy.deepcopy(model, memo)
    return fake_model, tree_map_only(Tensor, copied, batch)


# ---- One training step of a copy of a model with fake tensors, whose storages are followed ----

Batch = Any
"""What a model is called with: see `ebbtide.tools.models.call_model`."""

Loss = Callable[[Any], Tensor]
"""Computes the loss from what the model returns."""


@final
class FakeStep(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A step that runs once, with fake tensors, on a copy of a model. It sees each operator.

    The model and its gradients stay as they are, and so do random number generators.

    Args:
        model: the model; it may be on the meta device.
        batch: what the model is called with.
        hardware: the machine whose seconds are estimated.
        layers: names of the modules whose calls are layers.

    Attributes:
        model: the copy.
        device: the device that the model is on, or is taken to be on.
        ledger: follows the storages.
        calls: numbers the calls of layers.
        state: keys of the storages of parameters and buffers.
        inputs: keys of all storages that there were before the step: those and the batch.
        seconds: seconds of the operators in each part of the step.
        owners: the index of the layer that first read each parameter in the forward, by key; -1 if
            that was outside layers.

    Raises:
        PolicyError: the model cannot be copied.
    """

    def __init__(
        self, model: nn.Module, batch: Batch, hardware: Hardware, layers: Iterable[str] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._trained, self._hardware = model, hardware
        self.device = _device_of(model)
        with explained(model):
            self.model, self._arguments = fake_copies(self._fake_mode, model, batch, self.device)
        self.ledger = StorageLedger()
        tensors = [*self.model.parameters(), *self.model.buffers()]
        leaves = tree_leaves((tensors, self._arguments))
        self.inputs = {self.ledger.key_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        self.state = {self.ledger.key_of(tensor) for tensor in tensors}
        self.calls = LayerCalls(self.ledger)
        self.calls.hook(self.model, layers)
        self.seconds: dict[Part, float] = {}
        self.owners: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator and note what it costs."""
        kwargs = kwargs or {}
        self._follow_backward()
        part = self.ledger.part
        if not part.backward:
            for tensor in strided_tensors((args, kwargs)):
                key = self.ledger.known_key_of(tensor)
                if key in self.state:
                    self.owners.setdefault(key, part.layer if part.inside else -1)
        output = operator(*args, **kwargs)
        for tensor in strided_tensors(output):
            self.ledger.key_of(tensor)
        took_s = operator_seconds(self._hardware, operator, args, kwargs, output)
        part = self.ledger.part
        self.seconds[part] = self.seconds.get(part, 0.0) + took_s
        return output

    def _follow_backward(self) -> None:
        if not in_backward():
            return
        node: Any = current_node()
        part = None if node is None else self.calls.part_of(node._sequence_nr())
        if part is not None:
            self.ledger.enter(part)
        elif not self.ledger.part.backward:  # the gradient of the loss itself
            self.ledger.enter(self.ledger.part._replace(backward=True))

    def run(
        self,
        loss: Loss | None,
        pack: Callable[[Tensor], Any] = pass_through,
        unpack: Callable[[Any], Tensor] = restore,
    ) -> None:
        """Run the forward, the loss and the backward.

        Args:
            loss: computes the loss from what the model returns.
            pack: what becomes of each tensor that autograd saves.
            unpack: returns what was packed.

        Raises:
            PolicyError: the model cannot run with fake tensors, or there is no loss of one number
                that depends on parameters.
        """
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        with contextlib.ExitStack() as stack:
            mode, explains = self._fake_mode, explained(self._trained)
            for block in (kept_random_numbers(), torch.enable_grad(), explains, mode, self):
                stack.enter_context(block)
            with hooks:
                # Training loops hold the output during backward.
                output = call_model(self.model, self._arguments)
                self.calls.end_forward()
                value: Any = default_loss(output, _real_sum) if loss is None else loss(output)
            self.calls.close()
            if not isinstance(value, Tensor) or not value.requires_grad or value.numel() != 1:
                refuse("what loss returns", "one number that depends on the parameters", value)
            value.backward()  # type: ignore[no-untyped-call]

    @property
    def gradients(self) -> list[tuple[int, int]]:
        """Keys of the storages of each parameter that has a gradient, and of the gradient."""
        key_of = self.ledger.key_of
        trained = (each for each in self.model.parameters() if each.grad is not None)
        return [(key_of(each), key_of(each.grad)) for each in trained if each.grad is not None]

    def peaks(self) -> dict[Any, int]:
        """Return the most bytes alive in each part of the step, but for gradients of parameters."""
        return self.ledger.peaks({gradient for _, gradient in self.gradients})


def _device_of(model: nn.Module) -> torch.device:
    """Return the device that a model's tensors are on, or are taken to be on."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")


@contextlib.contextmanager
def explained(model: nn.Module) -> Iterator[None]:
    """Turn what goes wrong while the model runs into a `PolicyError`."""
    try:
        yield
    except PolicyError:
        raise
    except Exception as error:
        raise PolicyError(
            f"{type(model).__name__} could not be copied and trained for a step with fake tensors, "
            f"which have no values ({type(error).__name__}: {error}). If the step runs with real "
            f"tensors, ebbtide.offload(model, budget=...) plans the model from its first one"
        ) from error


def _real_sum(output: Tensor) -> Tensor:
    """Make a number of a tensor of which nothing is saved."""
    return output.sum().real


# ---- Records the storages that autograd saves in a forward ----


@final
class SavedStorages:
    """Records the storages that autograd saves in a forward, through its pack hook.

    Args:
        step: the step; storages of its parameters and buffers, and what is on another device, do
            not count.
        min_bytes: smaller storages do not count.

    Attributes:
        min_bytes: as given, and at least 1.
    """

    def __init__(self, step: FakeStep, min_bytes: int) -> None:
        self._step, self._ledger = step, step.ledger
        self._parameters = ParameterIndex([step.model])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of addresses, which fake tensors do not have
            self._parameters.refresh()
        self.min_bytes = max(min_bytes, 1)
        # For each storage, by key, its number in each place that saved it, as the engine counts.
        self._numbers: dict[int, dict[int, int]] = {}
        self._counts: Counter[int] = Counter()
        self._sources: dict[int, tuple[int, ...]] = {}  # what one can be rebuilt from
        self._depths: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Saved:
        """Note a tensor that autograd saves. This is the pack hook.

        What the loss saves behind the model's forward is seen by no engine, and stays.
        """
        if not self._counts_as_saved(tensor):
            return pass_through(tensor)
        key, part = self._ledger.key_of(tensor), self._ledger.part
        if self._step.calls.is_in_forward:
            if key not in self._numbers:
                self._find_recipe(tensor, key)
            place = part.layer if part.inside else ~(part.layer + 1)  # see `Scope.place`
            numbers = self._numbers.setdefault(key, {})
            if place not in numbers:
                counted = max(place, -1)  # outside layers, one count goes on
                numbers[place] = self._counts[counted]
                self._counts[counted] += 1
        return pass_through(tensor)

    def _counts_as_saved(self, tensor: Tensor) -> bool:
        if tensor.device != self._step.device or tensor.layout is not torch.strided:
            return False
        whole = tensor if tensor._base is None else tensor._base
        if max(tensor.nbytes, whole.nbytes) < self.min_bytes or not tensor.nbytes:
            return False
        if self._ledger.known_key_of(tensor) in self._step.state:
            return False
        return not self._parameters.owns(tensor, 0)  # a fake tensor has no address

    def _find_recipe(self, tensor: Tensor, key: int) -> None:
        """Find how a storage can be rebuilt, at its first save.

        Parameters and small tensors, which are in memory in any case, are no sources.
        """
        found = find_recipe(tensor, tensor.untyped_storage())
        output = tensor if tensor._base is None else tensor._base
        if found is None or not output.is_contiguous():
            return
        tensors = [saved[0] for saved in found[1] if isinstance(saved, tuple)]
        keys = map(self._ledger.known_key_of, tensors)
        sources = tuple(dict.fromkeys(each for each in keys if each in self._numbers))
        depth = 1 + max((self._depths.get(source, 0) for source in sources), default=0)
        if sources and depth <= MOST_STEPS:
            self._sources[key], self._depths[key] = sources, depth

    def _name_of(self, key: int) -> tuple[int | None, int]:
        """Return the layer and number of a storage's first save."""
        place, number = next(iter(self._numbers[key].items()))
        return (place if place >= 0 else None), number

    def records(self) -> Iterator[InspectedStorage]:
        """Yield what is on record of each storage, in the order of the first saves."""
        for key, numbers in self._numbers.items():
            layer, number = self._name_of(key)
            sources = map(self._name_of, self._sources.get(key, ()))
            stays = key in self._step.inputs  # the loop holds the batch
            yield InspectedStorage(
                layer=layer,
                name="",
                microbatch=0,
                number=number,
                size_bytes=self._ledger.sizes[key],
                moved_bytes=0,
                decision="keep" if stays else "offload",
                tier="-",
                rebuilt_from=tuple(sources),
                saves=len(numbers),
                numbers=tuple(numbers.items()),
                offloaded_s=None,
                reloaded_s=None,
            )

    def calls(self) -> Iterator[RecordedCall]:
        """Yield what is on record of the layers' calls."""
        known, step = self._numbers, self._step
        for index, (name, inputs) in enumerate(step.calls.calls):
            # What is there before the step and not saved, such as the batch, is fixed.
            keys = [key for key in inputs if key in known or key not in step.inputs]
            source = self._name_of(keys[0]) if len(keys) == 1 and keys[0] in known else None
            input_bytes = sum(self._ledger.sizes[key] for key in keys)
            changes = index in step.calls.changing
            yield RecordedCall(name, input_bytes, None if changes else source)

    def fixed_bytes(self) -> int:
        """Return the size of what is there before the step, and is none of what is saved."""
        return sum(self._ledger.sizes[key] for key in self._step.inputs - self._numbers.keys())


# ---- Layer calls that run again in the backward of a step with fake tensors ----
#
# What is alive then is found by running the step so. A second forward has its own output and the
# gradient of the first one's beside what it saves, and a forward that saves nothing needs less than
# one that does: neither follows from a step in which everything is kept.


def recompute_calls(step: FakeStep, names: Iterable[str], recomputed: Set[int]) -> None:
    """Have calls of layers run again in the backward of a step.

    Args:
        step: the step.
        names: names of the layers.
        recomputed: which calls run again. What is inside one of these runs again with it.
    """
    for name in names:
        module = step.model.get_submodule(name)
        module.forward = functools.partial(_forward, module.forward, step.calls, recomputed)


def _forward(
    forward: Callable[..., Any],
    calls: LayerCalls,
    recomputed: Set[int],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    opened = calls.open
    if not opened or opened[-1] not in recomputed or not recomputed.isdisjoint(opened[:-1]):
        return forward(*args, **kwargs)

    def run(others: dict[str, Any], *given: Any) -> Any:
        return forward(*given, **others)

    # There are no random numbers to bring back.
    return checkpoint(run, kwargs, *args, use_reentrant=False, preserve_rng_state=False)


# ---- Adds seconds, weights and working memory to the profile of what was recorded ----

Value = TypeVar("Value", int, float)


@final
class StepAssembly:
    """Puts together the profile of one step.

    Args:
        step: the step, which has run.
        saved: what autograd saved.
        hardware: the machine.
        optimizer_states: number of tensors of the weights' size that the optimizer keeps.

    Raises:
        PolicyError: no layer was called.
    """

    def __init__(
        self, step: FakeStep, saved: SavedStorages, hardware: Hardware, optimizer_states: int
    ) -> None:
        self._hardware = hardware
        weights = _weights(step, optimizer_states)
        self._outer = weights.pop(None, WeightBytes(0, 0, 0))  # what no layer has
        self._recorded = with_weight_bytes(
            profile_recorded_step(
                saved.records(), list(saved.calls()), hardware, min_bytes=saved.min_bytes
            ),
            {name: sizes for name, sizes in weights.items() if name is not None},
            hardware,
        )
        self._positions = Positions(self._recorded)
        layers = list(self._recorded.layers)
        for call in step.calls.changing:  # how it would run again is not known here
            index = self._positions.calls[call]
            layers[index] = dataclasses.replace(layers[index], may_recompute=False)
        self._recorded = dataclasses.replace(self._recorded, layers=tuple(layers))
        self._count = self._positions.loss
        self._seconds = self._gather(step.seconds, operator.add)
        self._peaks = self._gather(step.peaks(), max)
        # Resident throughout, but for gradients and optimizer state.
        self._always_bytes = saved.fixed_bytes()

    def _position(self, part: Part) -> int:
        """Return the position of a part: see [Note: positions] in `planning.profile`.

        -1 is what comes before the first pass, and one more than all is what comes after the last.
        """
        what = "forward" if part.inside else "after"
        index = 0 if self._recorded.layers[0].between else -1
        if part.layer >= len(self._positions.calls):
            index = self._count
        elif part.layer >= 0:
            index = self._positions.position(what, part.layer) or 0
        return 2 * self._count - index if part.backward else index

    def _gather(
        self, values: Mapping[Part, Value], combine: Callable[[Value, Value], Value]
    ) -> dict[int, Value]:
        """Return one value for each position that has any, from those of its parts."""
        found: dict[int, Value] = {}
        for part, value in values.items():
            position = self._position(part)
            found[position] = combine(found[position], value) if position in found else value
        return found

    def with_recomputation(self, profile: StepProfile, again: FakeStep) -> StepProfile:
        """Return a profile that predicts what a step needed that recomputed its layers.

        Args:
            profile: the step in which everything was kept.
            again: a step in which all layers that may be recomputed were, and kept their inputs.
        """
        # Gradients and optimizer state are there throughout.
        added_bytes = self._outer.gradient_bytes + self._outer.optimizer_bytes
        added_bytes += sum(each.shadow_bytes for each in profile.layers)
        peaks = self._gather(again.peaks(), max)
        seconds = self._gather(again.seconds, operator.add)
        plan = dict(rule_plans(profile))["recompute all"]
        predicted = StepTiming(profile, self._hardware).predict(plan).peak_by_position
        more_bytes = [
            peaks.get(position, 0) + added_bytes - expected
            for position, expected in enumerate(predicted)
        ]

        def recomputed(index: int, layer: LayerProfile) -> LayerProfile:
            if not layer.may_recompute:
                return layer
            backward = 2 * self._count - index
            again_s = seconds.get(backward, 0.0) - self._seconds.get(backward, 0.0)
            unsaved_bytes = profile.inside_bytes(index) + layer.forward_working_bytes
            second_bytes = layer.second_working_bytes + more_bytes[backward]
            return dataclasses.replace(
                layer,
                recompute_s=max(0.0, again_s),
                unsaved_forward_bytes=max(0, unsaved_bytes + more_bytes[index]),
                recompute_working_bytes=max(0, second_bytes),
            )

        layers = tuple(recomputed(index, layer) for index, layer in enumerate(profile.layers))
        return dataclasses.replace(profile, layers=layers)

    def profile(self) -> StepProfile:
        """Return the profile of the step as it ran."""
        before, loss, after = -1, self._count, 2 * self._count + 1
        layers, saved_bytes = [], 0
        for index, layer in enumerate(self._recorded.layers):
            saved_bytes += sum(each.size_bytes for each in layer.storages if not each.same_as)
            layers.append(self._measured(index, layer, saved_bytes))
        update_bytes = sum(each.update_bytes for each in layers) + _update_bytes(self._outer)
        update_s = update_bytes / self._hardware.device_memory_bytes_per_s
        fixed_bytes = self._always_bytes - sum(each.weight_bytes for each in layers)
        return dataclasses.replace(
            self._recorded,
            layers=tuple(layers),
            fixed_bytes=fixed_bytes + self._outer.gradient_bytes + self._outer.optimizer_bytes,
            before_s=self._seconds.get(before, 0.0),
            loss_s=self._seconds.get(loss, 0.0),
            after_s=self._seconds.get(after, 0.0) + update_s,
            before_working_bytes=self._working_bytes(before, 0),
            loss_working_bytes=self._working_bytes(loss, saved_bytes),
            after_working_bytes=self._working_bytes(after, 0),
        )

    def _working_bytes(self, position: int, resident_bytes: int) -> int:
        """Return the peak of a position above what is resident.

        Args:
            position: the position.
            resident_bytes: what is resident beside what always is.
        """
        return max(0, self._peaks.get(position, 0) - self._always_bytes - resident_bytes)

    def _measured(self, index: int, layer: LayerProfile, saved_bytes: int) -> LayerProfile:
        """Return a layer with its seconds and its working memory.

        Args:
            index: its index.
            layer: what is on record of it.
            saved_bytes: what is saved by the end of its forward.
        """
        forward, backward = index, 2 * self._count - index
        missing_bytes = 0 if layer.input_same_as is not None else layer.input_bytes
        return dataclasses.replace(
            layer,
            forward_s=self._seconds.get(forward, 0.0),
            backward_s=self._seconds.get(backward, 0.0),
            forward_working_bytes=self._working_bytes(forward, saved_bytes + missing_bytes),
            backward_working_bytes=self._working_bytes(backward, saved_bytes),
        )


def _weights(step: FakeStep, optimizer_states: int) -> dict[str | None, WeightBytes]:
    """Return what the weights occupy, by the layer that reads them first; None: by no layer."""
    gradient_bytes: Counter[int] = Counter()
    for key, gradient in step.gradients:
        gradient_bytes[key] += step.ledger.sizes[gradient]
    found: dict[str | None, WeightBytes] = {}
    for key in {step.ledger.key_of(each) for each in step.model.parameters()}:
        owner = step.owners.get(key, -1)
        name = None if owner < 0 else step.calls.calls[owner][0]
        weight_bytes, own_bytes = step.ledger.sizes[key], gradient_bytes[key]
        added = weight_bytes, own_bytes, optimizer_states * own_bytes
        found[name] = WeightBytes(*map(sum, zip(found.get(name, (0, 0, 0)), added, strict=True)))
    return found


def _update_bytes(parameters: WeightBytes) -> int:
    """Return the bytes that an update reads and writes, as `LayerProfile.update_bytes`."""
    return 3 * parameters.gradient_bytes + 2 * parameters.optimizer_bytes


# ---- Profiles a training step with fake tensors: no memory, no accelerator, no arithmetic ----
#
# [Note: fake profile] The step runs on tensors without values. Operators are seen one by one, so
# the bytes that autograd saves and the bytes that are alive at any time are those of a real step.
# Seconds are estimates: see [Note: roofline] in `ebbtide.tools.roofline`.
#
# - What is saved, shared and can be rebuilt is put together as of a real step; see [Note: recorded
#   profile] in `ebbtide.planning.recorded`. Work between layers that saves something is a layer of
#   its own, other such work counts with the layer before it.
# - What is too small to be offloaded counts as working memory of all passes in which it is alive.
# - A parameter belongs to the layer whose call reads it first; others count as fixed.
# - Gradients count as there throughout the step.
# - A pass's working memory is the peak of what is alive in it, less what a plan that keeps
#   everything has resident then: see [Note: positions] in `ebbtide.planning.profile`. That of a
#   recomputed layer's passes is found in a second step, in which all layers that may be
#   recomputed are.
#
# Not modelled: workspaces inside operators, rounding by the allocator, what a fused optimizer
# allocates, storages that are saved again after they were changed in place, recipes that do not
# give the same bits here, views that are gathered before they are offloaded (their storage counts
# whole), layers inside a reentrant checkpoint or another `torch.autograd.Function`, whose backward
# counts with what comes before it.


def profile_with_fake_tensors(
    model: nn.Module,
    batch: Batch,
    hardware: Hardware,
    *,
    layers: Sequence[str],
    loss: Loss | None = None,
    min_bytes: int = DEFAULT_MIN_BYTES,
    optimizer_states: int = 2,
) -> StepProfile:
    """Profile one training step of a model without running it. See [Note: fake profile].

    The model and its gradients stay as they are, and so do random number generators. The model may
    be on the meta device; it is then taken to be on the CPU.

    Args:
        model: the model, in training mode if its training is meant.
        batch: what the model is called with: a tuple or list of positional arguments, a mapping of
            arguments by name, or else one argument. Only shapes and types matter.
        hardware: the machine whose seconds are estimated.
        layers: names of the modules whose calls are layers, in model order.
        loss: computes the loss from what the model returns; may use tensors that it closes over.
            None means the attribute ``loss`` of what the model returns, or else the sum of all
            floating-point tensors in it.
        min_bytes: the same as the policy's; smaller storages are not numbered.
        optimizer_states: tensors of the weights' size that the optimizer keeps: 2 for Adam, 1 for
            SGD with momentum, 0 for plain SGD.

    Returns:
        The profile.

    Raises:
        PolicyError: no layer was called, or the model cannot run with fake tensors because its code
            looks at values.
    """
    # Many arguments: a step has that many parts, and most of them have defaults.
    step = FakeStep(model, batch, hardware, layers)
    saved = SavedStorages(step, min_bytes)
    step.run(loss, saved.pack)
    assembly = StepAssembly(step, saved, hardware, optimizer_states)
    profile = assembly.profile()
    again = FakeStep(model, batch, hardware, layers)
    recompute_calls(again, layers, set(range(len(step.calls.calls))) - step.calls.changing)
    try:
        again.run(loss)
    except PolicyError:  # what cannot run again here is not planned to
        layers_once = (dataclasses.replace(each, may_recompute=False) for each in profile.layers)
        return dataclasses.replace(profile, layers=tuple(layers_once))
    return assembly.with_recomputation(profile, again)
