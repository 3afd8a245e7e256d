"""torch_geometric: a graph attention network learns how heat spreads over an irregular mesh."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATv2Conv
from torch_geometric.utils import get_laplacian, to_undirected

import ebbtide

NODES, WIDTH = 6_000, 48
torch.manual_seed(0)

# Points on a line, each joined to some of those beside it; an explicit step of the heat equation.
start = torch.arange(NODES - 40).repeat(4)
edges = to_undirected(torch.stack([start, start + torch.randint(1, 40, start.shape)]))
places, values = get_laplacian(edges, num_nodes=NODES)
temperature = torch.randn(NODES, 1)
flux = torch.zeros(NODES, 1).index_add(0, places[0], values[:, None] * temperature[places[1]])
mesh = Data(x=temperature, edge_index=edges, y=temperature - 0.02 * flux)


class MeshNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(1, WIDTH)
        self.layers = nn.ModuleList([GATv2Conv(WIDTH, WIDTH) for _ in range(5)])
        self.project = nn.Linear(WIDTH, 1)

    def forward(self, data: Data) -> Tensor:
        x = self.lift(data.x)
        for layer in self.layers:
            x = x + F.gelu(layer(x, data.edge_index))
        return self.project(x)


model = MeshNet()
handle = ebbtide.offload(model)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _ in range(3):
    loss = F.mse_loss(model(mesh), mesh.y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
