"""Measure copies between host and device: the link's bandwidths, and what a step moves."""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# ---- what a step moves --------------------------------------------------------------------------


def moved_bytes(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Return the bytes that copies between host and device move in a step, whoever starts them.

    They come from the profiler's record of copies, so that all modes are counted in the same way.
    Where torch's profiler has no such record, the operators that copy are counted.
    """
    if device.type == "cpu":
        return {"down_bytes": None, "up_bytes": None}
    if device.type != "cuda":
        with CountingCopies(device.type) as counting:
            step()
        torch.accelerator.synchronize()
        return {"down_bytes": counting.down_bytes, "up_bytes": counting.up_bytes}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.accelerator.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    moved = {"down_bytes": 0, "up_bytes": 0, "down_s": 0.0, "up_s": 0.0}
    for event in events:
        for way, name in (("down", "Memcpy DtoH"), ("up", "Memcpy HtoD")):
            if str(event.get("name", "")).startswith(name):
                moved[f"{way}_bytes"] += int(event.get("args", {}).get("bytes", 0))
                moved[f"{way}_s"] += float(event.get("dur", 0)) / 1e6
    return moved


class CountingCopies(TorchDispatchMode):
    """Counts the bytes that operators copy between host and device within the block.

    Autograd's threads take the mode over from the thread that calls backward. Copies that other
    threads start are not counted.

    Attributes:
        down_bytes: bytes copied from the device.
        up_bytes: bytes copied to it.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.down_bytes = self.up_bytes = 0
        self._device_type = device_type

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket
        if name in (torch.ops.aten.copy_, torch.ops.aten._to_copy):
            source = args[0] if name is torch.ops.aten._to_copy else args[1]
            self._count(result, source)
        elif name is torch.ops.aten._foreach_copy_:
            for target, source in zip(args[0], args[1], strict=True):
                self._count(target, source)
        return result

    def _count(self, target: Tensor, source: Tensor) -> None:
        to_device, from_device = (x.device.type == self._device_type for x in (target, source))
        if to_device and not from_device:
            self.up_bytes += target.nbytes
        elif from_device and not to_device:
            self.down_bytes += source.nbytes


# ---- link ---------------------------------------------------------------------------------------


def measure_link(size_bytes: int, steps: int, device: torch.device) -> dict[str, Any]:
    """Measure bandwidths between host and device, and the cost of page-locked memory.

    Args:
        size_bytes: size of each copy.
        steps: number of copies of which the median counts.
        device: the device at the other end of the link.
    """
    results: dict[str, Any] = {"size_bytes": size_bytes}
    near = [torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    for kind in ("pageable", "pinned"):
        pinned = kind == "pinned" and device.type != "cpu"
        far = [torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        down, up = (far[0], near[0]), (near[1], far[1])
        for way, copies in (("down", [down]), ("up", [up]), ("both", [down, up])):
            seconds = _time_copies(copies, device, steps)
            results[f"{kind}_{way}_bytes_per_s"] = len(copies) * size_bytes / seconds
        del far
    results["pinning_s_per_gib"] = _pinning_costs(device, size_bytes)
    return results


def _time_copies(copies: list[tuple[Tensor, Tensor]], device: torch.device, times: int) -> float:
    """Return the median seconds for copies that run side by side, each on a stream of its own."""
    seconds = []
    streams = [torch.Stream(device) for _ in copies] if device.type != "cpu" else []
    for _ in range(times + 1):
        begin_s = time.perf_counter()
        for number, (target, source) in enumerate(copies):
            with streams[number] if streams else contextlib.nullcontext():
                target.copy_(source, non_blocking=True)
        for stream in streams:
            stream.synchronize()
        seconds.append(time.perf_counter() - begin_s)
    return statistics.median(seconds[1:])


def _pinning_costs(device: torch.device, size_bytes: int) -> dict[str, float]:
    """Return the seconds per GiB that each method takes to allocate page-locked memory."""
    if device.type == "cpu":
        return {}
    from ebbtide.devices.accelerator import AcceleratorDevice
    from ebbtide.stores.host_memory import allocate_host_memory

    accelerator = AcceleratorDevice(device)

    def by_ebbtide() -> None:
        memory = allocate_host_memory(accelerator, size_bytes)
        assert memory.refusal is None
        memory.give_back()

    def by_torch() -> None:
        torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def by_torch_from_pageable() -> None:
        torch.zeros(size_bytes, dtype=torch.uint8).pin_memory()

    methods = {
        "ebbtide, mapped and registered": by_ebbtide,
        "torch, pin_memory=True": by_torch,
        "torch, zeros().pin_memory()": by_torch_from_pageable,
    }
    if accelerator.pins_by_torch:  # it cannot page-lock memory that exists already
        del methods["ebbtide, mapped and registered"]
    costs = {}
    for name, method in methods.items():
        begin_s = time.perf_counter()
        method()
        costs[name] = (time.perf_counter() - begin_s) / (size_bytes / 2**30)
    return costs
