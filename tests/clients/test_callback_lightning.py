"""Lightning trains with the callback as it trains without, to the bit, in all that it offers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch", reason="the callback needs Lightning")

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

import ebbtide
from ebbtide.interop.lightning import OffloadCallback
from lightning_bench import (
    SMALL,
    BuiltLate,
    Manual,
    Plain,
    WithForward,
    WithoutDropout,
    assert_is_plain,
    build,
    results,
    trainer_for,
)
from run_program import weights_digest


class Watch(Callback):
    """Notes what the last step moved while training runs."""

    def __init__(self, offload: OffloadCallback) -> None:
        self.offload = offload
        self.moved: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        assert self.offload.handle is not None
        self.moved.append(self.offload.handle.stats.offloaded_bytes)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16-mixed"},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        {"detect_anomaly": True},
        {"barebones": True, "default_root_dir": None},
        {"max_steps": -1, "max_epochs": 2},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
@pytest.mark.parametrize("kind", [Plain, WithForward, Manual, BuiltLate])
def test_same_bits(kind: type[Plain], options: dict[str, Any], tmp_path: Path) -> None:
    if kind is Manual and "accumulate_grad_batches" in options:
        options = {}
    if "barebones" in options:
        left_out = ("progress_bar", "model_summary", "checkpointing")
        options = options | {f"enable_{name}": None for name in left_out}
        options |= {"logger": None, "log_every_n_steps": None}
    plain = build(kind)
    trainer_for(tmp_path, **options).fit(plain)
    model = build(kind)
    callback = OffloadCallback(activations=SMALL)
    watch = Watch(callback)
    trainer_for(tmp_path, callback, watch, **options).fit(model)
    assert results(model) == results(plain)
    assert min(watch.moved) > 0
    assert_is_plain(model)


def test_weights_rest(tmp_path: Path) -> None:
    plain, model = build(), build()
    trainer_for(tmp_path).fit(plain)
    callback = OffloadCallback(activations=SMALL, weights=ebbtide.WeightPolicy(min_bytes=0))
    trainer_for(tmp_path, callback).fit(model)
    assert results(model) == results(plain)
    assert_is_plain(model)


@pytest.mark.parametrize("kind", [Plain, WithForward])
def test_a_budget_is_planned(kind: type[Plain], tmp_path: Path) -> None:
    plain, model = build(kind), build(kind)
    trainer_for(tmp_path, max_steps=6).fit(plain)
    callback = OffloadCallback(budget="90%", activations=SMALL)
    trainer_for(tmp_path, callback, max_steps=6).fit(model)
    assert results(model) == results(plain)
    assert callback.handle is not None
    assert callback.handle.plan is not None


def test_a_budget_for_a_named_part(tmp_path: Path) -> None:
    plain, model = build(Manual), build(Manual)
    trainer_for(tmp_path, max_steps=12).fit(plain)
    callbacks = [OffloadCallback(module=name, budget="90%") for name in ("net", "other")]
    trainer_for(tmp_path, *callbacks, max_steps=12).fit(model)
    assert results(model) == results(plain)
    for callback in callbacks:
        assert callback.handle is not None
        assert callback.handle.plan is not None
    assert_is_plain(model)


def test_a_budget_that_no_forward_meets_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="budget-bypassed"):
        trainer_for(tmp_path, OffloadCallback(budget="90%"), max_steps=2).fit(build(Manual))


@pytest.mark.parametrize("weights", [None, ebbtide.WeightPolicy(min_bytes=0)], ids=["", "weights"])
def test_resumed_is_as_uninterrupted(weights: ebbtide.WeightPolicy | None, tmp_path: Path) -> None:
    """Half of the run with the callback and half without, either way round, and all with it."""

    def trainer(offloaded: bool, steps: int, **options: Any) -> Any:
        callback = OffloadCallback(activations=SMALL, weights=weights)
        callbacks = [callback] if offloaded else []
        return trainer_for(tmp_path, *callbacks, max_steps=steps, **options)

    whole = build(WithoutDropout)
    trainer(False, steps=8).fit(whole)
    for first, second in ((True, False), (False, True), (True, True)):
        half = trainer(first, steps=4, enable_checkpointing=True)
        half.fit(build(WithoutDropout))
        file = tmp_path / f"{first}.ckpt"
        half.save_checkpoint(file)
        assert b"ebbtide" not in file.read_bytes()
        resumed = build(WithoutDropout)
        trainer(second, steps=8).fit(resumed, ckpt_path=str(file))
        assert weights_digest(resumed) == weights_digest(whole)


def test_checkpoints_written_while_it_is_offloaded(tmp_path: Path) -> None:
    for folder, callbacks in (("plain", []), ("offloaded", [OffloadCallback(activations=SMALL)])):
        saver = ModelCheckpoint(tmp_path / folder, every_n_train_steps=1, save_top_k=-1)
        trainer_for(tmp_path, saver, *callbacks, enable_checkpointing=True).fit(build())
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert len(names) == 4
    for name in names:
        file = tmp_path / "offloaded" / name
        assert b"ebbtide" not in file.read_bytes()
        before, after = (
            torch.load(each, weights_only=False) for each in (tmp_path / "plain" / name, file)
        )
        assert before["state_dict"].keys() == after["state_dict"].keys()
        for key, value in before["state_dict"].items():
            assert torch.equal(value, after["state_dict"][key])


def test_figures_are_logged(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    callback = OffloadCallback(activations=SMALL, prog_bar=True)
    shown: list[dict[str, Any]] = []

    class Bar(TQDMProgressBar):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            shown.append(self.get_metrics(trainer, pl_module))
            super().on_train_batch_end(trainer, pl_module, *rest)

    trainer = trainer_for(tmp_path, callback, Bar(), logger=logger, enable_progress_bar=True)
    trainer.fit(build())
    assert callback.handle is not None
    stats = callback.handle.stats
    assert trainer.logged_metrics["ebbtide/offloaded_bytes"] == stats.offloaded_bytes > 0
    assert trainer.logged_metrics["ebbtide/peak_device_bytes"] == stats.peak_device_bytes > 0
    assert "ebbtide/stall_s" in trainer.logged_metrics
    header = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0]
    assert "ebbtide/peak_device_bytes" in header
    assert "ebbtide/stall_s" in shown[-1]


def test_validation_test_and_prediction_are_left_alone(tmp_path: Path) -> None:
    callback = OffloadCallback()
    trainer_for(tmp_path, callback).validate(build(), verbose=False)
    assert callback.handle is None


def test_a_callback_of_the_module(tmp_path: Path) -> None:
    class Brings(Plain):
        def configure_callbacks(self) -> list[Callback]:
            return [OffloadCallback(activations=SMALL)]

    plain, model = build(), build(Brings)
    trainer_for(tmp_path).fit(plain)
    trainer_for(tmp_path).fit(model)
    assert results(model) == results(plain)
    assert_is_plain(model)


def test_pytorch_lightning(tmp_path: Path) -> None:
    """The same callback in a trainer of the package's other name."""
    pytest.importorskip("pytorch_lightning", reason="this is the package's other name")
    code = f"""
import pytorch_lightning as pl, torch
from torch import nn
import ebbtide
from ebbtide.interop.lightning import OffloadCallback
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    def training_step(self, batch, index):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
callback = OffloadCallback(activations=ebbtide.ActivationPolicy(min_bytes=1024))
trainer = pl.Trainer(max_steps=2, logger=False, enable_checkpointing=False, accelerator="cpu",
                     enable_progress_bar=False, callbacks=[callback],
                     default_root_dir={str(tmp_path)!r})
trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=32))
assert callback.handle.stats.offloaded_bytes > 0
assert "ebbtide/stall_s" in trainer.logged_metrics
"""
    subprocess.run([sys.executable, "-c", code], check=True)
