"""One rank of test_soft_data_parallel.py: python data_parallel_worker.py KIND RANK RENDEZVOUS.

Prints as JSON the losses of plain training and of offloaded training, and, of the last step, the
bytes offloaded, those on disk, and the host memory that is taken.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ebbtide
import softdevice
from softdevice import process_group

WORLD, WIDTH, ROWS, STEPS = 2, 64, 32, 3
BUDGET_BYTES = 2**19  # of host memory, for all ranks
TIERED = {"store": "tiered", "host_budget": f"{BUDGET_BYTES}B/node"}
EVERYTHING = ebbtide.ActivationPolicy(min_bytes=1, rebuild=False)


def _wrapped(kind: str, device: torch.device, offload: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
    model = nn.Sequential(*layers).to(device)
    if kind == "ddp-weights" and offload:
        ebbtide.offload(model, weights=ebbtide.WeightPolicy())
    if kind.startswith("ddp"):
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device.type, (WORLD,))
    policy = CPUOffloadPolicy() if kind == "fsdp2-cpu" else OffloadPolicy()
    for layer in model:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    return fully_shard(model, mesh=mesh, offload_policy=policy)


def _train(kind: str, rank: int, offload: bool) -> tuple[list[str], list[int]]:
    device = torch.device("softdevice", 0)
    model = _wrapped(kind, device, offload)
    rests = kind == "ddp-weights" and offload
    home = "cpu" if kind == "fsdp2-cpu" or rests else device.type
    assert all(parameter.device.type == home for parameter in model.parameters())
    how = TIERED if kind == "ddp-tiered" else {}
    moves = offload and not rests
    handle = ebbtide.offload(model, activations=EVERYTHING, **how) if moves else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    torch.manual_seed(rank)
    x = torch.randn(ROWS * (16 if kind == "ddp-tiered" else 1), WIDTH).to(device)
    losses = []
    for _ in range(STEPS):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    if handle is None:
        return losses, [0, 0, 0]
    stats = handle.stats
    return losses, [stats.offloaded_bytes, stats.peak_disk_bytes, stats.host_capacity_bytes]


def main() -> None:
    kind, rank, rendezvous, order = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    softdevice.load(order)
    process_group.register()
    dist.init_process_group(
        process_group.NAME, rank=rank, world_size=WORLD, init_method=f"file://{rendezvous}"
    )
    plain, _ = _train(kind, rank, offload=False)
    offloaded, sizes = _train(kind, rank, offload=True)
    names = ("bytes", "disk_bytes", "host_bytes")
    answer = {"plain": plain, "offloaded": offloaded} | dict(zip(names, sizes, strict=True))
    print(json.dumps(answer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
