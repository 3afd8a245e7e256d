"""PhysicsNeMo's MeshGraphNet: heat spreads on a mesh of triangles."""

import torch
from physicsnemo.models.meshgraphnet import MeshGraphNet
from scipy.spatial import Delaunay
from torch_geometric.data import Data
from torch_geometric.utils import scatter, to_undirected

import ebbtide

NODES = 3000
OWN_CHECKPOINTS = (
    False  # True: MeshGraphNet recomputes its processor, and little is left to offload
)
torch.manual_seed(0)

points = torch.rand(NODES, 2)
corners = torch.from_numpy(Delaunay(points.numpy()).simplices).long()
sides = torch.cat([corners[:, [0, 1]], corners[:, [1, 2]], corners[:, [2, 0]]])
edges = to_undirected(sides.T.contiguous())
mesh = Data(edge_index=edges, num_nodes=NODES)
offset = points[edges[0]] - points[edges[1]]
edge_features = torch.cat([offset, offset.norm(dim=1, keepdim=True)], dim=1) * NODES**0.5


def spread(heat: torch.Tensor, steps: int) -> torch.Tensor:
    """Return the heat after some steps: at each, a node moves towards the mean of those around."""
    for _ in range(steps):
        around = scatter(heat[edges[0]], edges[1], dim=0, dim_size=NODES, reduce="mean")
        heat = heat + 0.5 * (around - heat)
    return heat


model = MeshGraphNet(
    input_dim_nodes=1,
    input_dim_edges=3,
    output_dim=1,
    processor_size=6,
    hidden_dim_processor=64,
    hidden_dim_node_encoder=64,
    hidden_dim_edge_encoder=64,
    hidden_dim_node_decoder=64,
    num_processor_checkpoint_segments=3 if OWN_CHECKPOINTS else 0,
)
handle = ebbtide.offload(model)

optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
for _ in range(3):
    heat = spread(10 * torch.randn(NODES, 1), 4)
    change = spread(heat, 4) - heat
    loss = (model(heat, edge_features, mesh) - change).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
