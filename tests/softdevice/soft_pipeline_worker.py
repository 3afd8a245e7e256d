"""One rank of test_soft_pipelines.py. Arguments: KIND RANK WORLD RENDEZVOUS ORDER.

Prints what plain training and offloaded training give, and the bytes offloaded, as JSON.
"""

import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.nn import functional as F

import ebbtide
import softdevice
from ebbtide.interop.pipelining import offload_stages
from softdevice import process_group

WIDTH, ROWS, COUNT, STEPS = 32, 32, 4, 3
STAGES = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
"""Stages of each rank."""


def _pipeline(kind: str, rank: int, world: int, device: torch.device) -> tuple[Any, nn.Module]:
    total = STAGES[kind] * world
    stages = []
    for number in range(rank, total, world):
        torch.manual_seed(number)
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        stages.append(PipelineStage(nn.Sequential(*layers).to(device), number, total, device))
    model = nn.ModuleList(stage.submod for stage in stages)
    if kind == "interleaved":
        return ScheduleInterleaved1F1B(stages, COUNT, loss_fn=F.mse_loss), model
    schedule = ScheduleGPipe if kind == "gpipe" else Schedule1F1B
    return schedule(stages[0], COUNT, loss_fn=F.mse_loss), model


def _train(kind: str, rank: int, world: int, weights: str) -> tuple[list[str], int]:
    device = torch.device("softdevice", 0)
    pipeline, model = _pipeline(kind, rank, world, device)
    handle = None
    if weights:
        handle = offload_stages(
            pipeline,
            resident=1,
            activations=ebbtide.ActivationPolicy(min_bytes=1, rebuild=False),
            weights=ebbtide.WeightPolicy() if weights == "offloaded" else None,
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    found: list[str] = []
    for number in range(STEPS):
        draws = torch.Generator().manual_seed(number)
        batch, target = torch.randn(2, COUNT * ROWS, WIDTH, generator=draws).to(device)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        arguments = (batch,) if rank == 0 else ()
        is_last = rank == world - 1
        pipeline.step(*arguments, **({"target": target, "losses": losses} if is_last else {}))
        optimizer.step()
        found += [loss.item().hex() for loss in losses]
    found += [float(p.detach().cpu().double().sum()).hex() for p in model.parameters()]
    offloaded_bytes = 0 if handle is None else handle.stats.offloaded_bytes
    if handle is not None:
        handle.detach()
    return found, offloaded_bytes


def main() -> None:
    kind, rank, world, rendezvous, order = sys.argv[1], *map(int, sys.argv[2:4]), *sys.argv[4:6]
    softdevice.load(order)
    process_group.register()
    warnings.simplefilter("error", RuntimeWarning)  # a step that departs from its schedule says so
    dist.init_process_group(
        process_group.NAME, rank=rank, world_size=world, init_method=f"file://{rendezvous}"
    )
    answer: dict[str, Any] = {"plain": _train(kind, rank, world, "")[0]}
    answer["activations"], answer["bytes"] = _train(kind, rank, world, "resident")
    answer["weights"], _ = _train(kind, rank, world, "offloaded")
    print(json.dumps(answer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
