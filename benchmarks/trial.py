"""Run one task in one mode, such as training a model for some steps, and print its result.

`benchmarks.gpu` runs ``python -m benchmarks.trial '{"task": …, "mode": …, "device": …}'``. The last
line of the output is the result as JSON.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

import ebbtide
from benchmarks.copies import measure_link, moved_bytes
from benchmarks.models import Stack, fno, transformer
from benchmarks.modes import AbstractMode, Context, all_modes


@dataclass(frozen=True)
class Shape:
    """A model and its batch.

    Args:
        model: ``"transformer"``, ``"fno2d"`` or ``"fno3d"``.
        size: length of the sequence, or number of points along each side of the grid.
        batch: number of samples in a step.
        width: width of a transformer, or number of channels of an FNO.
        num_layers: number of blocks.
        modes: number of Fourier modes kept in each direction.
        precision: ``"bf16"`` (for weights too) or ``"fp32"``.
    """

    model: str
    size: int
    batch: int
    width: int
    num_layers: int
    modes: int = 16
    precision: str = "fp32"

    @property
    def dimensions(self) -> int:
        return 3 if self.model == "fno3d" else 2

    def build(self, device: torch.device) -> Stack:
        torch.manual_seed(0)
        # Billions of weights are drawn in seconds on a CPU, and at once on an accelerator.
        with device:
            if self.model == "transformer":
                model = transformer(self.num_layers, self.width, max(1, self.width // 128), 32_000)
            else:
                model = fno(self.width, self.modes, self.dimensions, self.num_layers)
        return model.to(dtype=torch.bfloat16) if self.precision == "bf16" else model

    def draw(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return an input and its target, whose values do not affect the timing."""
        generator = torch.Generator().manual_seed(0)
        if self.model == "transformer":
            size = (self.batch, self.size)
            x = torch.randint(32_000, size, generator=generator)
            return x.to(device), x.roll(-1, 1).to(device)
        size = (self.batch, 1, *[self.size] * self.dimensions)
        coarse = torch.randn(self.batch, 1, *[8] * self.dimensions, generator=generator)
        x = F.interpolate(coarse, size=size[2:], mode="nearest")
        return x.to(device), x.sin().to(device)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.model == "transformer":
            return F.cross_entropy(output.flatten(0, 1), target.flatten())
        return F.mse_loss(output, target)


class Trainer:
    """A model that trains in one mode.

    Args:
        shape: shape of the model and its batch.
        mode: how the model keeps what autograd saves.
        device: device on which it computes.
    """

    def __init__(self, shape: Shape, mode: AbstractMode, device: torch.device) -> None:
        self.device = device
        self.model = shape.build(device)
        self.context: Context = mode.attach(self.model)
        parameters = list(self.model.parameters())
        real = not any(parameter.is_complex() for parameter in parameters)
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=real, foreach=False)
        self._loss = shape.loss
        self._batch = shape.draw(device)

    def step(self) -> Tensor:
        x, target = self._batch
        with self.context():
            loss = self._loss(self.model(x), target)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def main() -> None:
    """Run the task that the argument describes and print the result."""
    request = json.loads(sys.argv[1])
    if "import" in request:
        importlib.import_module(request["import"])
    device = torch.device(request["device"])
    mode = _mode(request)
    missing = mode.missing(device)
    if missing is not None:
        print(json.dumps({"skipped": missing}))
        return
    if device.type == "cpu":
        torch.set_num_threads(request.get("threads", torch.get_num_threads()))
    if request["task"] == "link":
        answer = measure_link(request["size_bytes"], request["steps"], device)
    elif request["task"] == "capacity":
        answer = _run_capacity(request, device)
    else:
        task = {"steps": _run_steps, "overhead": _run_overhead}[request["task"]]
        answer = task(request, mode, device)
    print(json.dumps(answer))


def _mode(request: dict[str, Any]) -> AbstractMode:
    mode = all_modes()[request["mode"]]
    if "min_bytes" in request:
        mode.move_from(request["min_bytes"])
    if "plain_peak_bytes" in request:
        mode.fit_below(request["plain_peak_bytes"])
    return mode


# ---- steps --------------------------------------------------------------------------------------


def _run_steps(request: dict[str, Any], mode: AbstractMode, device: torch.device) -> dict[str, Any]:
    shape = Shape(**request["shape"])
    try:
        trainer = Trainer(shape, mode, device)
        losses: list[Tensor] = []
        first = _measure_steps(trainer, request["warmup"] + mode.settling_steps, losses)
        measured = _measure_steps(trainer, request["steps"], losses)
        moved = moved_bytes(trainer.step, device)
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).splitlines()[0]}
    except ebbtide.BudgetError as error:
        return {"refused": str(error).splitlines()[0]}
    return {
        "step_s": statistics.median(measured["samples_s"]),
        "peak_bytes": max(measured["peaks_bytes"]),
        "reserved_peak_bytes": max(measured["reserved_peaks_bytes"]),
        **measured,
        "first_steps": first,
        "host_peak_rss_bytes": _peak_rss_bytes(),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "losses": [float(loss).hex() for loss in losses],
        "mode": mode.figures(),
        **moved,
    }


def _measure_steps(trainer: Trainer, steps: int, losses: list[Tensor]) -> dict[str, list[Any]]:
    """Return the seconds of each step, and the most bytes in use and reserved at once in each.

    On an accelerator, events on the device measure the time, and a budget bounds what is reserved;
    each call of its driver that allocates or frees memory is counted, as each waits for the device.
    On a CPU, both kinds of bytes are the peak RSS so far less the RSS before the steps.
    """
    seconds: list[float] = []
    peaks_bytes: list[int] = []
    reserved_bytes: list[int] = []
    driver_calls: list[int] = []
    if trainer.device.type == "cpu":
        before_bytes = psutil.Process().memory_info().rss
        for _ in range(steps):
            begin_s = time.perf_counter()
            losses.append(trainer.step())
            seconds.append(time.perf_counter() - begin_s)
            peaks_bytes.append(max(0, _peak_rss_bytes() - before_bytes))
        reserved_bytes = peaks_bytes
    else:
        for _ in range(steps):
            torch.accelerator.reset_peak_memory_stats()
            calls_before = _driver_calls()
            begin, end = (torch.Event(trainer.device, enable_timing=True) for _ in range(2))
            begin.record()
            losses.append(trainer.step())
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
            driver_calls.append(_driver_calls() - calls_before)
            peaks_bytes.append(int(torch.accelerator.max_memory_allocated()))
            reserved_bytes.append(int(torch.accelerator.max_memory_reserved()))
    return {
        "samples_s": seconds,
        "peaks_bytes": peaks_bytes,
        "reserved_peaks_bytes": reserved_bytes,
        "driver_calls": driver_calls,
    }


def _driver_calls() -> int:
    """Return how often torch's allocator has asked the accelerator's driver for memory so far."""
    stats = torch.accelerator.memory_stats()
    return int(stats.get("num_device_alloc", 0)) + int(stats.get("num_device_free", 0))


def _peak_rss_bytes() -> int:
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


# ---- capacity -----------------------------------------------------------------------------------


def _run_capacity(request: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Find the largest value of one field of the shape that trains within a memory limit."""
    field, step, most = request["field"], request["multiple"], request["most"]
    if device.type != "cpu":
        limit_memory = getattr(
            torch.get_device_module(device), "set_per_process_memory_fraction", None
        )
        if limit_memory is None:
            return {"skipped": f"torch.{device.type} cannot limit the memory of a process"}
        _, total_bytes = torch.accelerator.get_memory_info()
        limit_memory(min(1.0, request["limit_bytes"] / total_bytes), device)
    tried: dict[int, bool] = {}

    def trains(count: int) -> bool:
        value = count * step
        if value not in tried:
            fields = {**request["shape"], field: value}
            tried[value] = _trains(Shape(**fields), _mode(request), device)
        return tried[value]

    largest = largest_that(trains, most // step)
    return {"largest": largest * step, "tried": tried}


def largest_that(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest count up to ``most`` for which ``holds`` is true; 0 if there is none.

    ``holds`` must be true for all smaller counts too.
    """
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def _trains(shape: Shape, mode: AbstractMode, device: torch.device) -> bool:
    """Return whether two steps fit into memory; free their memory in either case."""
    trainer = None
    try:
        trainer = Trainer(shape, mode, device)
        for _ in range(2):
            trainer.step()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        fits = True
    except (torch.OutOfMemoryError, ebbtide.StoreFullError):
        fits = False
    del trainer
    gc.collect()
    if device.type != "cpu":
        with contextlib.suppress(RuntimeError):
            torch.accelerator.empty_cache()
    return fits


# ---- overhead -----------------------------------------------------------------------------------


def _run_overhead(
    request: dict[str, Any], mode: AbstractMode, device: torch.device
) -> dict[str, Any]:
    """Measure the host time of a forward and backward that save many small tensors."""
    from benchmarks.overhead import Chain

    chain = Chain(request["tensors"], "activation", 16).to(device)
    model = Stack(torch.nn.Identity(), [chain], torch.nn.Identity())
    context = mode.attach(model)
    seconds = []
    for _ in range(request["warmup"] + request["steps"]):
        x = torch.ones(16, device=device, requires_grad=True)
        gc.collect()
        gc.disable()
        begin_s = time.perf_counter()
        with context():
            out = model(x)
        out.backward(torch.ones_like(out))
        seconds.append(time.perf_counter() - begin_s)
        gc.enable()
        if device.type != "cpu":
            torch.accelerator.synchronize()
    seconds = seconds[request["warmup"] :]
    return {"step_s": statistics.median(seconds), "samples_s": seconds}


def request(task: str, mode: str, device: str, shape: Shape | None = None, **more: Any) -> str:
    """Return the command-line argument of a trial."""
    fields = {"task": task, "mode": mode, "device": device, **more}
    if shape is not None:
        fields["shape"] = asdict(shape)
    return json.dumps(fields)


if __name__ == "__main__":
    main()
