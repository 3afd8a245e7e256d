"""anemoi's graph transformer: a wave travels around the sphere, on a mesh of points."""

import torch
from anemoi.models.distributed.shapes import GraphShardInfo
from anemoi.models.layers.processor import GraphTransformerProcessor
from scipy.spatial import KDTree
from torch import Tensor, nn

import ebbtide

NODES, NEIGHBOURS, CHANNELS = 1500, 8, 64
OWN_CHECKPOINTS = False  # anemoi's default is True: it recomputes, and little is left to offload
torch.manual_seed(0)

# Points on the unit sphere, as evenly as a golden spiral puts them, and edges from those around.
turn, height = torch.arange(NODES) * 2.399963, torch.linspace(1, -1, NODES)
radius = (1 - height**2).sqrt()
points = torch.stack([radius * turn.cos(), radius * turn.sin(), height], dim=1)
around = torch.from_numpy(KDTree(points.numpy()).query(points.numpy(), NEIGHBOURS)[1])
edges = torch.stack([around.flatten(), torch.arange(NODES).repeat_interleave(NEIGHBOURS)])
offsets = 10 * (points[edges[0]] - points[edges[1]])


class Forecast(nn.Module):
    """What anemoi's models are: an encoder, a processor on the hidden mesh, a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, CHANNELS), nn.Linear(CHANNELS, 1)
        self.processor = GraphTransformerProcessor(
            num_layers=6,
            num_channels=CHANNELS,
            num_chunks=3,
            num_heads=4,
            mlp_hidden_ratio=4,
            edge_dim=3,
            graph_attention_backend="pyg",
            gradient_checkpointing=OWN_CHECKPOINTS,
            layer_kernels=None,
        )

    def forward(self, field: Tensor) -> Tensor:
        hidden = self.encoder(torch.cat([field, points], dim=1))
        whole = GraphShardInfo()
        return field + self.decoder(self.processor(hidden, 1, whole, offsets, edges))


def wave(at: float, waves: Tensor) -> Tensor:
    """Return a sum of waves that have travelled east by an angle."""
    angle = torch.tensor(at)
    east = torch.stack([angle.cos(), angle.sin(), torch.zeros(())])
    north = torch.stack([-angle.sin(), angle.cos(), torch.zeros(())])
    turned = points @ torch.stack([east, north, torch.tensor([0.0, 0.0, 1.0])]).T
    return (turned @ waves).sin().sum(dim=1, keepdim=True)


model = Forecast()
handle = ebbtide.offload(model)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
losses = []
for _ in range(3):
    waves = 3 * torch.randn(3, 4)
    loss = (model(wave(0.0, waves)) - wave(0.1, waves)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
