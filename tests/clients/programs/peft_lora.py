"""PEFT: low-rank adapters fine-tune a frozen Llama on Python source, byte by byte."""

import argparse
import inspect

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import ebbtide

LENGTH = 256
torch.manual_seed(0)

text = torch.tensor(list(inspect.getsource(argparse).encode()))
batches = text[: 3 * 8 * LENGTH].view(3, 8, LENGTH)

config = LlamaConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(target_modules="all-linear"))
handle = ebbtide.offload(model)

adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(adapters, lr=1e-3)
losses = []
for batch in batches:
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
