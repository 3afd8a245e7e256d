"""TRL: SFTTrainer teaches a Llama to continue Python source."""

import argparse
import inspect
import tempfile

import torch
from datasets import Dataset
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

import ebbtide

LENGTH = 256
torch.manual_seed(0)

source = inspect.getsource(argparse)
pieces = [source[at : at + LENGTH] for at in range(0, 32 * LENGTH, LENGTH)]
tokenizer = ByT5Tokenizer()  # one token for each byte, so it needs no vocabulary file

config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=tokenizer.pad_token_id,
    eos_token_id=tokenizer.eos_token_id,
)
model = LlamaForCausalLM(config)
handle = ebbtide.offload(model)

trainer = SFTTrainer(
    model,
    SFTConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        max_steps=3,
        max_length=LENGTH,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,  # SFTConfig turns it on; little is left to offload then
    ),
    train_dataset=Dataset.from_list([{"text": piece} for piece in pieces]),
    processing_class=tokenizer,
)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
