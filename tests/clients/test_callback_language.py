"""The callback beside PEFT, TRL, the compiler, and in two processes."""

from __future__ import annotations

import argparse
import inspect
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

# The Trainer imports `datasets` where that is installed, which in turn may lack what it needs.
pytest.importorskip(
    "transformers.trainer", exc_type=ImportError, reason="the Trainer cannot be imported here"
)

import torch
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback

import ebbtide
from callback_bench import SMALL, assert_is_plain, gpt2, losses_of, results, trainer_for
from ebbtide.interop.transformers import OffloadCallback
from run_program import weights_digest

RUN_ALL = os.environ.get("EBBTIDE_CLIENTS") == "all"
SOURCE = inspect.getsource(argparse)


def callbacks_for(offloaded: bool) -> list[TrainerCallback]:
    return [OffloadCallback(activations=SMALL)] if offloaded else []


def assert_moved(callbacks: Sequence[Any]) -> None:
    for callback in callbacks:
        assert callback.handle.stats.offloaded_bytes > 0


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_peft(checkpointing: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="LoRA needs PEFT")
    found = []
    for offloaded in (False, True):
        callbacks = callbacks_for(offloaded)
        torch.manual_seed(0)
        lora = peft.LoraConfig(target_modules="all-linear", fan_in_fan_out=True)
        model = peft.get_peft_model(gpt2(), lora)
        folder = tmp_path / str(offloaded)
        trainer = trainer_for(
            model,
            folder,
            callbacks,
            save_strategy="steps",
            activation_checkpointing=checkpointing,
        )
        trainer.train()
        assert_moved(callbacks)
        assert_is_plain(model)
        files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        found.append((results(trainer), files))
        merged = model.merge_and_unload()
        found[-1] += (weights_digest(merged),)
    assert found[0] == found[1]
    assert "checkpoint-4/adapter_model.safetensors" in map(str, found[0][1])


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_checkpointing": True}, {"loss_type": "nll"}],
    ids=lambda options: " ".join(options) or "plain",
)
def test_supervised_fine_tuning_twice(options: dict[str, Any], tmp_path: Path) -> None:
    """TRL puts a function of its own in the place of the model's forward."""
    pytest.importorskip("trl", exc_type=ImportError, reason="SFTTrainer needs TRL")
    datasets = pytest.importorskip("datasets", exc_type=ImportError, reason="TRL needs datasets")
    from trl import SFTConfig, SFTTrainer

    tokenizer = ByT5Tokenizer()
    texts = [{"text": SOURCE[at : at + 64]} for at in range(0, 16 * 64, 64)]
    found = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        callbacks = callbacks_for(offloaded)
        settings = {
            "save_strategy": "no",
            "report_to": "none",
            "bf16": False,
            "max_steps": 3,
            "max_length": 64,
            "logging_steps": 1,
            "gradient_checkpointing": False,
            "use_cpu": True,
        }
        trainer = SFTTrainer(
            LlamaForCausalLM(config),
            SFTConfig(str(tmp_path), **(settings | options)),
            train_dataset=datasets.Dataset.from_list(texts),
            processing_class=tokenizer,
            callbacks=callbacks,
        )
        trainer.train()
        once = losses_of(trainer)
        trainer.train()
        assert_moved(callbacks)
        assert_is_plain(trainer.model)
        found.append((once, *results(trainer)))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["layers", "whole model"])
@pytest.mark.filterwarnings("ignore:.*compiled as one region")
def test_compiled(whole: bool, tmp_path: Path) -> None:
    found = []
    for offloaded in (False, True):
        callbacks = callbacks_for(offloaded)
        model = gpt2()
        if not whole:
            for block in model.transformer.h:
                block.compile()
        trainer = trainer_for(model, tmp_path, callbacks, torch_compile=whole, max_steps=3)
        trainer.train()
        assert_moved(callbacks)
        found.append(results(trainer))
    assert found[0] == found[1]


RANKS = """
import importlib.util, sys
from pathlib import Path
from run_program import declare_torchvision_operators
import torch
import torch.distributed as dist
if importlib.util.find_spec("torchvision") is not None and torch.version.cuda is None:
    declare_torchvision_operators()
from callback_bench import *
from ebbtide.interop.transformers import OffloadCallback

mode, wrapper, folder = sys.argv[1:]
callbacks = []
if mode == "offloaded":
    callbacks.append(OffloadCallback(activations=SMALL))
if mode == "budget":
    callbacks.append(OffloadCallback(budget="90%", activations=SMALL))
model = gpt2()
trainer = trainer_for(
    model, folder, callbacks, gradient_accumulation_steps=2, max_steps=6, ddp_backend="gloo"
)
if wrapper == "FSDP2":  # Accelerate itself shards on accelerators only
    from test_ways_accelerate import have_models_sharded
    have_models_sharded("GPT2Block")
    trainer.is_fsdp_enabled = True
trainer.train()
names = {"DDP": "DistributedDataParallel", "FSDP2": "FSDPGPT2LMHeadModel"}
assert type(trainer.model_wrapped).__name__ == names[wrapper]
assert wrapper == "FSDP2" or trainer.model is model
if callbacks:
    handle = callbacks[0].handle
    assert handle.plan is not None if mode == "budget" else handle.stats.offloaded_bytes > 0
    assert_is_plain(model)
losses, weights = results(trainer)
file = Path(folder) / f"{mode}_{trainer.args.process_index}.txt"
file.write_text("\\n".join([*losses, weights]))

# All is written. While the interpreter ends, torch's threads sometimes abort, with or without
# ebbtide, and after this seldom: pytorch#190489.
if dist.is_initialized():
    dist.destroy_process_group()
import os
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["DDP", *(["FSDP2"] * RUN_ALL)])
def test_two_processes(wrapper: str, tmp_path: Path) -> None:
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
    for mode in ("plain", "offloaded", "budget"):
        run = subprocess.run(
            [*launch, str(script), mode, wrapper, str(tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-3000:]
    for rank in range(2):
        plain, *others = (
            (tmp_path / f"{mode}_{rank}.txt").read_text()
            for mode in ("plain", "offloaded", "budget")
        )
        assert len(plain.splitlines()) > 6
        assert others == [plain, plain]
