"""Fits of Lightning that a tuner begins, that fail, or that several processes run."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch", reason="the callback needs Lightning")

import torch
from lightning.pytorch.callbacks import BatchSizeFinder, Callback
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ebbtide
from ebbtide.interop.lightning import OffloadCallback
from lightning_bench import (
    SMALL,
    Plain,
    X,
    assert_is_plain,
    build,
    results,
    trainer_for,
)


def test_the_tuner_tries_what_will_be_trained(tmp_path: Path) -> None:
    """Trials of batch sizes and of learning rates run with the offload that training runs with."""
    seen: list[bool] = []

    class Look(Plain):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(TensorDataset(X), batch_size=self.batch_size)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = super().training_step(batch, index)
            offloaded = any(
                "ebbtide" in type(hook).__module__ for hook in self._forward_hooks.values()
            )
            seen.append(offloaded)
            if len(batch[0]) > 32:
                raise RuntimeError("CUDA out of memory. Tried to allocate")
            return loss

    model = build(Look)
    trainer = trainer_for(tmp_path, OffloadCallback(activations=SMALL))
    size = Tuner(trainer).scale_batch_size(model, init_val=16, steps_per_trial=1, max_trials=3)
    assert size == 32
    assert len(seen) > 2
    assert all(seen)
    assert_is_plain(model)
    seen.clear()
    found = Tuner(trainer).lr_find(model, num_training=4)
    assert found is not None
    assert len(seen) >= 4
    assert all(seen)
    assert_is_plain(model)
    seen.clear()
    callbacks = [
        OffloadCallback(activations=SMALL),
        BatchSizeFinder(init_val=16, max_trials=1, steps_per_trial=1),
    ]
    trainer_for(tmp_path, *callbacks).fit(build(Look))
    assert all(seen)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt], ids=lambda kind: kind.__name__)
def test_an_error_puts_the_module_back(error: type[BaseException], tmp_path: Path) -> None:
    class Fails(Plain):
        fails = True

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = super().training_step(batch, index)
            if self.fails and index == 1:
                raise error("stop")
            return loss

    def train(callbacks: list[Callback]) -> tuple[list[str], str]:
        model = build(Fails)
        # Lightning ends the process after Ctrl-C.
        with pytest.raises((error, SystemExit)):
            trainer_for(tmp_path, *callbacks).fit(model)
        assert_is_plain(model)
        model.fails = False
        trainer_for(tmp_path, *callbacks).fit(model)
        return results(model)

    assert train([OffloadCallback(activations=SMALL)]) == train([])


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": "20 apples"}, "budget"),
        ({"prog_bar": 3}, "prog_bar must be"),
        ({"module": nn.Linear(1, 1)}, 'a name such as "net"'),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ebbtide.PolicyError, match=message):
        OffloadCallback(**arguments)


def test_an_unknown_part_is_named(tmp_path: Path) -> None:
    with pytest.raises(ebbtide.PolicyError):
        trainer_for(tmp_path, OffloadCallback(module="unet")).fit(build())


def test_two_callbacks_for_one_module(tmp_path: Path) -> None:
    with pytest.raises(ebbtide.PolicyError):
        trainer_for(tmp_path, OffloadCallback(), OffloadCallback()).fit(build())


def test_a_copy_of_the_callback_offloads_nothing_yet(tmp_path: Path) -> None:
    callback = OffloadCallback(activations=SMALL)
    trainer_for(tmp_path, callback).fit(build())
    for copied in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert copied.handle is None
        trainer_for(tmp_path, copied).fit(build())
        assert copied.handle.stats.offloaded_bytes > 0


# ---- several processes ---------------------------------------------------------------------------

RANKS = """
import sys, torch, lightning.pytorch as lightning
import torch.distributed as dist
from pathlib import Path
from torch.distributed.fsdp import fully_shard
from lightning.pytorch.strategies import ModelParallelStrategy
from ebbtide.interop.lightning import OffloadCallback
from lightning_bench import *

kind, mode, folder = sys.argv[1:]

class Sharded(Plain):
    def configure_model(self):
        if not hasattr(self.net[0].weight, "device_mesh"):
            mesh = self.device_mesh["data_parallel"]
            for block in self.net:
                fully_shard(block, mesh=mesh)

model = build({"ddp": Plain, "ddp forward": WithForward, "fsdp2": Sharded}[kind])
callbacks = []
if mode == "offloaded":
    budget = {"budget": "90%"} if kind == "ddp forward" else {}
    callbacks.append(OffloadCallback(activations=SMALL, **budget))
strategy = "ddp" if kind.startswith("ddp") else ModelParallelStrategy(process_group_backend="gloo")
trainer = trainer_for(folder, *callbacks, strategy=strategy, devices=2, max_steps=4)
trainer.fit(model)
if callbacks:
    handle = callbacks[0].handle
    assert not budget or handle.plan is not None
    assert budget or handle.stats.offloaded_bytes > 0
    assert_is_plain(model)
text = "\\n".join([*model.losses, weights_digest(model)])
(Path(folder) / f"{kind}_{mode}_{trainer.global_rank}.txt").write_text(text)

# All is written. While the interpreter ends, torch's threads sometimes abort, with or without
# ebbtide, and after this seldom: pytorch#190489.
if dist.is_initialized():
    dist.destroy_process_group()
import os
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "ddp forward", "fsdp2"])
def test_two_processes(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    here = Path(__file__).parent
    paths = [str(here), str(Path(ebbtide.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    for mode in ("plain", "offloaded"):
        run = subprocess.run(
            [*launch, str(script), kind, mode, str(tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-3000:]
    for rank in range(2):
        plain, offloaded = (
            (tmp_path / f"{kind}_{mode}_{rank}.txt").read_text() for mode in ("plain", "offloaded")
        )
        assert plain == offloaded
        assert len(plain.splitlines()) > 3


class Scheduled(Plain):
    """Its optimizer may step inside backward, and clip by itself then."""

    clips: float | None = None
    overlaps = False

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        if self.overlaps:
            handle = ebbtide.offload(self.net, weights=ebbtide.WeightPolicy())
            handle.overlap(optimizer, max_norm=self.clips, shadow_budget="1GiB")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clips", [None, 1e-3, 1e6])
def test_the_optimizer_steps_inside_backward(
    clips: float | None, accumulation: int, tmp_path: Path
) -> None:
    found = []
    for overlaps in (False, True):
        model = build(Scheduled)
        model.clips, model.overlaps = clips, overlaps
        val = None if overlaps else clips
        options = {"accumulate_grad_batches": accumulation, "max_epochs": 3, "max_steps": -1}
        trainer = trainer_for(tmp_path, gradient_clip_val=val, **options)
        trainer.fit(model)
        if overlaps:
            stats = trainer.optimizers[0].overlap
            assert stats.num_steps == 3 * 4 // accumulation
            assert bool(stats.num_overlapped) == (clips != 1e-3)
        found.append(results(model))
    assert found[0] == found[1]
