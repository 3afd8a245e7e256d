"""Tensor parallelism: the wide layers of a network are split over two processes."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ebbtide

ROWS, WIDTH = 12_288, 128
dist.init_process_group("gloo")
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.project = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.Sequential(*[Block() for _ in range(4)])

    def forward(self, points: Tensor) -> Tensor:
        return self.project(self.blocks(self.lift(points)))


model = Network()
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
parallelize_module(model, mesh, plan)
handle = ebbtide.offload(model)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
losses = []
for _ in range(3):
    # The network learns a standing wave, u(t, x) = sin(x) cos(t).
    points = 6 * torch.rand(ROWS, 2)
    wave = torch.sin(points[:, :1]) * torch.cos(points[:, 1:])
    loss = F.mse_loss(model(points), wave)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
dist.destroy_process_group()
