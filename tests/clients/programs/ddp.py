"""DistributedDataParallel: a transformer on two processes, each with texts of its own."""

import argparse
import inspect

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

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
rows = text[: 32 * LENGTH].view(-1, LENGTH)[dist.get_rank() :: dist.get_world_size()]
model = LanguageModel()
handle = ebbtide.offload(model)

parallel = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
losses = []
for batch in rows.split(8):
    logits = parallel(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
dist.destroy_process_group()
