"""Transformers' Trainer: a GPT-2 learns to write Python, byte by byte."""

import argparse
import inspect
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ebbtide

LENGTH = 256
torch.manual_seed(0)

text = torch.tensor(list(inspect.getsource(argparse).encode()))
rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=256, n_layer=4, n_head=4)
model = GPT2LMHeadModel(config)
handle = ebbtide.offload(model)

trainer = Trainer(
    model,
    TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        max_steps=3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
