"""Measures what a device computes: matrix products, copies in its memory, FFTs, fresh pages."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable

import torch

from ebbtide.devices.device import AbstractDevice
from ebbtide.doctor.sampling import Sample, sample
from ebbtide.units import format_size

_LONG_ENOUGH_S = 0.03  # of one repetition: then the start of a kernel does not count
_SMALLEST, _LARGEST = 256, 8192  # rows of the matrices
_COPY_BYTES = {True: 128 * 2**20, False: 512 * 2**20}  # by whether the device is the CPU
_LEAST_COPY_BYTES = 32 * 2**20  # smaller tensors are copied within caches
_TOUCH_BYTES = 64 * 2**20  # more than malloc ever serves from memory that it has
_FFT_NODES = 256
_CHANNELS = 32


def measure_matmul(
    device: AbstractDevice, dtype: torch.dtype, budget_s: float, room_bytes: int
) -> Sample:
    """Measure products of square matrices, as large as time and memory allow."""
    begin_s = time.perf_counter()
    size = _SMALLEST
    while True:
        # Random numbers: a GPU that multiplies equal ones needs less power, and runs faster.
        left = torch.rand(size, size, device=device.torch_device).to(dtype)
        right = torch.roll(left, 1)
        out = torch.empty_like(left)
        multiply = functools.partial(_multiply, device, left, right, out)
        once_s = min(_time(multiply) for _ in range(3))
        too_large = size == _LARGEST or 3 * 4 * left.nbytes > room_bytes
        # Larger matrices take eight times as long, four times here and more after. What counts is
        # how fast they are: other programs may have held up the loop until now.
        if once_s > _LONG_ENOUGH_S or too_large or 4 * 8 * once_s > budget_s:
            left_s = budget_s - (time.perf_counter() - begin_s)
            return sample(2.0 * size**3, multiply, left_s, note=f"n = {size}")
        size *= 2


def _multiply(
    device: AbstractDevice, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor
) -> None:
    torch.mm(left, right, out=out)
    finish(device)


def measure_tf32(device: AbstractDevice, budget_s: float, room_bytes: int) -> Sample:
    """Measure products of float32 in TF32. The program's setting is put back."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return measure_matmul(device, torch.float32, budget_s, room_bytes)
    finally:
        torch.set_float32_matmul_precision(before)


def measure_copy(device: AbstractDevice, budget_s: float, room_bytes: int) -> Sample:
    """Measure a copy within the device's memory, in bytes read and written.

    Raises:
        MemoryError: so little memory is free that the copy would stay in caches.
    """
    size_bytes = min(_COPY_BYTES[device.computes_on_host], room_bytes // 2)
    if size_bytes < _LEAST_COPY_BYTES:
        raise MemoryError(
            f"copies of {format_size(size_bytes)} stay in caches, and too little memory is free "
            f"for larger ones; end other programs and measure again"
        )
    source = device.allocate(size_bytes).fill_(1)
    target = torch.ones_like(source)

    def copy() -> None:
        target.copy_(source)
        finish(device)

    return sample(2.0 * size_bytes, copy, budget_s, note=format_size(size_bytes))


def measure_fft(device: AbstractDevice, budget_s: float, room_bytes: int) -> Sample:
    """Measure 2D FFTs of real float32 fields as an FNO has them, in FLOP of 2.5 n log2 n."""
    channels = _CHANNELS
    while channels > 1 and 3 * channels * _FFT_NODES**2 * 4 > room_bytes:
        channels //= 2
    field = torch.ones(channels, _FFT_NODES, _FFT_NODES, device=device.torch_device)

    def transform() -> None:
        torch.fft.rfft2(field)
        finish(device)

    nodes = _FFT_NODES**2
    amount = 2.5 * channels * nodes * math.log2(nodes)
    note = f"{channels} x {_FFT_NODES} x {_FFT_NODES}"
    return sample(amount, transform, budget_s, note=note)


def measure_fresh_memory(budget_s: float, room_bytes: int) -> tuple[Sample, Sample]:
    """Measure how fast memory of the host is written the first time, and then again.

    The difference is the cost of page faults, which every large tensor on a CPU pays.
    """
    size_bytes = min(_TOUCH_BYTES, room_bytes)
    again_s: list[float] = []

    def touch() -> float:
        memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        first_s = _time(lambda: memory.fill_(1))
        again_s.append(_time(lambda: memory.fill_(2)))
        return first_s

    first = sample(size_bytes, touch, budget_s, most=10, note=format_size(size_bytes))
    return first, Sample(size_bytes, tuple(again_s[1:]), format_size(size_bytes))


def finish(device: AbstractDevice) -> None:
    """Block until the device has done what was queued on its compute stream."""
    device.compute_stream().record().synchronize()


def _time(work: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    work()
    return max(time.perf_counter() - begin_s, 1e-9)
