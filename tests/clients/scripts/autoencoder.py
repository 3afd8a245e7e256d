# ruff: noqa: ARG002  (Lightning names these arguments)
"""Train an autoencoder of digits: the first of Lightning's basic examples.

It is built as Lightning's: a `LightningModule`, a `LightningDataModule` and a callback, put
together by `LightningCLI`, then fit, test and predict from the best checkpoint. Instead of MNIST,
which needs a download, it draws its images: blurred strokes. It knows nothing of ebbtide.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, callbacks
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class ImageSampler(callbacks.Callback):
    """Keeps what the model makes of three validation images, after each epoch."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        images, _ = next(iter(DataLoader(trainer.datamodule.validation, batch_size=3)))
        with torch.no_grad():
            pl_module.eval()
            made = pl_module(images.flatten(1).to(pl_module.device))
            pl_module.train()
        torch.save(made.reshape(images.shape), f"made_{trainer.current_epoch}.pt")


class LitAutoEncoder(LightningModule):
    def __init__(self, hidden_dim: int = 64, learning_rate: float = 10e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            nn.Linear(28 * 28, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 3)
        )
        self.decoder = nn.Sequential(
            nn.Linear(3, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 28 * 28)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._common_step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._common_step(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._common_step(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0].flatten(1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)

    def _common_step(self, batch: Any, stage: str) -> Tensor:
        x = batch[0].flatten(1)
        loss = F.mse_loss(x, self(x))
        self.log(f"{stage}_loss", loss, on_step=True)
        return loss


class Strokes(LightningDataModule):
    def __init__(self, batch_size: int = 32, images: int = 1024) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(42)
        at = torch.linspace(-1, 1, 28)
        angle = torch.pi * torch.rand(images, 1, 1, generator=generator)
        shift = torch.rand(images, 1, 1, generator=generator) - 0.5
        distance = at[:, None] * angle.cos() + at * angle.sin() - shift
        drawn = TensorDataset(
            torch.exp(-50 * distance**2)[:, None], (angle / 0.32).long().flatten()
        )
        parts = [images - images // 4, images // 8, images // 4 - images // 8]
        self.train, self.validation, self.testing = random_split(drawn, parts, generator=generator)
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(self.validation, batch_size=self.batch_size)

    def test_dataloader(self) -> Any:
        return DataLoader(self.testing, batch_size=self.batch_size)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.testing, batch_size=self.batch_size)


def cli_main() -> None:
    cli = LightningCLI(
        LitAutoEncoder,
        Strokes,
        seed_everything_default=1234,
        run=False,
        trainer_defaults={"callbacks": ImageSampler(), "max_epochs": 2},
        save_config_kwargs={"overwrite": True},
    )
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    cli.trainer.test(ckpt_path="best", datamodule=cli.datamodule)
    print(cli.trainer.predict(ckpt_path="best", datamodule=cli.datamodule)[0])


if __name__ == "__main__":
    cli_main()
