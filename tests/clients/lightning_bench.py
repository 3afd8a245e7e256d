"""Modules of Lightning that train in a moment, and what their training is compared by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ebbtide
from run_program import weights_digest

SMALL = ebbtide.ActivationPolicy(min_bytes=1024)
X = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))


def blocks(width: int = 32) -> nn.Sequential:
    hidden = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(nn.Linear(16, width), *hidden, nn.Linear(width, 16))


class Plain(lightning.LightningModule):
    """Its training step calls a part of it, as most do."""

    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.net = blocks()
        self.batch_size = batch_size
        self.losses: list[str] = []
        self.moved: list[int] = []
        self.lr = 1e-3

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[0])
        self.losses.append(loss.item().hex())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        loss = F.mse_loss(self.net(batch[0]), batch[0])
        self.losses.append(loss.item().hex())
        self.log("val_loss", loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def on_fit_start(self) -> None:
        torch.manual_seed(0)  # for dropout

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(X[: 4 * self.batch_size]), batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(X[:16]), batch_size=16)


class WithForward(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[0])
        self.losses.append(loss.item().hex())
        return loss


class Manual(Plain):
    """Two networks with an optimizer each, as in a GAN, optimized by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.other = blocks()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], _: int) -> None:
        for network, optimizer in zip((self.net, self.other), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            loss = F.mse_loss(self.other(self.net(batch[0])), batch[0])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            assert network[0].weight.grad is not None
            self.losses.append(loss.item().hex())

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(each.parameters()) for each in (self.net, self.other)]


class WithoutDropout(Plain):
    """Lightning does not put back the random state when it resumes."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0


class BuiltLate(Plain):
    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(0)
            self.net = blocks()


def build(kind: type[Plain] = Plain) -> Plain:
    torch.manual_seed(0)
    return kind()


def trainer_for(folder: Path, *callbacks: Callback, **options: Any) -> lightning.Trainer:
    defaults = {
        "max_steps": 4,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "default_root_dir": folder,
    }
    return lightning.Trainer(callbacks=list(callbacks), **(defaults | options))


def results(model: Plain) -> tuple[list[str], str]:
    assert model.losses
    return model.losses, weights_digest(model)


def assert_is_plain(model: nn.Module) -> None:
    """Nothing of ebbtide is left on a model."""
    for module in model.modules():
        for value in [*vars(module).values(), *module._forward_hooks.values()]:
            assert not type(value).__module__.startswith("ebbtide"), value
