"""How long an operator takes on a machine, from its FLOPs and the bytes that it moves."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ebbtide.devices.hardware import Hardware
from ebbtide.errors import PolicyError
from ebbtide.runtime.torch_internals import tree_leaves

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
    names = (argument.name for argument in operator._schema.arguments)
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    if not given.get("is_causal"):  # it is False by itself in all of torch's
        return 1.0
    return 0.5 if given["query"].shape[-2] == given["key"].shape[-2] else 1.0


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
    outputs = strided_tensors(output)
    if not outputs or packet in _ALLOCATES:
        return 0
    inputs = strided_tensors((args, kwargs))
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


def strided_tensors(values: Any) -> list[Tensor]:
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
