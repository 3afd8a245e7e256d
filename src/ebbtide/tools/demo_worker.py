"""The work of one mode of the demo, in a process of its own: train, and measure."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import ebbtide
from ebbtide.handle import record_run
from ebbtide.observe.run_record import RunRecord
from ebbtide.stores.measured_memory import AbstractMemory, DeviceMemory, ProcessMemory
from ebbtide.tools import darcy_fno
from ebbtide.tools.demo_config import WARM_RESOLUTION, DemoConfig, FinalResult, Mode, StepResult

_SAMPLE_EVERY_S = 0.005


@contextlib.contextmanager
def sampled(memory: AbstractMemory) -> Iterator[list[tuple[float, int]]]:
    """Sample memory from a thread while the block runs.

    Yields:
        Pairs of seconds since the block began and bytes in use, one every 5 ms; the list grows.
    """
    samples: list[tuple[float, int]] = []
    over = threading.Event()
    begin_s = time.perf_counter()

    def sample() -> None:
        while not over.wait(_SAMPLE_EVERY_S):
            samples.append((time.perf_counter() - begin_s, memory.now_bytes()))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


# ---- The worker process of one mode, which does one piece of work per turn ----

_trainer: ModeTrainer  # of this process, since `start`


def start(config: DemoConfig, mode: Mode) -> None:
    """Build the model of this process, and attach ebbtide if the mode uses it."""
    global _trainer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _trainer = ModeTrainer(config, mode)


def prepare(weights: darcy_fno.Weights) -> Prepared:
    """Call `ModeTrainer.prepare` in this process."""
    return _trainer.prepare(weights)


def step() -> StepResult:
    """Call `ModeTrainer.step` in this process."""
    return _trainer.step()


def finish() -> FinalResult:
    """Call `ModeTrainer.finish` in this process."""
    return _trainer.finish()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@final
@dataclass(frozen=True)
class Prepared:
    """Reports that data and weights are loaded and one-time allocations are made.

    Attributes:
        idle_bytes: number of bytes in use now, the idle level.
        peak_is_per_step: whether peaks of memory can be measured for each step.
    """

    idle_bytes: int
    peak_is_per_step: bool


@final
class ModeTrainer:
    """Trains the model of one mode and measures it."""

    def __init__(self, config: DemoConfig, mode: Mode) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        if config.device.type != "cpu":
            _compute_reproducibly(config.device)
        warnings.filterwarnings("ignore", message=".*_skip", category=UserWarning)
        self._config = config
        self._model = darcy_fno.build_model(config)
        self._mode = mode
        self._handle = _offload(self._model, mode, config)
        self._memory: AbstractMemory
        if config.device.type == "cpu":
            self._memory = ProcessMemory()
        else:
            self._memory = DeviceMemory(config.device)

    def prepare(self, weights: darcy_fno.Weights) -> Prepared:
        """Load data and weights, then run forward and backward once on a tiny grid.

        The run creates thread pools, FFT plans and code pages, so that they count as idle memory
        in every mode.
        """
        config, model = self._config, self._model
        for name, value in model.named_parameters():
            value.data.copy_(torch.from_numpy(weights[name]))
        self._optimizer = darcy_fno.build_optimizer(model, darcy_fno.FINE_LEARNING_RATE)
        self._problem = darcy_fno.load_problem(config)
        self._batches = self._problem.epochs()
        tiny = torch.ones(1, 1, WARM_RESOLUTION, WARM_RESOLUTION, device=config.device)
        model(tiny).sum().backward()
        self._synchronize()
        can_reset = getattr(self._memory, "can_reset", True)
        return Prepared(self._memory.now_bytes(), can_reset)

    def step(self) -> StepResult:
        """Run and measure one training step."""
        batch = next(self._batches)
        self._memory.reset_peak()
        self._synchronize()
        with sampled(self._memory) as timeline:
            begin_s = time.perf_counter()
            loss, prediction, target = darcy_fno.train_step(
                self._problem, self._model, self._optimizer, batch
            )
            self._synchronize()
            duration_s = time.perf_counter() - begin_s
        peak_bytes = self._memory.peak_bytes()
        gradients = ((name, value.grad) for name, value in self._model.named_parameters())
        return StepResult(
            duration_s,
            peak_bytes,
            loss.item(),
            *self._problem.errors(prediction, target),
            digest(gradients),
            None if self._handle is None else self._handle.stats,
            timeline,
        )

    def finish(self) -> FinalResult:
        """Compute the test errors and hash the final parameters."""
        totals = [0.0, 0.0]
        sample: Any = None
        with torch.no_grad():
            for batch in self._problem.test_batches:
                coefficient = batch["x"]
                prediction, target = self._problem.predict(self._model, batch)
                for at, error in enumerate(self._problem.errors(prediction, target)):
                    totals[at] += error * len(target) / darcy_fno.N_TEST
                if sample is None:
                    sample = tuple(t[0, 0].cpu().numpy() for t in (coefficient, target, prediction))
        parameters = digest(self._model.named_parameters())
        lasting_bytes, forward_bytes = self._measure_forward()
        record = self._record_step()
        return FinalResult(
            totals[0], totals[1], parameters, lasting_bytes, forward_bytes, sample, record
        )

    def _record_step(self) -> RunRecord | None:
        """Train two more steps, of which the second is recorded, and return what a page shows."""
        if self._mode is Mode.SAVE_ON_CPU:
            return None
        if self._handle is not None:
            self._handle.detach()
        self._memory.return_freed()
        handle = _offload(self._model, self._mode, self._config, trace=True)
        assert handle is not None
        with handle:
            for _ in range(2):
                batch = next(self._batches)
                darcy_fno.train_step(self._problem, self._model, self._optimizer, batch)
            return record_run(handle, self._mode.title)

    def _measure_forward(self) -> tuple[int, int]:
        """Measure a forward without autograd, which no way of offloading can need less than.

        What a module has freed is returned to the system when it ends. Otherwise it would stay
        resident, and the forward would seem to need more than a training step with ebbtide.

        Returns:
            The number of bytes in use before, and how many more the forward needs at its peak.
        """
        batch = next(self._batches)
        self._memory.return_freed()
        self._memory.reset_peak()
        lasting_bytes = self._memory.now_bytes()
        hook = register_module_forward_hook(lambda *_: self._memory.return_freed())
        try:
            with torch.no_grad():
                self._problem.predict(self._model, batch)
        finally:
            hook.remove()
        self._synchronize()
        return lasting_bytes, max(0, self._memory.peak_bytes() - lasting_bytes)

    def _synchronize(self) -> None:
        if self._config.device.type != "cpu":
            torch.accelerator.synchronize()


def _offload(
    model: nn.Module, mode: Mode, config: DemoConfig, *, trace: bool = False
) -> ebbtide.OffloadHandle | None:
    """Offload as the mode says; None if it does not use ebbtide, unless a step is to be recorded.

    Args:
        model: the model.
        mode: the mode.
        config: the run.
        trace: whether to record steps. A mode without offload then keeps everything.
    """
    if mode is Mode.EBBTIDE:
        return ebbtide.offload(model, store=config.store, trace=trace)
    if mode is Mode.REBUILD or (mode is Mode.NONE and trace):
        kept = ebbtide.ActivationPolicy(num_layers=0, rebuild=mode is Mode.REBUILD)
        return ebbtide.offload(model, activations=kept, store=config.store, trace=trace)
    if mode is Mode.SAVE_ON_CPU:
        forward = model.forward

        def offloaded(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                return forward(*args, **kwargs)

        model.forward = offloaded
    return None


def _compute_reproducibly(device: torch.device) -> None:
    """Choose deterministic kernels; without them two runs of a mode may differ in the last bits."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    torch.use_deterministic_algorithms(True, warn_only=True)
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)


def digest(tensors: Iterable[tuple[str, torch.Tensor | None]]) -> str:
    """Return the SHA-256 over the names, types, shapes and bytes of tensors."""
    hashed = hashlib.sha256()
    for name, tensor in tensors:
        if tensor is None:
            hashed.update(f"{name}: none".encode())
            continue
        hashed.update(f"{name}: {tensor.dtype} {tuple(tensor.shape)}".encode())
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        hashed.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()
