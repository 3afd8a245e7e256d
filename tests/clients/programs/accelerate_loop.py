"""Accelerate: a training loop with prepare, accumulate and clipping, for a GPT-2."""

import argparse
import inspect

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import ebbtide

LENGTH = 256
torch.manual_seed(0)

text = torch.tensor(list(inspect.getsource(argparse).encode()))
loader = DataLoader(text[: 24 * LENGTH].view(-1, LENGTH), batch_size=4)
config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=256, n_layer=4, n_head=4)
model = GPT2LMHeadModel(config)
handle = ebbtide.offload(model)

accelerator = Accelerator(gradient_accumulation_steps=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
