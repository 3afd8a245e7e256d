"""The work of one mode of the demo, in a process of its own: train, and measure."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, final

import torch
from numpy.typing import NDArray
from torch import nn

import ebbtide
from ebbtide.handle import record_run
from ebbtide.observe.run_record import RunRecord
from ebbtide.stores.measured_memory import AbstractMemory, DeviceMemory, ProcessMemory
from ebbtide.tools.darcy import load_darcy_flow_small
from ebbtide.tools.demo_config import WARM_RESOLUTION, DemoConfig, FinalResult, Mode, StepResult

# ---- The model and its data: an FNO on Darcy flow, with neuraloperator's losses and optimizer ----

LEARNING_RATE = 8e-3
FINE_LEARNING_RATE = 1e-3  # after the warm start
WEIGHT_DECAY = 1e-4
N_TEST = 8
_WARM_BATCH_SIZE = 16
_WARM_SAMPLES = 512  # at most; a longer warm start goes through them again

Batch = dict[str, torch.Tensor]
Weights = dict[str, NDArray[Any]]  # arrays, because tensors sent to a process would share memory


@final
class Problem:
    """Data at one resolution with their normalization, and the losses.

    Predictions and targets are compared in the pressure's own unit, without normalization.
    """

    def __init__(self, config: DemoConfig, resolution: int, n_train: int, batch_size: int) -> None:
        from neuralop import H1Loss, LpLoss

        self.train_batches, tests, self._processor = load_darcy_flow_small(
            n_train,
            [N_TEST],
            batch_size,
            [batch_size],
            train_resolution=resolution,
            test_resolutions=[resolution],
            encode_input=True,
            seed=config.seed,
            cache_dir=config.data,
        )
        self.test_batches = tests[resolution]
        self._processor.eval()  # in training mode it would leave predictions normalized
        self._processor.to(config.device)
        self.loss = LpLoss(d=2, p=2)
        self._h1 = H1Loss(d=2)

    def predict(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the model's prediction, and the target on the same device."""
        batch = self._processor.preprocess(batch)
        prediction, batch = self._processor.postprocess(model(batch["x"]), batch)
        return prediction, batch["y"]

    def errors(self, prediction: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
        """Return relative errors in the L2 and H1 norms, as means over the samples."""
        prediction = prediction.detach()
        return (
            self.loss(prediction, target).item() / len(target),
            self._h1(prediction, target).item() / len(target),
        )

    def epochs(self) -> Iterator[Batch]:
        """Yield the training batches, starting over whenever they are through."""
        return itertools.chain.from_iterable(itertools.repeat(self.train_batches))


def build_model(config: DemoConfig) -> nn.Module:
    """Build the FNO of neuraloperator's Darcy example; the seed determines its weights."""
    from neuralop.models import FNO

    torch.manual_seed(config.seed)
    model: nn.Module = FNO(
        n_modes=(16, 16),
        in_channels=1,
        out_channels=1,
        hidden_channels=32,
        projection_channel_ratio=2,
    )
    return model.to(config.device)


def build_optimizer(model: nn.Module, learning_rate: float) -> Any:
    from neuralop.training import AdamW

    return AdamW(model.parameters(), lr=learning_rate, weight_decay=WEIGHT_DECAY)


def train_step(problem: Problem, model: nn.Module, optimizer: Any, batch: Batch) -> Any:
    """Run forward, backward and optimizer step.

    Returns:
        Loss, prediction and target.
    """
    optimizer.zero_grad()
    prediction, target = problem.predict(model, batch)
    loss = problem.loss(prediction, target)
    loss.backward()
    optimizer.step()
    return loss.detach(), prediction.detach(), target


def warm_start(config: DemoConfig, coarse: Problem | None) -> Weights:
    """Train on a coarse grid, which takes seconds; the weights of an FNO fit every grid.

    Args:
        config: the configuration of the run.
        coarse: the data on the coarse grid; None skips the training.

    Returns:
        The weights with which every mode begins.
    """
    model = build_model(config)
    if coarse is not None:
        optimizer = build_optimizer(model, LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.warm_steps)
        for batch in itertools.islice(coarse.epochs(), config.warm_steps):
            train_step(coarse, model, optimizer, batch)
            schedule.step()
    return {name: value.detach().cpu().numpy() for name, value in model.named_parameters()}


def load_coarse_problem(config: DemoConfig) -> Problem | None:
    """Load the data of the warm start; return None if there is to be no warm start."""
    if not config.warm_steps:
        return None
    n_samples = min(config.warm_steps * _WARM_BATCH_SIZE, _WARM_SAMPLES)
    return Problem(config, WARM_RESOLUTION, n_samples, _WARM_BATCH_SIZE)


def load_problem(config: DemoConfig) -> Problem:
    """Load the data of the run, with a new batch for every step; generate what is missing."""
    return Problem(config, config.resolution, config.steps * config.batch_size, config.batch_size)


# ---- The worker process of one mode, which does one piece of work per turn ----

_trainer: ModeTrainer  # of this process, since `start`


def start(config: DemoConfig, mode: Mode) -> None:
    """Build the model of this process, and attach ebbtide if the mode uses it."""
    global _trainer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _trainer = ModeTrainer(config, mode)


def prepare(weights: Weights) -> tuple[int, bool]:
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
class ModeTrainer:
    """Trains the model of one mode and measures it."""

    def __init__(self, config: DemoConfig, mode: Mode) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        if config.device.type != "cpu":
            _compute_reproducibly(config.device)
        warnings.filterwarnings("ignore", message=".*_skip", category=UserWarning)
        self._config = config
        self._model = build_model(config)
        self._mode = mode
        self._handle = _offload(self._model, mode, config)
        self._memory: AbstractMemory
        if config.device.type == "cpu":
            self._memory = ProcessMemory()
        else:
            self._memory = DeviceMemory(config.device)

    def prepare(self, weights: Weights) -> tuple[int, bool]:
        """Load data and weights, then run forward and backward once on a tiny grid.

        The run creates thread pools, FFT plans and code pages, so that they count as idle memory
        in every mode.

        Returns:
            Number of bytes in use now, the idle level, and whether peaks of memory can be measured
            for each step.
        """
        config, model = self._config, self._model
        for name, value in model.named_parameters():
            value.data.copy_(torch.from_numpy(weights[name]))
        self._optimizer = build_optimizer(model, FINE_LEARNING_RATE)
        self._problem = load_problem(config)
        self._batches = self._problem.epochs()
        tiny = torch.ones(1, 1, WARM_RESOLUTION, WARM_RESOLUTION, device=config.device)
        model(tiny).sum().backward()
        self._synchronize()
        can_reset = getattr(self._memory, "can_reset", True)
        return self._memory.now_bytes(), can_reset

    def step(self) -> StepResult:
        """Run and measure one training step."""
        batch = next(self._batches)
        self._memory.reset_peak()
        self._synchronize()
        begin_s = time.perf_counter()
        loss, prediction, target = train_step(self._problem, self._model, self._optimizer, batch)
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
        )

    def finish(self) -> FinalResult:
        """Compute the test errors and hash the final parameters."""
        totals = [0.0, 0.0]
        with torch.no_grad():
            for batch in self._problem.test_batches:
                prediction, target = self._problem.predict(self._model, batch)
                for at, error in enumerate(self._problem.errors(prediction, target)):
                    totals[at] += error * len(target) / N_TEST
        parameters = digest(self._model.named_parameters())
        return FinalResult(totals[0], totals[1], parameters, self._record_step())

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
                train_step(self._problem, self._model, self._optimizer, batch)
            return record_run(handle, self._mode.title)

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
