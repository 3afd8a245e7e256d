"""Measure what rebuilding costs in time, for one FNO on a real grid and without offload.

The demo gives every mode a process of its own in order to measure its memory, and on a busy machine
its times cannot show a difference of a few per cent. Here all modes share one process and take
turns after every step, so that a change in the machine's speed affects all of them. Every step also
compares the gradients bit by bit.

Run: ``python -m benchmarks.rebuild_step``
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import torch
from torch import Tensor, nn

import ebbtide
from benchmarks import record

_MODES = {
    "no offload": None,
    "kept, not rebuilt": ebbtide.ActivationPolicy(num_layers=0, rebuild=False),
    "kept, rebuilt": ebbtide.ActivationPolicy(num_layers=0),
}


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resolution", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument(
        "--steps", type=int, default=15, help="steps of each mode; the first two are not timed"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    size = arguments.resolution
    x = torch.randn(arguments.batch_size, 1, size, size)
    models, handles = {}, {}
    for name, policy in _MODES.items():
        models[name] = _build()
        if policy is not None:
            handles[name] = ebbtide.offload(models[name], activations=policy)
    wall_s: dict[str, list[float]] = {name: [] for name in _MODES}
    cpu_s: dict[str, list[float]] = {name: [] for name in _MODES}
    for turn in range(arguments.steps):
        expected: list[Tensor] = []
        for name, model in models.items():
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            model(x).square().mean().backward()
            if turn >= 2:
                wall_s[name].append(time.perf_counter() - begin_s)
                cpu_s[name].append(time.process_time() - begin_cpu_s)
            got = [p.grad for p in model.parameters() if p.grad is not None]
            expected = expected or got
            assert all(map(torch.equal, got, expected)), f"{name}: not the same bits"
            model.zero_grad()
    _report(arguments, handles, wall_s, cpu_s)


def _build() -> nn.Module:
    from neuralop.models import FNO

    torch.manual_seed(0)
    model: nn.Module = FNO(n_modes=(16, 16), in_channels=1, out_channels=1, hidden_channels=32)
    return model


def _report(
    arguments: argparse.Namespace,
    handles: dict[str, ebbtide.OffloadHandle],
    wall_s: dict[str, list[float]],
    cpu_s: dict[str, list[float]],
) -> None:
    lines = [
        "| mode | kept | rebuilt | step, median | of no offload | processor |",
        "|" + "---|" * 6,
    ]
    base_s = statistics.median(wall_s["no offload"])
    base_cpu_s = statistics.median(cpu_s["no offload"])
    results = {}
    for name in _MODES:
        stats = handles[name].stats if name in handles else None
        kept = "–" if stats is None else f"{stats.kept_bytes / 2**20:.0f} MiB"
        rebuilt = "–" if stats is None else f"{stats.rebuilt_bytes / 2**20:.0f} MiB"
        median_s, median_cpu_s = statistics.median(wall_s[name]), statistics.median(cpu_s[name])
        lines.append(
            f"| {name} | {kept} | {rebuilt} | {median_s:.2f} s | {median_s / base_s:.2f}x | "
            f"{median_cpu_s / base_cpu_s:.2f}x |"
        )
        results[name] = {"wall_s": wall_s[name], "processor_s": cpu_s[name]}
        if stats is not None:
            results[name] |= {"kept_bytes": stats.kept_bytes, "rebuilt_bytes": stats.rebuilt_bytes}
    table = "\n".join(lines)
    print(table)
    print(record.save("rebuild-step", vars(arguments), results, table).name)


if __name__ == "__main__":
    main()
