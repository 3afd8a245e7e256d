"""The ways in which language models are trained: Transformers, PEFT, TRL, Accelerate."""

from __future__ import annotations

import argparse
import copy
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    ByT5Tokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from ways import Attach, assert_same_with_and_without

Trained = tuple[Sequence[float], nn.Module]

LENGTH = 64
SOURCE = inspect.getsource(argparse)
ROWS = torch.tensor(list(SOURCE.encode()))[: 64 * LENGTH].view(64, LENGTH)
BATCH = ROWS[:8]
TOKENIZER = ByT5Tokenizer()
FROM_TRL = {"save_strategy": "no", "report_to": "none", "bf16": False, "max_steps": 3}


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2)
    )


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(TOKENIZER),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            pad_token_id=TOKENIZER.pad_token_id,
            eos_token_id=TOKENIZER.eos_token_id,
        )
    )


def run_steps(model: Any, count: int) -> list[float]:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3)
    losses = []
    for _ in range(count):
        loss = model(input_ids=BATCH, labels=BATCH).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def logged_losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("first", ["offload", "trainer"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True},
        {"bf16": True, "use_cpu": True},
        {"gradient_checkpointing": True},
        {"gradient_accumulation_steps": 2, "dataloader_num_workers": 2},
        {"label_smoothing_factor": 0.1},
    ],
    ids=["plain", "evaluates and saves", "bf16", "checkpointing", "accumulates", "smoothing"],
)
def test_transformers_trainer(options: dict[str, Any], first: str, tmp_path: Path) -> None:
    data = [{"input_ids": row, "labels": row} for row in ROWS]
    defaults = {"save_strategy": "no", "report_to": "none", "max_steps": 4, "logging_steps": 1}
    defaults |= {"eval_steps": 2, "save_steps": 2}

    def train(attach: Attach) -> Trained:
        model = gpt2()
        if first == "offload":
            attach(model)
        arguments = TrainingArguments(str(tmp_path), **(defaults | options))
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8])
        if first == "trainer":
            attach(trainer.model)
        trainer.train()
        return logged_losses(trainer), model

    assert_same_with_and_without(train)


@pytest.mark.parametrize("first", ["offload", "adapters"])
def test_peft_switches_its_adapters_off_and_merges_them(first: str, tmp_path: Path) -> None:
    def train(attach: Attach) -> Trained:
        base = gpt2()
        if first == "offload":
            attach(base)
        model = get_peft_model(base, LoraConfig(target_modules="all-linear", fan_in_fan_out=True))
        if first == "adapters":
            attach(model)
        losses = run_steps(model, 2)
        with torch.no_grad(), model.disable_adapter():
            losses.append(model(input_ids=BATCH, labels=BATCH).loss.item())
        model.save_pretrained(tmp_path)
        merged = model.merge_and_unload().requires_grad_(True)
        return losses + run_steps(merged, 2), merged

    assert_same_with_and_without(train)


@pytest.mark.parametrize("first", ["offload", "trainer"])
@pytest.mark.parametrize("options", [{}, {"loss_type": "nll"}], ids=["default loss", "nll"])
def test_trl_supervised(options: dict[str, Any], first: str, tmp_path: Path) -> None:
    texts = [{"text": SOURCE[at : at + LENGTH]} for at in range(0, 16 * LENGTH, LENGTH)]

    def train(attach: Attach) -> Trained:
        model = llama()
        if first == "offload":
            attach(model)
        settings = {"max_length": LENGTH, "logging_steps": 1, "gradient_checkpointing": False}
        trainer = SFTTrainer(
            model,
            SFTConfig(str(tmp_path), **(FROM_TRL | settings | options)),
            train_dataset=Dataset.from_list(texts),
            processing_class=TOKENIZER,
        )
        if first == "trainer":
            attach(trainer.model)
        trainer.train()
        return logged_losses(trainer), model

    assert_same_with_and_without(train)


@pytest.mark.parametrize("first", ["offload", "trainer"])
def test_trl_preferences_beside_a_copy_of_the_model(first: str, tmp_path: Path) -> None:
    pieces = [SOURCE[at : at + 30] for at in range(0, 48 * 30, 30)]
    rows = [
        dict(zip(("prompt", "chosen", "rejected"), pieces[at : at + 3], strict=True))
        for at in range(0, 48, 3)
    ]

    def train(attach: Attach) -> Trained:
        model = llama()
        if first == "offload":
            attach(model)
        settings = {"logging_steps": 1, "gradient_checkpointing": False}
        trainer = DPOTrainer(
            model,
            copy.deepcopy(model),
            DPOConfig(str(tmp_path), **(FROM_TRL | settings)),
            train_dataset=Dataset.from_list(rows),
            processing_class=TOKENIZER,
        )
        if first == "trainer":
            attach(trainer.model)
        trainer.train()
        return logged_losses(trainer), model

    assert_same_with_and_without(train)


@pytest.mark.parametrize(
    "keep_wrapper",
    [
        True,
        False,
    ],
)
def test_accelerate_unwraps_a_model(keep_wrapper: bool) -> None:
    def train(attach: Attach) -> Trained:
        AcceleratorState._reset_state(reset_partial_state=True)
        model = gpt2()
        attach(model)
        accelerator = Accelerator(mixed_precision="bf16")
        prepared = accelerator.prepare(model)
        losses = run_steps(prepared, 2)
        unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=keep_wrapper)
        AcceleratorState._reset_state(reset_partial_state=True)
        return losses + run_steps(unwrapped, 2), model

    assert_same_with_and_without(train)


@pytest.mark.parametrize("first", ["offload", "hook"])
def test_accelerate_hooks_replace_the_forward(first: str) -> None:
    def train(attach: Attach) -> Trained:
        model = gpt2()
        if first == "offload":
            attach(model)
        add_hook_to_module(model, ModelHook())
        if first == "hook":
            attach(model)
        losses = run_steps(model, 2)
        if first == "offload":
            remove_hook_from_module(model)
        return losses + run_steps(model, 2), model

    assert_same_with_and_without(train)
