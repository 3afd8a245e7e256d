"""Trains pipelines of four processes whose stages are sharded, plainly and offloaded.

Started by torchrun with the name of the file for what the first rank saw. Two stages a dimension,
two processes a stage.
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ebbtide
from ebbtide.interop.pipelining import offload_stages

WIDTH, ROWS, MICROBATCHES, STEPS = 64, 16, 4, 3
EVERYTHING = ebbtide.ActivationPolicy(min_bytes=1)
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}
SHARDINGS = ("fsdp", "tensor")
ATTACHED = ("stages", "modules")
CASES = [*itertools.product(SHARDINGS, SCHEDULES, ATTACHED)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(x)))


def shard(sharding: str, stage: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    for block in stage:
        if sharding == "fsdp":
            fully_shard(block, mesh=mesh)
        else:
            plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
            parallelize_module(block, mesh, plan)
    return fully_shard(stage, mesh=mesh) if sharding == "fsdp" else stage


def attach(how: str, pipeline: Any, stages: list[nn.Module]) -> list[ebbtide.OffloadHandle]:
    if how == "stages":
        return [offload_stages(pipeline, resident=1, activations=EVERYTHING)]
    if how == "modules":
        return [ebbtide.offload(each, activations=EVERYTHING) for each in stages]
    return []


def train(
    mesh: DeviceMesh, blocks: list[Block], sharding: str, schedule: str, how: str
) -> tuple[list[Tensor], int]:
    """Return losses, gradients and weights of this rank, and how many bytes were spared."""
    pipes, shards = mesh["pipe"], mesh["shard"]
    rank = pipes.get_local_rank()
    places = [rank, rank + 2] if schedule == "interleaved" else [rank]
    count = 2 * len(places)
    size = len(blocks) // count
    stages = []
    for place in places:
        stage = nn.Sequential(*copy.deepcopy(blocks[place * size : (place + 1) * size]))
        stages.append(shard(sharding, stage, shards))
    built = [
        PipelineStage(stage, place, count, torch.device("cpu"), group=pipes.get_group())
        for stage, place in zip(stages, places, strict=True)
    ]
    pipeline = SCHEDULES[schedule](
        built if len(built) > 1 else built[0],
        n_microbatches=MICROBATCHES,
        loss_fn=lambda output, target: (output - target).square().mean(),
    )
    handles = attach(how, pipeline, stages)
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    seen: list[Tensor] = []
    for step in range(STEPS):
        # The ranks of one stage have different rows, but the same ones if they share the layers.
        seed = 10 * step + (shards.get_local_rank() if sharding == "fsdp" else 0)
        generator = torch.Generator().manual_seed(seed)
        x, target = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
        losses: list[Tensor] = []
        if rank == 0:
            pipeline.step(x)
        else:
            pipeline.step(target=target, losses=losses)
        seen += losses
        seen += [parameter.grad for parameter in parameters]
        optimizer.step()
        optimizer.zero_grad()
    seen += parameters
    spared = sum(each.stats.offloaded_bytes + each.stats.rebuilt_bytes for each in handles)
    for handle in handles:
        handle.detach()
    return [(each.to_local() if hasattr(each, "to_local") else each).detach() for each in seen], (
        spared
    )


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "shard"))
    blocks = [Block() for _ in range(8)]
    found = {}
    for sharding, schedule in itertools.product(SHARDINGS, SCHEDULES):
        expected, _ = train(mesh, blocks, sharding, schedule, "never")
        for how in ATTACHED:
            got, spared = train(mesh, blocks, sharding, schedule, how)
            same = len(got) == len(expected) and all(map(torch.equal, got, expected))
            found[f"{sharding}-{schedule}-{how}"] = {"same": same, "spared": spared}
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(everybody))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
