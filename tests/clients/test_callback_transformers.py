"""A `Trainer` trains with the callback as it trains without, to the bit, in all that it offers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

# The Trainer imports `datasets` where that is installed, which in turn may lack what it needs.
pytest.importorskip(
    "transformers.trainer", exc_type=ImportError, reason="the Trainer cannot be imported here"
)

import torch
from torch import nn
from transformers import (
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)

import ebbtide
from callback_bench import (
    DATA,
    DEFAULTS,
    SMALL,
    assert_is_plain,
    gpt2,
    losses_of,
    results,
    trainer_for,
)
from ebbtide.interop.transformers import OffloadCallback
from run_program import weights_digest

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "evaluates and saves": {
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "load_best_model_at_end": True,
        "eval_on_start": True,
    },
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "accumulates": {"gradient_accumulation_steps": 2, "dataloader_num_workers": 2},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "NEFTune": {"neftune_noise_alpha": 5},
}


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    plain = trainer_for(gpt2(), tmp_path / "plain", **options)
    plain.train()
    callback = OffloadCallback(activations=SMALL)
    model = gpt2()
    trainer = trainer_for(model, tmp_path / "offloaded", [callback], **options)
    trainer.train()
    assert results(trainer) == results(plain)
    assert callback.handle is not None
    assert callback.handle.stats.offloaded_bytes > 0
    assert trainer.model is model
    assert_is_plain(model)


@pytest.mark.parametrize("bf16", [False, True], ids=["", "bf16"])
def test_a_budget(bf16: bool, tmp_path: Path) -> None:
    plain = trainer_for(gpt2(), tmp_path, max_steps=6, bf16=bf16)
    plain.train()
    callback = OffloadCallback(budget="90%", activations=SMALL)
    trainer = trainer_for(gpt2(), tmp_path, [callback], max_steps=6, bf16=bf16)
    trainer.train()
    assert results(trainer) == results(plain)
    assert callback.handle is not None
    assert callback.handle.plan is not None
    assert_is_plain(trainer.model)


def test_weights_rest_and_are_saved(tmp_path: Path) -> None:
    """Checkpoints, the best model and the end all meet weights that rest in files."""
    options = OPTIONS["evaluates and saves"]
    plain = trainer_for(gpt2(), tmp_path / "plain", **options)
    plain.train()
    callback = OffloadCallback(activations=SMALL, weights=ebbtide.WeightPolicy(min_bytes=0))
    trainer = trainer_for(gpt2(), tmp_path / "offloaded", [callback], **options)
    trainer.train()
    assert results(trainer) == results(plain)
    assert callback.handle is not None
    for step in (2, 4):
        files = [tmp_path / kind / f"checkpoint-{step}" for kind in ("plain", "offloaded")]
        before, after = (GPT2LMHeadModel.from_pretrained(file) for file in files)
        assert weights_digest(before) == weights_digest(after)


@pytest.mark.parametrize("weights", [None, ebbtide.WeightPolicy(min_bytes=0)], ids=["", "weights"])
@pytest.mark.parametrize("first", [True, False], ids=["offloaded first", "plain first"])
def test_resumed_is_as_uninterrupted(
    first: bool, weights: ebbtide.WeightPolicy | None, tmp_path: Path
) -> None:
    """Half the run with the callback and half without, either way round, and all with it."""
    whole = trainer_for(gpt2(), tmp_path / "whole", save_strategy="steps")
    whole.train()

    def callbacks(offloaded: bool) -> list[TrainerCallback]:
        return [OffloadCallback(activations=SMALL, weights=weights)] if offloaded else []

    trainer_for(gpt2(), tmp_path, callbacks(first), save_strategy="steps").train()
    for offloaded in (not first, True):
        resumed = trainer_for(gpt2(), tmp_path / "again", callbacks(offloaded))
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert losses_of(resumed)[:4] == losses_of(whole)[:4]
        assert weights_digest(resumed.model) == weights_digest(whole.model)


def test_saved_files_name_no_ebbtide(tmp_path: Path) -> None:
    keys = set(gpt2().state_dict())

    class Look(TrainerCallback):
        def on_step_end(self, *_: Any, **kwargs: Any) -> None:
            model = kwargs["model"]
            assert set(model.state_dict()) == keys
            torch.save(model.state_dict(), tmp_path / "weights.pt")
            copied = copy.deepcopy(model)
            assert weights_digest(copied) == weights_digest(model)
            ebbtide.offload(copied, activations=SMALL)
            torch.save(model, tmp_path / "whole.pt")
            whole = torch.load(tmp_path / "whole.pt", weights_only=False)
            ebbtide.offload(whole, activations=SMALL)

    callback = OffloadCallback(activations=SMALL)
    trainer = trainer_for(
        gpt2(), tmp_path, [callback, Look()], save_strategy="steps", save_total_limit=1
    )
    trainer.train()
    # Only the history of logs has figures of that name. A model that was pickled as a whole while
    # it was offloaded is plain, and can be read where ebbtide is not installed.
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    named = {file.name for file in files if b"ebbtide" in file.read_bytes()}
    assert named == {"trainer_state.json"}
    assert {"model.safetensors", "optimizer.pt", "weights.pt"} <= {file.name for file in files}


def test_figures_reach_the_history_and_every_callback(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    class Report(TrainerCallback):
        """As Weights & Biases: the Trainer has it before its user's callbacks."""

        def on_log(self, *_: Any, **kwargs: Any) -> None:
            seen.append(dict(kwargs["logs"]))

    trainer = trainer_for(
        gpt2(), tmp_path, [Report()], gradient_accumulation_steps=2, logging_steps=2
    )
    callback = OffloadCallback(activations=SMALL)
    trainer.add_callback(callback)
    order = [type(each) for each in trainer.callback_handler.callbacks]
    trainer.train()
    now = [type(each) for each in trainer.callback_handler.callbacks]
    assert now == [OffloadCallback, *(each for each in order if each is not OffloadCallback)]
    names = {"ebbtide/peak_device_bytes", "ebbtide/offloaded_bytes", "ebbtide/stall_s"}
    training = [log for log in trainer.state.log_history if "loss" in log]
    assert len(training) == 2
    for log in training:
        assert {name for name in log if name.startswith("ebbtide/")} == names
    # Two microbatches of the same size belong to one update of the weights.
    assert callback.handle is not None
    last = callback.handle.stats
    assert training[-1]["ebbtide/offloaded_bytes"] == 2 * last.offloaded_bytes
    assert training[-1]["ebbtide/peak_device_bytes"] >= last.peak_device_bytes > 0
    assert [log for log in seen if "loss" in log] == [
        {name: value for name, value in log.items() if name != "step"} for log in training
    ]
    assert not names & next(log for log in trainer.state.log_history if "train_loss" in log).keys()


def test_generation_in_evaluation(tmp_path: Path) -> None:
    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )

    def train(callbacks: list[TrainerCallback]) -> tuple[list[str], str, list[Any]]:
        torch.manual_seed(0)
        generated: list[Any] = []

        def metrics(prediction: Any) -> dict[str, float]:
            generated.append(prediction.predictions.tolist())
            return {"length": float(prediction.predictions.shape[1])}

        options = DEFAULTS | {"eval_strategy": "steps", "predict_with_generate": True}
        trainer = Seq2SeqTrainer(
            T5ForConditionalGeneration(config),
            Seq2SeqTrainingArguments(str(tmp_path), generation_max_length=6, **options),
            train_dataset=DATA,
            eval_dataset=DATA[:8],
            compute_metrics=metrics,
            callbacks=callbacks,
        )
        trainer.train()
        return *results(trainer), generated

    offloaded = train([OffloadCallback(activations=SMALL)])
    assert offloaded == train([])
    assert len(offloaded[2]) == 2


def test_a_model_that_is_no_transformer(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            out = self.blocks(input_ids.float())
            return {"loss": (out - labels).square().mean(), "logits": out}

    def train(callbacks: list[TrainerCallback]) -> tuple[list[str], str]:
        torch.manual_seed(0)
        trainer = trainer_for(Net(), tmp_path, callbacks)
        trainer.train()
        return results(trainer)

    policy = ebbtide.ActivationPolicy(min_bytes=64)
    assert train([OffloadCallback(activations=policy)]) == train([])
