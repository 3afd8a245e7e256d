"""What the demo trains: an FNO, on Darcy flow, with neuraloperator's losses and optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from numpy.typing import NDArray
from torch import nn

from ebbtide.demo.config import WARM_RESOLUTION, DemoConfig
from ebbtide.problems.darcy import load_darcy_flow_small

LEARNING_RATE = 8e-3
FINE_LEARNING_RATE = 1e-3  # after the warm start
WEIGHT_DECAY = 1e-4
N_TEST = 8
_WARM_BATCH_SIZE = 16
_WARM_SAMPLES = 512  # at most; then again from the first

Batch = dict[str, torch.Tensor]
Weights = dict[str, NDArray[Any]]  # not tensors: between processes those share memory


class Errors(NamedTuple):
    """Relative errors, means over the samples."""

    l2: float
    h1: float


@final
class Problem:
    """Data at one resolution with its normalization, and the losses.

    Predictions and targets meet in the pressure's own unit.
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
        self._processor.eval()  # its training state would leave predictions normalized
        self._processor.to(config.device)
        self.loss = LpLoss(d=2, p=2)
        self._h1 = H1Loss(d=2)

    def predict(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The prediction, and the target on the same device."""
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
        """Training batches, again and again."""
        return itertools.chain.from_iterable(itertools.repeat(self.train_batches))


def build_model(config: DemoConfig) -> nn.Module:
    """The FNO of neuraloperator's Darcy example, the same weights for the same seed."""
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
    """Forward, backward, update.

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
    """Train on a coarse grid, which takes seconds; an FNO's weights fit every grid.

    Returns:
        The weights that every mode begins with.
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
    """The data of the warm start, if there is to be one."""
    if not config.warm_steps:
        return None
    n_samples = min(config.warm_steps * _WARM_BATCH_SIZE, _WARM_SAMPLES)
    return Problem(config, WARM_RESOLUTION, n_samples, _WARM_BATCH_SIZE)


def load_problem(config: DemoConfig) -> Problem:
    """The data of the run, a fresh batch for every step; generated where they are not there yet."""
    return Problem(config, config.resolution, config.steps * config.batch_size, config.batch_size)


def has_published_files(directory: Path | None, resolution: int) -> bool:
    """Whether the data are there at this resolution, as `load_darcy_pt` reads them."""
    splits = ("train", "test")
    return directory is not None and all(
        (directory / f"darcy_{split}_{resolution}.pt").exists() for split in splits
    )
