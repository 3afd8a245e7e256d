"""The recipes for Accelerate: offloaded before `prepare` or after it, the same to the bit."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="these are its users' loops")

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ebbtide
from run_program import weights_digest

RUN_ALL = os.environ.get("EBBTIDE_CLIENTS") == "all"
SMALL = ebbtide.ActivationPolicy(min_bytes=1024)
X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)]
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def forget_accelerator() -> None:
    """Let the next Accelerator of this process have settings of its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    yield
    forget_accelerator()


def have_models_sharded(layer: str) -> None:
    """Have `prepare` shard models with FSDP2, which Accelerate itself does on accelerators only.

    Args:
        layer: name of the class whose modules are sharded each by itself.
    """
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[layer],
    )
    state = {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    AcceleratorState._shared_state.update(state)


def train(when: str, folder: Path, epochs: int = 1, **options: Any) -> list[str]:
    """Train in the way of Accelerate's own examples; returns the losses and the weights' digest.

    Args:
        when: ``"before"`` or ``"after"`` prepare, or ``"never"``.
        folder: where the state is saved after the first epoch.
        epochs: how many; the second one begins with what was saved, as a resumed run would.
        options: ``offload`` for `ebbtide.offload`, ``resume``, ``sharded``, and the Accelerator's.
    """
    offload = options.pop("offload", {"activations": SMALL})
    resume, sharded = options.pop("resume", False), options.pop("sharded", False)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True, **options)
    if sharded:
        have_models_sharded("Sequential")
    model: nn.Module = Net()
    handle = None
    if when == "before":
        handle = ebbtide.offload(model, **offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(X, batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if when == "after":
        handle = ebbtide.offload(model, **offload)
    if resume:
        accelerator.load_state(str(folder))
    losses = []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = (model(batch) - batch).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item().hex())
        if not (resume or sharded):  # Accelerate saves no shards of a model on a CPU
            accelerator.save_state(str(folder))
    if handle is not None:
        assert handle.stats.num_saved > 0
        assert "budget" in offload or handle.stats.offloaded_bytes > 0
        assert "budget" not in offload or handle.plan is not None
        for file in folder.rglob("*"):
            assert not file.is_file() or b"ebbtide" not in file.read_bytes()
        handle.detach()
    plain = accelerator.unwrap_model(model)
    assert isinstance(plain, Net)
    assert hasattr(next(plain.parameters()), "to_local") == sharded
    forget_accelerator()
    return [*losses, weights_digest(plain)]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(
    "offload",
    [
        {"activations": SMALL},
        {"budget": "90%"},
        {"activations": SMALL, "weights": ebbtide.WeightPolicy(min_bytes=0)},
    ],
    ids=lambda offload: " ".join(offload),
)
def test_same_bits(offload: dict[str, Any], precision: str, when: str, tmp_path: Path) -> None:
    plain = train("never", tmp_path / "plain", mixed_precision=precision)
    found = train(when, tmp_path / "found", mixed_precision=precision, offload=offload)
    assert found == plain


@pytest.mark.parametrize("first", ["never", "before", "after"])
@pytest.mark.parametrize("second", ["never", "before", "after"])
def test_resumed_is_as_uninterrupted(first: str, second: str, tmp_path: Path) -> None:
    whole = train("never", tmp_path / "whole", epochs=2)
    train(first, tmp_path / "half")
    resumed = train(second, tmp_path / "half", resume=True)
    assert resumed == whole[len(whole) // 2 :]


RANKS = """
import os, sys
import torch.distributed as dist
from pathlib import Path
from test_ways_accelerate import *

kind, when, folder = sys.argv[1:]
options = {"sharded": "FSDP2" in kind}
if "budget" in kind and when != "never":
    options["offload"] = {"budget": "90%"}
lines = train(when, Path(folder) / f"state {kind} {when}", epochs=2, **options)
(Path(folder) / f"{kind}_{when}_{os.environ['RANK']}.txt").write_text("\\n".join(lines))

# All is written. While the interpreter ends, torch's threads sometimes abort, with or without
# ebbtide, and after this seldom: pytorch#190489.
if dist.is_initialized():
    dist.destroy_process_group()
import os
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DDP", *(["DDP, budget", "FSDP2", "FSDP2, budget"] * RUN_ALL)])
def test_two_processes(kind: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("datasets") is not None:
        # Accelerate imports it then, and it may lack what it needs.
        pytest.importorskip("datasets", exc_type=ImportError, reason="it cannot be imported here")
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    places = [Path(__file__).parent, Path(ebbtide.__file__).parents[1]]
    paths = [*map(str, places), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    for when in ("never", "before", "after"):
        run = subprocess.run(
            [*launch, str(script), kind, when, str(tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-3000:]
    for rank in range(2):
        files = [tmp_path / f"{kind}_{when}_{rank}.txt" for when in ("never", "before", "after")]
        plain, *others = (file.read_text() for file in files)
        assert len(plain.splitlines()) == 9
        assert others == [plain, plain]


def step_inside_backward(max_norm: float | None, accumulation: int, *, overlaps: bool) -> list[str]:
    """Train as `train` does, clipping inside of the step if that overlaps."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if overlaps:
        handle = ebbtide.offload(model, weights=ebbtide.WeightPolicy())
        optimizer = handle.overlap(optimizer, max_norm=max_norm, shadow_budget="1GiB")
    wrapped, prepared, loader = accelerator.prepare(model, optimizer, DataLoader(X, batch_size=8))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))
    losses = []
    for batch in loader:
        with accelerator.accumulate(wrapped):
            loss = (wrapped(batch) - batch).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients and max_norm is not None and not overlaps:
                accelerator.clip_grad_norm_(wrapped.parameters(), max_norm)
            prepared.step()
            scheduler.step()
            prepared.zero_grad()
        losses.append(loss.item().hex())
    if overlaps:
        assert optimizer.overlap.num_steps == len(losses) // accumulation
        assert optimizer.overlap.num_overlapped == 0 or max_norm != 1e-3
        assert optimizer.overlap.num_overlapped > 0 or max_norm == 1e-3
    forget_accelerator()
    return [*losses, weights_digest(model)]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("max_norm", [None, 1e-3, 1e6])
def test_the_optimizer_steps_inside_backward(max_norm: float | None, accumulation: int) -> None:
    plain = step_inside_backward(max_norm, accumulation, overlaps=False)
    assert step_inside_backward(max_norm, accumulation, overlaps=True) == plain
