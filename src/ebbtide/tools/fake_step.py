"""One training step with fake tensors: which storages are alive when, and what operators cost."""

from __future__ import annotations

import bisect
import contextlib
import copy
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import flop_registry

from ebbtide.errors import PolicyError
from ebbtide.planning.hardware import Hardware
from ebbtide.policy import refuse
from ebbtide.runtime.handles import pass_through, restore
from ebbtide.runtime.torch_internals import (
    FakeTensorMode,
    TorchDispatchMode,
    current_node,
    in_backward,
    sequence_number,
    tree_leaves,
    tree_map_only,
)
from ebbtide.tools.verify import call_model, default_loss, note_random_numbers


class Part(NamedTuple):
    """A part of a step: the forward or the backward of a layer, or of what comes right after it.

    Attributes:
        backward: whether it is the backward.
        layer: index of the layer; -1 for what comes before the first one.
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


# ---- How long an operator takes on a machine, from its FLOPs and the bytes that it moves ----
#
# [Note: roofline] An operator takes as long as its arithmetic at the machine's rate for that kind
# of arithmetic, or as long as its inputs and outputs take to be read and written at the bandwidth
# of the device's memory, whichever is longer. Arithmetic that is neither a matrix product, a
# convolution, attention nor an FFT is taken to be free. An FFT in several dimensions passes
# through memory once for each of them.
#
# torch's own counter of FLOPs is asked. It counts none for FFTs, a quarter for products of complex
# matrices, all scores of causal attention, and in a backward no groups of a convolution.
#
# Not modelled: the time to launch a kernel, shapes that kernels are slow at, caches, rates of FFTs
# and convolutions that differ by type, scattered access to memory.

aten = torch.ops.aten

_COMPLEX_FACTOR: Final = 4  # a complex multiplication and addition: four real ones of each

_CPU_ATTENTION: Final = {  # of which torch's counter of FLOPs does not know
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}
_FFTS: Final = frozenset({aten._fft_r2c, aten._fft_c2r, aten._fft_c2c})
_ALLOCATES: Final = frozenset(
    {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
)
_ONLY_WRITES: Final = frozenset(  # the first argument gives the shape, or is overwritten
    {
        aten.zeros_like,
        aten.ones_like,
        aten.full_like,
        aten.new_zeros,
        aten.new_ones,
        aten.new_full,
        aten.copy_,
        aten.fill_,
        aten.zero_,
    }
)
_LOOKS_UP: Final = frozenset(  # of the first argument only as much is read as comes out
    {aten.embedding, aten.index, aten.index_select, aten.gather}
)


def count_flops(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
) -> tuple[float, float]:
    """Return the arithmetic of one call of an operator.

    Args:
        operator: an overload, such as ``torch.ops.aten.mm.default``.
        args: its positional arguments.
        kwargs: its other arguments.
        output: what it returned.

    Returns:
        Floating-point operations of matrix products, convolutions and attention, and those of FFTs.
    """
    packet = operator.overloadpacket
    if packet in _FFTS:
        return 0.0, _fft_flops(packet, args[0], args[1], output)
    if packet is aten.convolution_backward:
        forward = args[1], args[2], None, *args[4:10]
        one = flop_registry[aten.convolution](*forward, out_val=args[0])
        return float(one * sum(args[10][:2])), 0.0  # by input and by weight
    known = _CPU_ATTENTION.get(packet, packet)
    if known not in flop_registry:
        return 0.0, 0.0
    flops = flop_registry[known](*args, **kwargs, out_val=output)
    if any(isinstance(each, Tensor) and each.is_complex() for each in args):
        flops *= _COMPLEX_FACTOR
    return flops * _attended(operator, args, kwargs), 0.0


def _attended(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return the share of the scores that attention computes: half if it is causal."""
    if not _argument(operator, args, kwargs, "is_causal"):
        return 1.0
    query, key = args[1:3] if "backward" in str(operator) else args[:2]
    return 0.5 if query.shape[-2] == key.shape[-2] else 1.0


def _argument(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == name:
            default = kwargs.get(name, argument.default_value)
            return args[place] if place < len(args) else default
    return None


def _fft_flops(packet: Any, x: Tensor, dims: Sequence[int], y: Tensor) -> float:
    """FLOPs of FFTs: 5 n log2 n for each complex signal of n values, and half for a real one."""
    signals = y if packet is aten._fft_c2r else x  # of a real signal, the real side has all values
    length = math.prod(signals.shape[dim] for dim in dims)
    if length < 2:
        return 0.0
    factor = 5.0 if packet is aten._fft_c2c else 2.5
    return factor * signals.numel() * math.log2(length)


def count_traffic(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
) -> int:
    """Return the bytes that one call of an operator reads and writes. Views move none.

    Args:
        operator: an overload, such as ``torch.ops.aten.mm.default``.
        args: its positional arguments.
        kwargs: its other arguments.
        output: what it returned.
    """
    packet = operator.overloadpacket
    outputs = _tensors(output)
    if not outputs or packet in _ALLOCATES:
        return 0
    inputs = _tensors((args, kwargs))
    written = sum(map(_distinct_bytes, outputs))
    if not operator._schema.is_mutable:
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        if all(tensor.untyped_storage()._cdata in known for tensor in outputs):
            return 0
    read = sum(map(_distinct_bytes, inputs))
    if inputs and packet in _ONLY_WRITES:
        read -= _distinct_bytes(inputs[0])
    elif inputs and packet in _LOOKS_UP:
        read -= max(0, _distinct_bytes(inputs[0]) - written)
    elif packet in _FFTS:
        return read + written + _fft_passes_bytes(args[0], args[1], outputs[0])
    return read + written


def _fft_passes_bytes(x: Tensor, dims: Sequence[int], y: Tensor) -> int:
    """Bytes that an FFT moves beside its input and output: the spectrum, once for each more dim.

    An FFT along one dimension reads and writes everything once, if a signal fits on the chip.
    """
    spectrum = x if x.is_complex() else y
    return 2 * (len(dims) - 1) * _distinct_bytes(spectrum)


def _tensors(values: Any) -> list[Tensor]:
    return [
        leaf
        for leaf in tree_leaves(values)
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided
    ]


def _distinct_bytes(tensor: Tensor) -> int:
    """Return the size of a tensor's elements; those of an expanded one count once."""
    pairs: Iterable[tuple[int, int]] = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size if stride else min(size, 1) for size, stride in pairs) * tensor.itemsize


def operator_seconds(
    hardware: Hardware,
    operator: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    output: Any,
) -> float:
    """Return the seconds that one call of an operator takes on a machine. See [Note: roofline].

    Args:
        hardware: the machine.
        operator: an overload, such as ``torch.ops.aten.mm.default``.
        args: its positional arguments.
        kwargs: its other arguments.
        output: what it returned.
    """
    traffic_bytes = count_traffic(operator, args, kwargs, output)
    if not traffic_bytes:
        return 0.0
    matmul_flops, fft_flops = count_flops(operator, args, kwargs, output)
    longest_s = traffic_bytes / hardware.device_memory_bytes_per_s
    if matmul_flops:
        dtype = next(arg.dtype for arg in args if isinstance(arg, Tensor))
        # There is no figure for products of whole numbers.
        with contextlib.suppress(PolicyError):
            longest_s = max(longest_s, matmul_flops / hardware.matmul_flops(dtype))
    if hardware.fft_flops is not None:
        longest_s = max(longest_s, fft_flops / hardware.fft_flops)
    return longest_s


# ---- Notes which layer's call runs during a forward, and what it gets as input ----


class LayerCall(NamedTuple):
    """One call of a layer.

    Attributes:
        name: qualified name of the module.
        inputs: keys of the storages of its input tensors.
        tensors: the input tensors with their versions, while the call runs.
    """

    name: str
    inputs: tuple[int, ...]
    tensors: list[tuple[Tensor, int]]


@final
class LayerCalls:
    """Numbers the calls of layers in a forward and tells which of them a backward node belongs to.

    [Note: nodes of layers] Autograd numbers the nodes of a graph in the order in which the forward
    makes them. So the number of a node that runs in backward tells which part of the forward has
    made it.

    Args:
        ledger: is told which part of the step runs.

    Attributes:
        calls: the calls so far.
        changing: indices of the calls that changed an input in place. A second forward would find
            other values.
    """

    def __init__(self, ledger: StorageLedger) -> None:
        self.calls: list[LayerCall] = []
        self.changing: set[int] = set()
        self._ledger = ledger
        self._open: list[int] = []
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
        self._open.append(len(self.calls))
        versions = [(tensor, tensor._version) for tensor in tensors]
        self.calls.append(LayerCall(name, tuple(keys), versions))
        self._enter()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        if self._open and not in_backward():
            index = self._open.pop()
            tensors = self.calls[index].tensors
            if any(tensor._version != version for tensor, version in tensors):
                self.changing.add(index)
            tensors.clear()
            self._enter()

    def _enter(self) -> None:
        inside = bool(self._open)
        layer = self._open[-1] if inside else len(self.calls) - 1
        part = Part(backward=False, layer=layer, inside=inside)
        self._begins.append(sequence_number())
        self._parts.append(part)
        self._ledger.enter(part)

    @property
    def open(self) -> Sequence[int]:
        """Indices of the calls that run now in the forward, the outermost first."""
        return self._open

    def close(self) -> None:
        """Note that the forward and the loss have ended. Nodes made from now on are no layer's."""
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
"""What a model is called with: see `ebbtide.tools.verify.call_model`."""

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
            for tensor in _tensors((args, kwargs)):
                key = self.ledger.known_key_of(tensor)
                if key in self.state:
                    self.owners.setdefault(key, part.layer if part.inside else -1)
        output = operator(*args, **kwargs)
        for tensor in _tensors(output):
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
            stack.callback(note_random_numbers(()))
            for block in (torch.enable_grad(), explained(self._trained), self._fake_mode, self):
                stack.enter_context(block)
            with hooks:
                # Training loops hold the output during backward.
                output = call_model(self.model, self._arguments)
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
