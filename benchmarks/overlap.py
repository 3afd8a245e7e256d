"""Measure what an optimizer that steps inside backward costs or saves.

On a CPU the worker computes on the cores that backward computes on, so little can be hidden, and
only weights that rest in files step ahead. The loops of one kind of clipping share one process and
take turns after every step, so that a change in the machine's speed affects both. Every step also
compares the parameters bit by bit.

On an accelerator a transformer of 1.14 billion weights trains on 8,192 tokens, with its blocks'
weights, gradients and optimizer state on the host. The loops run one after the other. The loop
without a step shows what moving the weights takes. Bits are compared afterwards, on a small model
and with deterministic operators.

Each step is timed from the begin of its forward to the end of its optimizer step.

Run: ``python -m benchmarks.overlap [--device cuda]``
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import statistics
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import ebbtide
from benchmarks import record
from benchmarks.models import transformer
from ebbtide.units import format_size

_CLIPPING = {"never bites": 1e6, "always bites": 1e-3}
_LOOPS = ("clip, then step", "overlap")
_WEIGHTS = {"memory": None, "files": ebbtide.WeightPolicy()}


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4, help="sequences of 128 in a batch")
    parser.add_argument(
        "--steps", type=int, default=43, help="steps of each loop; the first three are not timed"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda ...")
    parser.add_argument("--tokens", type=int, default=8192, help="on an accelerator")
    parser.add_argument("--blocks", type=int, default=20, help="of the model on an accelerator")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.device != "cpu":
        _compare_on_accelerator(arguments)
        return
    lines = [
        "| weights in | clipping | loop | step, median | of the plain loop | hidden | shadows |",
        "|" + "---|" * 7,
    ]
    results = {}
    for place, kind in itertools.product(_WEIGHTS, _CLIPPING):
        wall_s, stats = _measure(arguments, _CLIPPING[kind], _WEIGHTS[place])
        results[f"{kind}, weights in {place}"] = {**wall_s, "stats": vars(stats)}
        base_s = statistics.median(wall_s[_LOOPS[0]])
        for name in _LOOPS:
            median_s = statistics.median(wall_s[name])
            ahead = name == "overlap"
            hidden, shadows = _describe(stats if ahead else None)
            lines.append(
                f"| {place} | {kind} | {name} | {median_s:.3f} s | {median_s / base_s:.3f}x | "
                f"{hidden} | {shadows} |"
            )
    table = "\n".join(lines)
    print(table)
    print(record.save("overlap", vars(arguments), results, table).name)


def _describe(stats: ebbtide.OverlapStats | None) -> tuple[str, str]:
    """What the worker hid, and its shadows, as a table has them."""
    if stats is None:
        return "–", "–"
    hidden = f"{stats.hidden_share:.0%} of {stats.worker_s:.2f} s"
    return hidden, format_size(stats.shadow_bytes)


def _measure(
    arguments: argparse.Namespace, max_norm: float, weights: ebbtide.WeightPolicy | None
) -> tuple[dict[str, list[float]], Any]:
    models, handles = [_build(arguments) for _ in _LOOPS], []
    for model in models:
        none = ebbtide.ActivationPolicy(num_layers=0, rebuild=False)
        handles.append(ebbtide.offload(model, activations=none, weights=weights))
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


_AT_REST = ("all on the device", "without a step", "clip, then step", "overlap")
_LENGTH = 8192  # of a sequence


def _compare_on_accelerator(arguments: argparse.Namespace) -> None:
    lines = ["| loop | step, median | of it in `step()` | hidden | shadows |", "|" + "---|" * 5]
    results: dict[str, Any] = {}
    for name in _AT_REST:
        wall_s, stepping_s, stats, _ = _train_at_rest(arguments, name)
        results[name] = {"wall_s": wall_s, "stepping_s": stepping_s, "stats": stats and vars(stats)}
        hidden, shadows = _describe(stats)
        lines.append(
            f"| {name} | {statistics.median(wall_s) * 1e3:.1f} ms | "
            f"{statistics.median(stepping_s) * 1e3:.1f} ms | {hidden} | {shadows} |"
        )
    table = "\n".join(lines)
    print(table, flush=True)
    exact = argparse.Namespace(**{**vars(arguments), "blocks": 2, "tokens": 256})
    with _deterministic():
        plain, mine = (_train_at_rest(exact, name)[-1] for name in _AT_REST[2:])
    assert all(map(torch.equal, mine, plain)), "not the same bits"
    print(record.save(f"overlap-{arguments.tokens}", vars(arguments), results, table).name)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Let the operators give the same bits in each run; some are slower then."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _train_at_rest(
    arguments: argparse.Namespace, name: str
) -> tuple[list[float], list[float], Any, list[torch.Tensor]]:
    """Train a model whose blocks' weights, gradients and optimizer state are on the host.

    Returns:
        Seconds of each step, seconds of these inside ``step()``, what was stepped ahead, and the
        parameters at the end.
    """
    torch.manual_seed(0)
    with torch.device(arguments.device):
        model = transformer(arguments.blocks, 2048, 16, 32_000)
    optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
    handle = None
    if name != "all on the device":
        none = ebbtide.ActivationPolicy(num_layers=0, rebuild=False)
        weights = ebbtide.WeightPolicy()
        handle = ebbtide.offload(model, activations=none, weights=weights, layers=[*model.blocks])
        if name == "overlap":
            optimizer = handle.overlap(optimizer, max_norm=1e6)
    wall_s, stepping_s = [], []
    shape = -(-arguments.tokens // _LENGTH), min(arguments.tokens, _LENGTH)
    tokens = torch.randint(32_000, shape, device=arguments.device)
    for turn in range(10):
        torch.accelerator.synchronize()
        begin_s = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(arguments.device, torch.bfloat16):
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        del logits
        loss.backward()
        step_s = time.perf_counter()
        if name not in ("without a step", "overlap"):
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        if name != "without a step":
            optimizer.step()
        torch.accelerator.synchronize()
        end_s = time.perf_counter()
        if turn >= 3:
            wall_s.append(end_s - begin_s)
            stepping_s.append(end_s - step_s if name != "without a step" else 0.0)
    weights_now = [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()]
    stats = optimizer.overlap if name == "overlap" else None
    if handle is not None:
        handle.detach()
    del model, handle, optimizer
    gc.collect()
    return wall_s, stepping_s, stats, weights_now


def _build(arguments: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        arguments.width, 8, 4 * arguments.width, dropout=0.0, batch_first=True
    )
    return nn.TransformerEncoder(layer, arguments.layers, enable_nested_tensor=False)


if __name__ == "__main__":
    main()
