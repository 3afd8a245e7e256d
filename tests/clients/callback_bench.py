"""Trainers of Transformers for a tiny GPT-2, and what they are compared by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import ebbtide
from run_program import weights_digest

LENGTH = 32
ROWS = torch.randint(0, 64, (64, LENGTH), generator=torch.Generator().manual_seed(0))
DATA = [{"input_ids": row, "labels": row} for row in ROWS]
SMALL = ebbtide.ActivationPolicy(min_bytes=4096)
DEFAULTS: dict[str, Any] = {
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "max_steps": 4,
    "logging_steps": 1,
    "eval_steps": 2,
    "save_steps": 2,
}


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=3,
        n_head=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    return GPT2LMHeadModel(config)


def trainer_for(
    model: Any, folder: Path, callbacks: Sequence[TrainerCallback] = (), **options: Any
) -> Trainer:
    arguments = TrainingArguments(str(folder), **(DEFAULTS | options))
    return Trainer(
        model, arguments, train_dataset=DATA, eval_dataset=DATA[:8], callbacks=list(callbacks)
    )


def losses_of(trainer: Trainer) -> list[str]:
    """All losses of the history, of training and of evaluation, with every bit."""
    names = ("loss", "eval_loss", "train_loss")
    history = trainer.state.log_history
    found = [float(log[name]).hex() for log in history for name in names if name in log]
    assert found
    return found


def results(trainer: Trainer, model: nn.Module | None = None) -> tuple[list[str], str]:
    return losses_of(trainer), weights_digest(model or trainer.model)


def assert_is_plain(model: nn.Module) -> None:
    """Nothing of ebbtide is left on a model."""
    for module in model.modules():
        for value in [*vars(module).values(), *module._forward_hooks.values()]:
            assert not type(value).__module__.startswith("ebbtide"), value
