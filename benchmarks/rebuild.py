"""Measure how many bytes rebuilding leaves to keep or to move, for models of the parity suite.

Every model trains in five modes, which take turns in one process: without ebbtide; with everything
kept, without and with rebuilding; and with everything offloaded, without and with rebuilding. The
byte counts are exact. The models are small to keep the suite fast, so their times say little.

Run: ``python -m benchmarks.rebuild``
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import ebbtide
from benchmarks import record

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "parity"))

import zoo

_MODELS = ["fno_1d", "fno_2d", "fno_3d", "tfno", "uno", "codano", "rno"]
_MODELS += ["llama", "llama_bf16", "gpt2", "vit", "t5", "convnet", "unet"]
_KEPT = {"num_layers": 0}
_MODES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "kept": {**_KEPT, "rebuild": False},
    "kept, rebuilt": {**_KEPT, "rebuild": True},
    "offloaded": {"rebuild": False},
    "offloaded, rebuilt": {"rebuild": True},
}


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--min-bytes", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    results = {}
    header = (
        "model",
        "saved",
        "unique",
        "rebuilt",
        "nothing leaves: kept",
        "of saved",
        "all leaves: moved",
        "of saved",
        "same bits",
        "kept: step",
        "offloaded: step",
    )
    rows: list[Sequence[str]] = [header, ["---"] * len(header)]
    for entry in zoo.ENTRIES:
        if entry.name in _MODELS:
            results[entry.name] = measured = _measure(entry, arguments)
            rows.append(_row(entry.name, measured))
            print("| " + " | ".join(rows[-1]) + " |", flush=True)
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    print(record.save("rebuild", vars(arguments), results, table).name)


def _measure(entry: zoo.Entry, arguments: argparse.Namespace) -> dict[str, Any]:
    measured: dict[str, Any] = {}
    samples: dict[str, list[float]] = {name: [] for name in _MODES}
    trained: dict[str, tuple[Any, Any, Any]] = {}
    for name, policy in _MODES.items():
        model, inputs = entry.build()
        handle = None
        if policy is not None:
            chosen = ebbtide.ActivationPolicy(min_bytes=arguments.min_bytes, **policy)
            handle = ebbtide.offload(model, activations=chosen, layers=_some_layers(model, policy))
        trained[name] = model, inputs, handle
    plain = None
    for name, (model, inputs, handle) in trained.items():
        got = _step(entry, model, inputs)
        plain = plain or got  # set by the first mode, which is without ebbtide
        zoo.assert_bitwise_equal(plain, got)
        if handle is not None:
            stats = handle.stats
            fields = ("saved_bytes", "unique_bytes", "kept_bytes", "offloaded_bytes")
            measured[name] = {f: getattr(stats, f) for f in (*fields, "rebuilt_bytes")}
    for _ in range(arguments.rounds):
        for name, (model, inputs, _handle) in trained.items():
            begin_s = time.perf_counter()
            _step(entry, model, inputs)
            samples[name].append(time.perf_counter() - begin_s)
    for _, _, handle in trained.values():
        if handle is not None:
            handle.detach()
    return {"modes": measured, "samples_s": samples}


def _step(entry: zoo.Entry, model: torch.nn.Module, inputs: zoo.Inputs) -> zoo.Snapshot:
    for tensor in (*model.parameters(), *inputs.values()):
        tensor.grad = None
    return zoo.snapshot(entry, model, inputs)


def _some_layers(model: torch.nn.Module, policy: dict[str, Any]) -> list[torch.nn.Module] | None:
    """Return some layer if no layer is to be offloaded.

    A policy that counts layers needs at least one, but with 0 of them to offload it does not matter
    which.
    """
    return list(model.children())[:1] if policy.get("num_layers") == 0 else None


def _row(name: str, measured: dict[str, Any]) -> list[str]:
    on, off = measured["modes"]["kept, rebuilt"], measured["modes"]["kept"]
    moved = measured["modes"]["offloaded, rebuilt"]
    rest_bytes = on["kept_bytes"] + on["offloaded_bytes"]
    assert off["rebuilt_bytes"] == 0
    moved_bytes = moved["kept_bytes"] + moved["offloaded_bytes"]
    median_s = {mode: statistics.median(s) for mode, s in measured["samples_s"].items()}
    return [
        name,
        f"{on['saved_bytes'] / 2**20:.2f} MiB",
        f"{on['unique_bytes'] / 2**20:.2f} MiB",
        f"{on['rebuilt_bytes'] / 2**20:.2f} MiB",
        f"{rest_bytes / 2**20:.2f} MiB",
        f"{rest_bytes / on['saved_bytes']:.2f}",
        f"{moved_bytes / 2**20:.2f} MiB",
        f"{moved_bytes / on['saved_bytes']:.2f}",
        "yes",  # otherwise `assert_bitwise_equal` would have raised
        f"{median_s['kept, rebuilt'] / median_s['kept']:.2f}x",
        f"{median_s['offloaded, rebuilt'] / median_s['offloaded']:.2f}x",
    ]


if __name__ == "__main__":
    main()
