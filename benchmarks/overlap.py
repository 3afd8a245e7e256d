"""Measure what an optimizer that steps inside backward costs or saves on this machine's CPU.

On a CPU the worker computes on the cores that backward computes on, so little can be hidden. The
loops of one kind of clipping share one process and take turns after every step, so that a change in
the machine's speed affects both. Every step also compares the parameters bit by bit. Each step is
timed from the begin of its forward to the end of its optimizer step.

Run: ``python -m benchmarks.overlap``
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch
from torch import nn

import ebbtide
from benchmarks import record

_CLIPPING = {"never bites": 1e6, "always bites": 1e-3}
_LOOPS = ("clip, then step", "overlap")


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4, help="sequences of 128 in a batch")
    parser.add_argument(
        "--steps", type=int, default=43, help="steps of each loop; the first three are not timed"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = [
        "| clipping | loop | step, median | of the plain loop | hidden | shadows |",
        "|" + "---|" * 6,
    ]
    results = {}
    for kind, max_norm in _CLIPPING.items():
        wall_s, stats = _measure(arguments, max_norm)
        results[kind] = {**wall_s, "stats": vars(stats)}
        base_s = statistics.median(wall_s[_LOOPS[0]])
        for name in _LOOPS:
            median_s = statistics.median(wall_s[name])
            ahead = name == "overlap"
            hidden = f"{stats.hidden_share:.0%} of {stats.worker_s:.2f} s" if ahead else "–"
            shadows = f"{stats.shadow_bytes / 2**20:.0f} MiB" if ahead else "–"
            lines.append(
                f"| {kind} | {name} | {median_s:.3f} s | {median_s / base_s:.3f}x | {hidden} | "
                f"{shadows} |"
            )
    table = "\n".join(lines)
    print(table)
    print(record.save("overlap", vars(arguments), results, table).name)


def _measure(arguments: argparse.Namespace, max_norm: float) -> tuple[dict[str, list[float]], Any]:
    models, handles = [_build(arguments) for _ in _LOOPS], []
    for model in models:
        none = ebbtide.ActivationPolicy(num_layers=0, rebuild=False)
        handles.append(ebbtide.offload(model, activations=none))
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in models]
    overlapped: Any = handles[1].overlap(optimizers[1], max_norm=max_norm)
    wall_s: dict[str, list[float]] = {name: [] for name in _LOOPS}
    for turn in range(arguments.steps):
        x = torch.randn(arguments.rows, 128, arguments.width)
        loops = list(zip(_LOOPS, models, optimizers, strict=True))
        for name, model, optimizer in loops if turn % 2 else reversed(loops):
            begin_s = time.perf_counter()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if name != "overlap":
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            if turn >= 3:
                wall_s[name].append(time.perf_counter() - begin_s)
        for mine, plain in zip(models[1].parameters(), models[0].parameters(), strict=True):
            assert torch.equal(mine, plain), "not the same bits"
    stats = overlapped.overlap
    for handle in handles:
        handle.detach()
    return wall_s, stats


def _build(arguments: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        arguments.width, 8, 4 * arguments.width, dropout=0.0, batch_first=True
    )
    return nn.TransformerEncoder(layer, arguments.layers, enable_nested_tensor=False)


if __name__ == "__main__":
    main()
