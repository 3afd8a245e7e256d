"""The demo's model and data: an FNO on Darcy flow, with neuraloperator's losses and optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from numpy.typing import NDArray
from torch import nn

from ebbtide.tools.darcy import load_darcy_flow_small
from ebbtide.tools.demo_config import WARM_RESOLUTION, DemoConfig

LEARNING_RATE = 8e-3
FINE_LEARNING_RATE = 1e-3  # after the warm start
WEIGHT_DECAY = 1e-4
N_TEST = 8
_WARM_BATCH_SIZE = 16
_WARM_SAMPLES = 512  # at most; a longer warm start goes through them again

Batch = dict[str, torch.Tensor]
Weights = dict[str, NDArray[Any]]  # arrays, because tensors sent to a process would share memory


class Errors(NamedTuple):
    """Relative errors in the L2 and H1 norms, as means over the samples."""

    l2: float
    h1: float


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
            data_root=config.data if has_published_files(config.data, resolution) else None,
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

    def errors(self, prediction: torch.Tensor, target: torch.Tensor) -> Errors:
        prediction = prediction.detach()
        return Errors(
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


def has_published_files(directory: Path | None, resolution: int) -> bool:
    """Return whether the directory has the published files of this resolution."""
    splits = ("train", "test")
    return directory is not None and all(
        (directory / f"darcy_{split}_{resolution}.pt").exists() for split in splits
    )
