"""The ranks that test_host_ranks.py looks at; each writes what it saw to DIRECTORY/rank*.json.

[torchrun ...] host_ranks_worker.py DIRECTORY WORLD CHECK ...

The ranks share a machine whose RAM is a number in a file: what a rank page-locks is gone for all.
Page-locking takes a while, as it does in reality, so that ranks which grow together really meet.
The device is the CPU in place of an accelerator: its host memory is touched and counted.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ebbtide
from ebbtide import ActivationPolicy
from ebbtide.devices import CpuDevice
from ebbtide.errors import StoreFullError
from ebbtide.stores import PinnedStore
from page_locks import PageLocks
from store_bench import now

MIB, PAGE = 2**20, mmap.PAGESIZE
RAM_BYTES = 64 * MIB
BUDGET_BYTES = 8 * MIB
WIDTH, ROWS, BLOCKS, STEPS = 64, 4096, 4, 3
PIN_S = 0.02  # what page-locking takes
EVERYTHING = ActivationPolicy(min_bytes=1024, rebuild=False)


class Machine:
    """RAM that the ranks share.

    Attributes:
        peak_bytes: the most that all ranks had taken together, as this rank saw it.
    """

    def __init__(self, path: Path, rank: int, world: int) -> None:
        with open(path, "r+b") as file:
            self._taken = memoryview(mmap.mmap(file.fileno(), PAGE)).cast("q")
        self._rank, self._world = rank, world
        self.peak_bytes = 0
        memory = type("Memory", (), {"available": property(lambda _: self.free_bytes)})()
        psutil.virtual_memory = lambda: memory

    @property
    def free_bytes(self) -> int:
        return RAM_BYTES - sum(self._taken[: self._world])

    def take(self, size_bytes: int) -> None:
        self._taken[self._rank] += size_bytes
        self.peak_bytes = max(self.peak_bytes, sum(self._taken[: self._world]))

    def device(self) -> CpuDevice:
        """A device whose host memory is taken from this machine."""
        device = CpuDevice()
        device.computes_on_host = False
        PageLocks(device)
        pin = device.pin

        def pin_slowly(address: int, size_bytes: int) -> Callable[[], None]:
            unlock = pin(address, size_bytes)
            time.sleep(PIN_S)
            self.take(size_bytes)

            def give_back() -> None:
                unlock()
                self.take(-size_bytes)

            return give_back

        device.pin = pin_slowly
        return device


def fill(take: Callable[[], Any]) -> str:
    """Take until nothing is left; return why."""
    dist.barrier()
    while True:
        try:
            take()
        except StoreFullError as error:
            return str(error)


def check_activations(machine: Machine) -> dict[str, Any]:
    """Each rank would take all of the free RAM in slabs."""
    store = PinnedStore(machine.device(), slab_bytes=5 * MIB)
    source = torch.zeros(MIB, dtype=torch.uint8)
    reason = fill(lambda: store.offload(source, now()))
    dist.barrier()
    left_bytes = machine.free_bytes
    dist.barrier()
    store.close()
    return {"reason": reason, "left_bytes": left_bytes}


def check_weights(machine: Machine) -> dict[str, Any]:
    """Each rank would take all of the free RAM for weights."""
    store, slots = PinnedStore(machine.device()), []
    reason = fill(lambda: slots.append(store.allocate_resting(9 * MIB)))
    dist.barrier()
    left_bytes = machine.free_bytes
    dist.barrier()
    for slot in slots:
        store.drop(slot)
    store.close()
    return {"reason": reason, "left_bytes": left_bytes}


def check_gradients(machine: Machine) -> dict[str, Any]:
    """Each rank sets aside all that it may have, and then takes it."""
    store, slots = PinnedStore(machine.device()), []
    reason = fill(lambda: store.reserve(3 * MIB))
    while store.budget.reserved_bytes:
        slots.append(store.allocate_resting(3 * MIB, reserved=True))
    dist.barrier()
    for slot in slots:
        store.drop(slot)
    store.close()
    return {"reason": reason, "left_bytes": 0}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train(machine: Machine, offload: Callable[[nn.Module], Any] | None) -> tuple[list[Tensor], Any]:
    """Losses and weights of some steps with DDP, and the statistics of the last step."""
    torch.manual_seed(0)
    net = Net()
    handle = None
    if offload is not None:
        with mock.patch("ebbtide.runtime.engine.CpuDevice", machine.device):
            handle = offload(net)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(STEPS):
        loss = model(torch.randn(ROWS, WIDTH, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    stats = None if handle is None else handle.stats
    if handle is not None:
        handle.detach()
    return seen + [p.detach().clone() for p in net.parameters()], stats


def check_tiered(machine: Machine) -> dict[str, Any]:
    """A rank's part of the budget has room for less than it offloads: the disk has the rest."""
    plain, _ = train(machine, None)
    got, stats = train(
        machine,
        lambda net: ebbtide.offload(
            net, activations=EVERYTHING, store="tiered", host_budget=f"{BUDGET_BYTES}B/node"
        ),
    )
    return {
        "same": len(got) == len(plain) and all(map(torch.equal, got, plain)),
        "disk_bytes": stats.peak_disk_bytes,
        "host_bytes": stats.peak_host_bytes,
        "capacity_bytes": stats.host_capacity_bytes,
    }


def check_host(machine: Machine) -> dict[str, Any]:
    """Without a tier below, the error says whose budget is too small."""
    try:
        train(
            machine,
            lambda net: ebbtide.offload(
                net, activations=EVERYTHING, store="host", host_budget=f"{MIB}B/node"
            ),
        )
    except StoreFullError as error:
        return {"reason": str(error)}
    return {"reason": "it fits"}


CHECKS = {
    "activations": check_activations,
    "weights": check_weights,
    "gradients": check_gradients,
    "tiered": check_tiered,
    "host": check_host,
}


def run_rank(rank: int, directory: Path, world: int, names: list[str]) -> None:
    torch.set_num_threads(1)
    rendezvous = "env://" if "RANK" in os.environ else f"file://{directory}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    machine = Machine(directory / "machine", rank, world)
    seen: dict[str, Any] = {}
    for name in names:
        dist.barrier()
        machine.peak_bytes = 0
        seen[name] = CHECKS[name](machine)
        seen[name]["peak_bytes"] = machine.peak_bytes
    (directory / f"rank{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    directory, world, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if "RANK" in os.environ:
        run_rank(int(os.environ["RANK"]), directory, world, names)
    else:
        mp.start_processes(run_rank, (directory, world, names), nprocs=world, start_method="fork")


if __name__ == "__main__":
    main()
