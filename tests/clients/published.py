"""Scripts as their projects publish them, to run by Python and by `ebbtide run`."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ebbtide
from compare import ENVIRONMENT

SCRIPTS = Path(__file__).parent / "scripts"
STARTUP = SCRIPTS / "startup"  # what `sitecustomize` does there happens before the script begins
TIMEOUT_S = 240

# What differs between two runs of the same script: how long it took.
VOLATILE = re.compile(r"runtime|per_second|time", re.IGNORECASE)
SECONDS = re.compile(
    r"time=[\d.]+|'epoch_train_time': [\d.e-]+|\w+_(runtime|per_second)'? *[=:] *'?[\d:.]+"
)


@dataclass(frozen=True)
class Published:
    """A script.

    Attributes:
        title: what the page calls it.
        script: its file in ``scripts``.
        packages: what it imports beside torch.
        arguments: what its command line ends with.
        write_data: writes what it reads to a directory.
        left: yields what it leaves in its directory, less what differs from run to run.
        note: what its user should know.
    """

    title: str
    script: str
    packages: tuple[str, ...]
    arguments: str
    write_data: Callable[[Path], None]
    left: Callable[[Path], Iterator[Any]]
    note: str


@dataclass(frozen=True)
class Ran:
    """What a run left.

    Attributes:
        printed: the script's standard output, without times.
        left: a SHA-256 of the losses, the predictions and the weights that it saved.
        peak_bytes: the largest RSS of its process.
        report: what `ebbtide run --json` wrote; empty without it.
        stderr: its standard error.
    """

    printed: str
    left: str
    peak_bytes: int
    report: dict[str, Any]
    stderr: str


def run(published: Published, at: Path, *options: str, watched: bool = True) -> Ran:
    """Run a script in a directory of its own, by Python or by `ebbtide run` with options.

    Raises:
        RuntimeError: it failed.
    """
    at.mkdir()
    published.write_data(at)
    ours = ["-m", "ebbtide", "run", *options, "--json", "figures.json"] if watched else []
    command = [sys.executable, *ours, str(SCRIPTS / published.script), *published.arguments.split()]
    with (at / "stdout.txt").open("w") as out, (at / "stderr.txt").open("w") as err:
        process = subprocess.Popen(command, cwd=at, env=_environment(), stdout=out, stderr=err)
        peak_bytes = _watch_peak(process)
    printed, stderr = (at / "stdout.txt").read_text(), (at / "stderr.txt").read_text()
    if process.returncode != 0:
        raise RuntimeError(f"{command} ended with {process.returncode}\n{printed}\n{stderr}")
    report = json.loads((at / "figures.json").read_text()) if watched else {}
    digest = hashlib.sha256()
    for each in published.left(at):
        _add(digest, each)
    return Ran(
        printed=SECONDS.sub("", printed),
        left=digest.hexdigest(),
        peak_bytes=peak_bytes,
        report=report,
        stderr=stderr,
    )


def _watch_peak(process: subprocess.Popen[bytes]) -> int:
    """Return a process's largest RSS when it has ended. A budget resets what the system counts."""
    peak_kib, end = 0, time.monotonic() + TIMEOUT_S
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        peak_kib = max(peak_kib, int(found[1]) if found else 0)
        if time.monotonic() > end:
            process.kill()
        time.sleep(0.005)
    return peak_kib * 1024


def _environment() -> dict[str, str]:
    package = str(Path(ebbtide.__file__).parents[1])
    inherited = [package, str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {name: value for name, value in os.environ.items() if name != "RANK"}
    more = {"MPLBACKEND": "agg", "HF_DATASETS_CACHE": "cache", "PYTHONHASHSEED": "0"}
    return kept | ENVIRONMENT | more | {"PYTHONPATH": os.pathsep.join(inherited)}


def _add(digest: Any, value: Any) -> None:
    """Add a value to a digest: tensors by their bits, all else by its text."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().contiguous()
        digest.update(f"{plain.dtype} {tuple(plain.shape)}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, dict):
        for name, each in value.items():
            digest.update(str(name).encode())
            _add(digest, each)
    else:
        digest.update(repr(value).encode())


# Transformers


def _write_text(at: Path) -> None:
    """Write two text files and a tokenizer that was trained on one of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = ["low", "tide", "rises", "and", "falls", "while", "the", "moon", "turns", "slowly"]
    order = torch.randint(len(words), (6000, 12), generator=torch.Generator().manual_seed(0))
    lines = [" ".join(words[word] for word in line) for line in order.tolist()]
    (at / "train.txt").write_text("\n".join(lines[:5000]))
    (at / "validation.txt").write_text("\n".join(lines[5000:]))
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(special_tokens=["<unk>", "<pad>"]))
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>"
    )
    whole.save_pretrained(at / "tokenizer")


def _left_by_the_language_model(at: Path) -> Iterator[Any]:
    from safetensors.torch import load_file

    state = json.loads((at / "out" / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert len(losses) == 4, state["log_history"]
    yield [
        {name: value for name, value in entry.items() if not VOLATILE.search(name)}
        for entry in state["log_history"]
    ]
    results = json.loads((at / "out" / "all_results.json").read_text())
    assert "perplexity" in results
    yield {name: value for name, value in results.items() if not VOLATILE.search(name)}
    yield load_file(at / "out" / "model.safetensors")


LANGUAGE_MODEL = Published(
    title="Transformers, `run_clm.py`",
    script="run_clm.py",
    packages=("transformers", "datasets", "accelerate"),
    arguments=(
        "--model_type gpt2 --config_overrides n_embd=128,n_layer=6,n_head=4,vocab_size=128 "
        "--tokenizer_name tokenizer --train_file train.txt --validation_file validation.txt "
        "--block_size 256 --per_device_train_batch_size 16 --per_device_eval_batch_size 4 "
        "--do_train --do_eval --max_steps 4 --logging_steps 1 --save_strategy no "
        "--output_dir out --report_to none --disable_tqdm true --use_cpu true"
    ),
    write_data=_write_text,
    left=_left_by_the_language_model,
    note="Evaluation runs without autograd, and is left alone.",
)


# Lightning


def _write_nothing(_: Path) -> None:
    """Leave a directory empty, for a script that makes its own data."""


def _left_by_the_autoencoder(at: Path) -> Iterator[Any]:
    (log,) = (at / "lightning_logs").glob("version_*")
    losses = (log / "metrics.csv").read_text()
    assert "train_loss" in losses and "test_loss" in losses
    yield losses
    (saved,) = (log / "checkpoints").glob("*.ckpt")
    checkpoint = torch.load(saved, weights_only=False)
    yield checkpoint["state_dict"]
    yield checkpoint["optimizer_states"][0]["state"]
    for image in sorted(at.glob("made_*.pt")):
        yield torch.load(image)


AUTOENCODER = Published(
    title="Lightning, `autoencoder.py`",
    script="autoencoder.py",
    packages=("lightning", "jsonargparse"),
    arguments=(
        "--trainer.logger CSVLogger --trainer.logger.save_dir . --trainer.log_every_n_steps 1 "
        "--trainer.enable_progress_bar false --trainer.accelerator cpu "
        "--model.hidden_dim 2048 --data.batch_size 2048 --data.images 4096"
    ),
    write_data=_write_nothing,
    left=_left_by_the_autoencoder,
    note="At the batch of 32 of the example no tensor has 1 MiB: nothing is offloaded, and the "
    "report says so.",
)


# neuraloperator


def _write_darcy(at: Path) -> None:
    """Write samples in the layout of neuraloperator's archive of Darcy flow."""
    from ebbtide.tools.darcy import DarcySpec, generate_darcy

    for resolution in (16, 32):
        for is_test, count in ((False, 256), (True, 16)):
            spec = DarcySpec(resolution, is_test)
            a, u = generate_darcy(spec, count)
            fields = {"x": a > 7.5, "y": u}
            torch.save(
                {name: torch.as_tensor(field).float() for name, field in fields.items()},
                at / f"darcy_{spec.split}_{resolution}.pt",
            )


def _left_by_the_operator(at: Path) -> Iterator[Any]:
    yield torch.load(at / "checkpoints" / "model_state_dict.pt", weights_only=False)
    assert (at / "predictions_32.png").stat().st_size > 0


OPERATOR = Published(
    title="neuraloperator, `plot_FNO_darcy.py`",
    script="plot_FNO_darcy.py",
    packages=("neuralop", "matplotlib"),
    arguments=". 128",
    write_data=_write_darcy,
    left=_left_by_the_operator,
    note="The predictions at the end run with autograd and have no backward: what leaves for "
    "them is dropped. `load_darcy_flow_small` asks an archive on the network at each start; the "
    "script calls `load_darcy_pt` instead.",
)

PUBLISHED = [LANGUAGE_MODEL, AUTOENCODER, OPERATOR]
