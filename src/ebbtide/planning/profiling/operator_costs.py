"""How long an operator takes on a machine, from its FLOPs and the bytes that it moves.

[Note: roofline] An operator takes as long as its arithmetic at the machine's rate for that kind of
arithmetic, or as long as its inputs and outputs take to be read and written at the bandwidth of the
device's memory, whichever is longer. Arithmetic that is neither a matrix product, a convolution,
attention nor an FFT is taken to be free. An FFT in several dimensions passes through memory once
for each of them.

torch's own counter of FLOPs counts none for FFTs, and a quarter for products of complex matrices.

Not modelled: the time to launch a kernel, shapes that kernels are slow at, caches, rates of FFTs
and convolutions that differ by type, scattered access to memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ebbtide.errors import PolicyError
from ebbtide.planning.hardware import Hardware

aten = torch.ops.aten

_COMPLEX_FACTOR: Final = 4  # a complex multiplication and addition: four real ones of each

# Where the two factors are among the arguments.
_PRODUCTS: Final = {
    aten.mm: (0, 1),
    aten.bmm: (0, 1),
    aten.mv: (0, 1),
    aten.dot: (0, 1),
    aten.vdot: (0, 1),
    aten.addmm: (1, 2),
    aten.addmv: (1, 2),
    aten.baddbmm: (1, 2),
    aten.addbmm: (1, 2),
}
_ATTENTION: Final = frozenset(
    {
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
    }
)
_ATTENTION_BACKWARD: Final = frozenset(
    {
        aten._scaled_dot_product_flash_attention_backward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
        aten._scaled_dot_product_efficient_attention_backward,
        aten._scaled_dot_product_cudnn_attention_backward,
    }
)
_CONVOLUTIONS: Final = frozenset({aten.convolution, aten._convolution})
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


class Work(NamedTuple):
    """The arithmetic of one operator, by what it runs on.

    Attributes:
        matmul_flops: floating-point operations of matrix products, convolutions and attention.
        fft_flops: those of FFTs.
    """

    matmul_flops: float = 0.0
    fft_flops: float = 0.0


_NO_WORK: Final = Work()


def count_flops(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> Work:
    """Return the arithmetic of one call of an operator.

    Args:
        operator: an overload, such as ``torch.ops.aten.mm.default``.
        args: its positional arguments.
        kwargs: its other arguments.
        output: what it returned.
    """
    packet = operator.overloadpacket
    if packet in _PRODUCTS:
        first, second = (args[place] for place in _PRODUCTS[packet])
        return Work(_product_flops(first, second))
    if packet in _ATTENTION:
        return Work(_attention_flops(operator, args, kwargs, args[:3], (1, 1)))
    if packet in _ATTENTION_BACKWARD:
        # Five products: the scores again, the gradients of them and of the three inputs.
        return Work(_attention_flops(operator, args, kwargs, args[1:4], (3, 2)))
    if packet in _CONVOLUTIONS:
        return Work(_convolution_flops(args[0], args[1], output, transposed=args[6]))
    if packet is aten.convolution_backward:
        one = _convolution_flops(args[1], args[2], args[0], transposed=args[7])
        return Work(one * sum(args[10][:2]))  # by input and by weight
    if packet in _FFTS:
        return Work(0.0, _fft_flops(packet, args[0], args[1], output))
    return _NO_WORK


def _product_flops(first: Tensor, second: Tensor) -> float:
    """FLOPs of a product whose first factor has its rows' length as its last dimension."""
    columns = second.shape[-1] if second.dim() > 1 else 1
    factor = _COMPLEX_FACTOR if first.is_complex() or second.is_complex() else 1
    return 2.0 * factor * first.numel() * columns


def _convolution_flops(x: Tensor, weight: Tensor, y: Tensor, *, transposed: bool) -> float:
    """FLOPs of a convolution.

    Shape:
        x: (batch, in, *spatial).
        weight: (out, in / groups, *kernel), or (in, out / groups, *kernel) if transposed.
        y: (batch, out, *spatial).
    """
    applied = x if transposed else y  # each element of it meets one row of the weight
    return 2.0 * applied.numel() * math.prod(weight.shape[1:])


def _attention_flops(
    operator: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[Tensor],
    products: tuple[int, int],
) -> float:
    """FLOPs of attention. Causal attention over equal lengths computes half of its scores.

    Args:
        operator: the operator.
        args: its positional arguments.
        kwargs: its other arguments.
        inputs: query, key and value.
        products: how many products have the width of the query, and of the value.

    Shape:
        inputs: (batch, heads, length, width).
    """
    query, key, value = inputs
    scores: float = math.prod(query.shape[:-1]) * key.shape[-2]
    if query.shape[-2] == key.shape[-2] and _argument(operator, args, kwargs, "is_causal"):
        scores /= 2
    width = products[0] * query.shape[-1] + products[1] * value.shape[-1]
    return 2 * scores * width


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


@final
class OperatorCosts:
    """Tells how long operators take on one machine. See [Note: roofline].

    Args:
        hardware: the machine.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware

    def seconds(
        self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> float:
        """Return the seconds that one call of an operator takes.

        Args:
            operator: an overload, such as ``torch.ops.aten.mm.default``.
            args: its positional arguments.
            kwargs: its other arguments.
            output: what it returned.
        """
        traffic_bytes = count_traffic(operator, args, kwargs, output)
        if not traffic_bytes:
            return 0.0
        work = count_flops(operator, args, kwargs, output)
        moving_s = traffic_bytes / self._hardware.device_memory_bytes_per_s
        return max(moving_s, self._matmul_s(work, args), self._fft_s(work))

    def _matmul_s(self, work: Work, args: Sequence[Any]) -> float:
        if not work.matmul_flops:
            return 0.0
        dtype = next(arg.dtype for arg in args if isinstance(arg, Tensor))
        try:
            return work.matmul_flops / self._hardware.matmul_flops(dtype)
        except PolicyError:  # no figure for products of whole numbers
            return 0.0

    def _fft_s(self, work: Work) -> float:
        rate = self._hardware.fft_flops
        return work.fft_flops / rate if rate is not None else 0.0
