"""One rank of test_soft_data_parallel.py: python data_parallel_worker.py KIND RANK RENDEZVOUS.

Prints the losses of plain training and of offloaded training, and the bytes offloaded, as JSON.
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
EVERYTHING = ebbtide.ActivationPolicy(min_bytes=1, rebuild=False)


def _wrapped(kind: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
    model = nn.Sequential(*layers).to(device)
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device.type, (WORLD,))
    policy = CPUOffloadPolicy() if kind == "fsdp2-cpu" else OffloadPolicy()
    for layer in model:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    return fully_shard(model, mesh=mesh, offload_policy=policy)


def _train(kind: str, rank: int, offload: bool) -> tuple[list[str], int]:
    device = torch.device("softdevice", 0)
    model = _wrapped(kind, device)
    home = "cpu" if kind == "fsdp2-cpu" else device.type
    assert all(parameter.device.type == home for parameter in model.parameters())
    handle = ebbtide.offload(model, activations=EVERYTHING) if offload else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    torch.manual_seed(rank)
    x = torch.randn(ROWS, WIDTH).to(device)
    losses = []
    for _ in range(STEPS):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses, 0 if handle is None else handle.stats.offloaded_bytes


def main() -> None:
    kind, rank, rendezvous, order = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    softdevice.load(order)
    process_group.register()
    dist.init_process_group(
        process_group.NAME, rank=rank, world_size=WORLD, init_method=f"file://{rendezvous}"
    )
    plain, _ = _train(kind, rank, offload=False)
    offloaded, offloaded_bytes = _train(kind, rank, offload=True)
    print(json.dumps({"plain": plain, "offloaded": offloaded, "bytes": offloaded_bytes}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
