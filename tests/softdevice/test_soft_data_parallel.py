"""Data parallel training of two ranks on the software accelerator, with gloo through the host."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ebbtide
from data_parallel_worker import BUDGET_BYTES, ROWS, STEPS, WIDTH, WORLD
from ebbtide import PolicyError
from softdevice import process_group

HERE = Path(__file__).parent
LIMIT_S = 200


def run_ranks(*commands: list[str]) -> list[str]:
    """Run Python at once with the arguments of each rank. Returns the last line of each."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    lines = []
    try:
        for rank in ranks:
            output, errors = rank.communicate(timeout=LIMIT_S)
            assert rank.returncode == 0, errors[-3000:]
            lines.append(output.splitlines()[-1])
    finally:
        for rank in ranks:
            rank.kill()
    return lines


@pytest.mark.parametrize("order", ["threads", "compute-first"])
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["ddp", "ddp-tiered", "ddp-weights", "fsdp2", "fsdp2-cpu"])
def test_offloaded_training_is_the_plain_one(kind: str, order: str, tmp_path: Path) -> None:
    script, rendezvous = str(HERE / "data_parallel_worker.py"), str(tmp_path / "rendezvous")
    ranks = ([script, kind, str(rank), rendezvous, order] for rank in range(WORLD))
    answers = [json.loads(output) for output in run_ranks(*ranks)]
    for answer in answers:
        assert len(set(answer["plain"])) == STEPS
        assert answer["offloaded"] == answer["plain"]
        # Of four layers, each saves its input and, for its GELU, the linear map's result.
        assert kind == "ddp-weights" or answer["bytes"] >= 4 * ROWS * WIDTH * 4
    if kind == "ddp-tiered":
        # 16 times as many rows are 512 KiB or more on each rank, which may take 256 KiB.
        assert all(answer["disk_bytes"] > 0 for answer in answers)
        host_bytes = [answer["host_bytes"] for answer in answers]
        assert min(host_bytes) > 0
        assert sum(host_bytes) <= BUDGET_BYTES
    # Each rank has rows of its own, and the weights of both.
    assert answers[0]["plain"] != answers[1]["plain"]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of this process alone, which takes itself for one of two."""
    process_group.register()
    dist.init_process_group(process_group.NAME, store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr("ebbtide.runtime.torch_internals.num_processes", lambda: 2)
    yield
    dist.destroy_process_group()


def _wrapped(device: torch.device) -> tuple[nn.Module, DistributedDataParallel, torch.Tensor]:
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
    model = nn.Sequential(*blocks).to(device)
    return model, DistributedDataParallel(model), torch.randn(ROWS, WIDTH).to(device)


@pytest.mark.usefixtures("group")
def test_weights_that_are_wrapped_already_cannot_rest(device: torch.device) -> None:
    """Torch would add up no gradient of them, and each rank train a model of its own."""
    model, wrapped, x = _wrapped(device)
    with pytest.raises(PolicyError):
        ebbtide.offload(wrapped, weights=ebbtide.WeightPolicy())
    with ebbtide.offload(model, weights=ebbtide.WeightPolicy()):
        with pytest.raises(PolicyError):
            wrapped(x)
        model(x)  # past the wrapper, which adds up nothing then, as without an offload


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("outer", [False, True])
def test_a_budget_leaves_weights_that_are_wrapped_on_the_device(
    device: torch.device, outer: bool
) -> None:
    model, wrapped, x = _wrapped(device)
    # 4 layers with WIDTH x WIDTH weights, their gradients and what an Adam needs are 5 times this.
    weight_bytes = 4 * (WIDTH * WIDTH + WIDTH) * 4
    before_bytes = torch.accelerator.memory_allocated()
    # So those of the wrapper would rest at once, and those inside it when no plan fits.
    budget = before_bytes + (3 if outer else 8) * weight_bytes
    with ebbtide.offload(wrapped if outer else model, budget=budget):
        filler = torch.empty(6 * weight_bytes, dtype=torch.uint8, device=device)
        with contextlib.suppress(ebbtide.BudgetError):
            for _ in range(3):
                assert {parameter.device for parameter in model.parameters()} == {device}
                wrapped(x).square().mean().backward()
        assert {parameter.device for parameter in model.parameters()} == {device}
        del filler


@pytest.mark.usefixtures("group")
def test_a_model_that_is_wrapped_on_the_host_is_not_moved(device: torch.device) -> None:
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    with pytest.raises(PolicyError):
        ebbtide.offload(wrapped, device=device, budget="90%")


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("budget", ["90%", None])
def test_a_budget_leaves_shards_on_the_host_where_fsdp2_keeps_them(
    device: torch.device, budget: str | None
) -> None:
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
    model = nn.Sequential(*blocks).to(device)
    mesh = init_device_mesh(device.type, (1,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy())
    x = torch.randn(ROWS, WIDTH).to(device)
    with ebbtide.offload(model, budget=budget) as handle:
        for _ in range(3):
            model(x).square().mean().backward()
        assert handle.plan is not None
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.device == parameter.grad.device == torch.device("cpu")


@pytest.mark.usefixtures("group")
def test_weights_that_are_wrapped_may_rest_where_one_process_trains(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.runtime.torch_internals.num_processes", lambda: 1)
    model, wrapped, x = _wrapped(device)
    with ebbtide.offload(model, weights=ebbtide.WeightPolicy()):
        wrapped(x).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
