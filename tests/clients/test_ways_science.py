"""The ways in which images, graphs, operators and physics are trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from diffusers import UNet2DModel
from diffusers.training_utils import EMAModel
from neuralop import LpLoss
from neuralop import Trainer as OperatorTrainer
from neuralop.models import FNO
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader as GraphLoader
from torch_geometric.nn import BatchNorm, GCNConv, GINEConv, global_mean_pool
from torch_geometric.utils import to_torch_csr_tensor

from ways import Attach, assert_same_with_and_without

Trained = tuple[Sequence[float], nn.Module]


def run_steps(model: nn.Module, loss_of: Callable[[], Tensor], count: int = 3) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(count):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class SmallNet(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)]
        self.net = nn.Sequential(*layers)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[0])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("mean", self.net(batch[0]).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


@pytest.mark.parametrize(
    "options",
    [{}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}],
    ids=["plain", "bf16, accumulated and clipped"],
)
def test_lightning_with_its_net_offloaded(options: dict[str, Any], tmp_path: Path) -> None:
    def train(attach: Attach) -> Trained:
        torch.manual_seed(0)
        model = SmallNet()
        attach(model.net)
        loader = DataLoader(TensorDataset(torch.randn(256, 64)), batch_size=64)
        trainer = lightning.Trainer(
            max_steps=3,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            **options,
        )
        trainer.fit(model, loader, loader)
        return model.losses, model

    assert_same_with_and_without(train)


def test_timm_beside_a_moving_average_of_the_model() -> None:
    def train(attach: Attach) -> Trained:
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=4)
        attach(model)
        average = ModelEmaV3(model)
        images, labels = torch.randn(8, 3, 64, 64), torch.arange(8) % 4
        losses = run_steps(model, lambda: F.cross_entropy(model(images), labels))
        average.update(model)
        with torch.no_grad():
            losses.append(average(images).sum().item())
        return losses, model

    assert_same_with_and_without(train)


def test_torchvision_channels_last_under_autocast() -> None:
    def train(attach: Attach) -> Trained:
        torch.manual_seed(0)
        model = torchvision.models.resnet18(num_classes=4).to(memory_format=torch.channels_last)
        attach(model)
        images = torch.randn(8, 3, 64, 64).to(memory_format=torch.channels_last)

        def loss() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return F.cross_entropy(model(images), torch.arange(8) % 4)

        return run_steps(model, loss), model

    assert_same_with_and_without(train)


def test_torchvision_with_checkpoints_of_its_own() -> None:
    def train(attach: Attach) -> Trained:
        torch.manual_seed(0)
        model = torchvision.models.densenet121(memory_efficient=True, num_classes=4)
        attach(model)
        images = torch.randn(4, 3, 64, 64)
        loss = lambda: F.cross_entropy(model(images), torch.arange(4))  # noqa: E731
        return run_steps(model, loss), model

    assert_same_with_and_without(train)


def test_diffusers_with_checkpointing_and_a_moving_average() -> None:
    def train(attach: Attach) -> Trained:
        torch.manual_seed(0)
        model = UNet2DModel(
            sample_size=32,
            in_channels=1,
            out_channels=1,
            block_out_channels=(16, 32),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=8,
        )
        attach(model)
        average = EMAModel(model.parameters(), model_cls=UNet2DModel, model_config=model.config)
        model.enable_gradient_checkpointing()
        images = torch.randn(4, 1, 32, 32)
        noise = torch.randn_like(images)
        losses = run_steps(
            model, lambda: F.mse_loss(model(images + noise, torch.arange(4)).sample, noise)
        )
        average.step(model.parameters())
        return losses, model

    assert_same_with_and_without(train)


def test_torch_geometric_with_a_sparse_adjacency() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([GCNConv(32, 32, cached=True) for _ in range(3)])

        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, adjacency).relu()
            return x

    def train(attach: Attach) -> Trained:
        torch.manual_seed(0)
        edges = torch.randint(0, 500, (2, 4000))
        adjacency, x = to_torch_csr_tensor(edges, size=(500, 500)), torch.randn(500, 32)
        model = Net()
        attach(model)
        return run_steps(model, lambda: model(x, adjacency).square().mean()), model

    assert_same_with_and_without(train)


def test_torch_geometric_with_batches_of_graphs() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [GINEConv(nn.Linear(32, 32), edge_dim=32) for _ in range(3)]
            self.layers, self.norm = nn.ModuleList(layers), BatchNorm(32)

        def forward(self, data: Data) -> Tensor:
            x = data.x
            for layer in self.layers:
                x = self.norm(layer(x, data.edge_index, data.edge_attr)).relu()
            return global_mean_pool(x, data.batch)

    def train(attach: Attach) -> Trained:
        torch.manual_seed(0)
        graphs = [
            Data(torch.randn(50, 32), torch.randint(0, 50, (2, 200)), torch.randn(200, 32))
            for _ in range(32)
        ]
        batches = iter(GraphLoader(graphs, batch_size=8))
        model = Net()
        attach(model)
        return run_steps(model, lambda: model(next(batches)).square().mean()), model

    assert_same_with_and_without(train)


def test_neuralop_trainer_in_mixed_precision_that_evaluates_and_saves(tmp_path: Path) -> None:
    def train(attach: Attach) -> Trained:
        torch.manual_seed(0)
        model = FNO(n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=16, n_layers=2)
        attach(model)
        samples = [{"x": torch.randn(1, 32, 32), "y": torch.randn(1, 32, 32)} for _ in range(8)]
        loader = DataLoader(samples, batch_size=4)
        relative, losses = LpLoss(d=2), []

        def recorded(prediction: Tensor, y: Tensor, **_: object) -> Tensor:
            loss = relative(prediction, y)
            losses.append(loss.item())
            return loss

        optimizer = torch.optim.Adam(model.parameters())
        OperatorTrainer(model=model, n_epochs=2, device="cpu", mixed_precision=True).train(
            train_loader=loader,
            test_loaders={"test": loader},
            optimizer=optimizer,
            scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer),
            training_loss=recorded,
            eval_losses={"l2": relative},
            save_every=1,
            save_dir=tmp_path,
        )
        return losses, model

    assert_same_with_and_without(train)


def test_pinn_of_third_order_by_lbfgs() -> None:
    def derivative(of: Tensor, by: Tensor) -> Tensor:
        return torch.autograd.grad(of.sum(), by, create_graph=True)[0]

    def train(attach: Attach) -> Trained:
        torch.manual_seed(0)
        layers = [nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)]
        model = nn.Sequential(*layers)
        attach(model)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
        points, losses = torch.rand(256, 2, requires_grad=True), []

        def closure() -> Tensor:  # the Korteweg-de Vries equation
            optimizer.zero_grad()
            u = model(points)
            first = derivative(u, points)
            third = derivative(derivative(first[:, 1], points)[:, 1], points)[:, 1]
            residual = first[:, 0] + 6 * u[:, 0] * first[:, 1] + third
            loss = residual.square().mean()
            loss.backward()
            losses.append(loss.item())
            return loss

        for _ in range(2):
            optimizer.step(closure)
        return losses, model

    # What the first backward has read stays: its graph holds it until the last one.
    assert_same_with_and_without(train, moves=False)


def test_forces_are_derivatives_taken_inside_the_forward() -> None:
    class Potential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Sequential(nn.Linear(32, 32), nn.SiLU()) for _ in range(3)]
            self.layers = nn.Sequential(*layers)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x.requires_grad_()
            energy = self.layers(x).sum()
            return energy, -torch.autograd.grad(energy, x, create_graph=True)[0]

    def train(attach: Attach) -> Trained:
        torch.manual_seed(0)
        model = Potential()
        attach(model)

        def loss() -> Tensor:
            energy, forces = model(torch.randn(512, 32))
            return 1e-6 * energy.square() + forces.square().mean()

        return run_steps(model, loss), model

    assert_same_with_and_without(train)
