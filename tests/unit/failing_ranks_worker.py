"""Two ranks, of which one fails in its second step. Run by test_failing_ranks.py.

torchrun ... failing_ranks_worker.py DIRECTORY KIND FAILURE: fails as a user's script does.
failing_ranks_worker.py DIRECTORY KIND:FAILURE ...: forks the ranks of each case. The rank that is
left goes on, and writes to DIRECTORY/KIND-FAILURE/rank*.json what the failure has left behind.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # DDP and FSDP2 import it, and forked processes would do so each time
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ebbtide
from ebbtide.devices import CpuDevice
from open_files import num_open
from page_locks import PageLocks

WIDTH, ROWS, BLOCKS, WORLD = 64, 1024, 4, 2
LONG_S = 100.0
EVERYTHING = ebbtide.ActivationPolicy(min_bytes=1024, rebuild=False)
# By kind: what wraps the model, and the store; further arguments of `ebbtide.offload`.
MORE: dict[str, dict[str, Any]] = {
    "ddp-tiered": {"host_budget": "2MiB/node"},
    "ddp-host": {"weights": ebbtide.WeightPolicy(min_bytes=1), "host_budget": "8MiB/node"},
    "ddp-disk": {"weights": ebbtide.WeightPolicy(min_bytes=1)},
    "fsdp2-disk": {},
}


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)]
    )


class Rank:
    """One rank and its model, which is offloaded and trained.

    Args:
        kind: how the model is wrapped, and where its bytes go.
        directory: where files go.

    Attributes:
        locks: what each device has page-locked; the devices are CPUs in place of accelerators.
    """

    def __init__(self, kind: str, directory: Path) -> None:
        self.locks: list[PageLocks] = []
        wrapper, store = kind.split("-")
        where = store if store == "host" else f"{store}:{directory}"
        how = {"activations": EVERYTHING, "store": where} | MORE[kind]
        self.net = make()
        with self.device() if store != "disk" else contextlib.nullcontext():
            self.handle = ebbtide.offload(self.net, **how)
        if wrapper == "ddp":
            self.model: nn.Module = DistributedDataParallel(self.net)
        else:
            for block in self.net:
                fully_shard(block)
            self.model = fully_shard(self.net)

    @contextlib.contextmanager
    def device(self) -> Iterator[None]:
        def make_device() -> CpuDevice:
            device = CpuDevice()
            device.computes_on_host = False
            self.locks.append(PageLocks(device))
            return device

        with mock.patch("ebbtide.runtime.engine.CpuDevice", make_device):
            yield

    def step(self) -> None:
        self.model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        self.model.zero_grad()

    @property
    def locked_bytes(self) -> int:
        return sum(locks.size_bytes for locks in self.locks)


def fail_in(net: nn.Sequential, failure: str, begun: Callable[[], None]) -> None:
    """Have the next step fail in the middle of its forward or its backward."""

    def fail(*_: object) -> None:
        begun()
        if failure == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if failure == "interrupt":
            time.sleep(LONG_S)
        raise RuntimeError("rank 1 is ill")

    def watch(_: nn.Module, __: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fail)

    if failure == "forward":
        net[BLOCKS // 2].register_forward_pre_hook(fail)
    else:
        net[BLOCKS // 2].register_forward_hook(watch)


def run_script(directory: Path, kind: str, failure: str) -> None:
    """What a user's script does, under torchrun."""
    dist.init_process_group("gloo")
    rank = Rank(kind, directory / "files")
    rank.step()
    if dist.get_rank() == 1:
        fail_in(rank.net, failure, (directory / "begun").touch)
    rank.step()
    dist.destroy_process_group()


def train_alone(directory: Path) -> bool:
    """Whether a new model trains to the same bits with and without offload."""
    plain, net = make(), make()
    how = {"activations": EVERYTHING, "store": f"disk:{directory}"}
    with ebbtide.offload(net, **how):
        for model in (plain, net):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
            model(x).square().mean().backward()
        return all(map(torch.equal, gradients(plain), gradients(net)))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def survive(number: int, directory: Path, kind: str, failure: str) -> None:
    """Fail, or be left by who fails. Catch the error, give all back, and go on alone."""
    torch.set_num_threads(1)
    files = directory / "files"
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=number, world_size=WORLD
    )
    rank = Rank(kind, files)
    rank.step()
    taken_bytes, taken_files = rank.locked_bytes, num_open(files)
    if number == 1:
        fail_in(rank.net, failure, lambda: None)
    error = "none"
    try:
        rank.step()
    except RuntimeError as raised:
        error = str(raised)
    rank.handle.detach()
    locks, parameters = rank.locks, all(p.device.type == "cpu" for p in rank.net.parameters())
    del rank
    gc.collect()
    seen = {
        "error": error,
        "taken": [taken_bytes, taken_files],
        "left": [sum(each.size_bytes for each in locks), num_open(files)],
        "trains": train_alone(files),
        "parameters": parameters,
    }
    (directory / f"rank{number}.json").write_text(json.dumps(seen))
    os._exit(0)  # as the end of a process does, without a word to the others


def run_cases(directory: Path, cases: list[str]) -> None:
    for case in cases:
        kind, failure = case.split(":")
        of_case = directory / f"{kind}-{failure}"
        (of_case / "files").mkdir(parents=True)
        arguments = (of_case, kind, failure)
        begun_s = time.monotonic()
        ranks = mp.start_processes(survive, arguments, WORLD, join=False, start_method="fork")
        deadline_s = begun_s + LONG_S
        for process in ranks.processes:
            process.join(max(0, deadline_s - time.monotonic()))
        codes = [process.exitcode for process in ranks.processes]
        for process in ranks.processes:
            process.kill()
        took_s = time.monotonic() - begun_s
        (of_case / "end.json").write_text(json.dumps({"codes": codes, "seconds": took_s}))


def main() -> None:
    directory, arguments = Path(sys.argv[1]), sys.argv[2:]
    if "RANK" in os.environ:
        run_script(directory, *arguments)
    else:
        run_cases(directory, arguments)


if __name__ == "__main__":
    main()
