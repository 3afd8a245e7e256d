"""A physics-informed network for Burgers' equation, by double backward (create_graph=True)."""

import torch
from torch import Tensor, nn

import ebbtide

POINTS, WIDTH, VISCOSITY = 8192, 96, 0.01 / torch.pi
torch.manual_seed(0)

layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
model = nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), *layers, nn.Linear(WIDTH, 1))
handle = ebbtide.offload(model)


def derivative(of: Tensor, by: Tensor) -> Tensor:
    return torch.autograd.grad(of.sum(), by, create_graph=True)[0]


optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
for _ in range(4):
    t = torch.rand(POINTS, 1, requires_grad=True)
    x = (2 * torch.rand(POINTS, 1) - 1).requires_grad_()
    u = model(torch.cat([t, x], 1))
    u_t, u_x = derivative(u, t), derivative(u, x)
    residual = u_t + u * u_x - VISCOSITY * derivative(u_x, x)
    at_start = torch.cat([torch.zeros_like(t), x], 1).detach()
    start = model(at_start) + torch.sin(torch.pi * x.detach())
    loss = residual.square().mean() + start.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
