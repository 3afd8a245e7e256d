"""FSDP2: a transformer whose parameters are sharded over two processes by fully_shard."""

import argparse
import inspect

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import ebbtide

LENGTH, WIDTH = 256, 192
dist.init_process_group("gloo")
torch.manual_seed(0)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.blocks(self.embed(tokens), mask=mask, is_causal=True))


text = torch.tensor(list(inspect.getsource(argparse).encode()))
rows = text[: 48 * LENGTH].view(-1, LENGTH)[dist.get_rank() :: dist.get_world_size()]
model = LanguageModel()
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
for block in model.blocks.layers:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
handle = ebbtide.offload(model)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for batch in rows.split(8):
    logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
dist.destroy_process_group()
