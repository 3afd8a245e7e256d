"""Measure what recomputed layers do to a CPU model's memory, beside offloading.

Every sample is a forked process of its own, and all modes take turns, as in `benchmarks.rss`. The
peak is the highest resident memory (RSS) of the measured steps, from the kernel, above that of the
process before its first step.

Run: ``python -m benchmarks.recompute``
"""

from __future__ import annotations

import argparse
import ctypes
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ebbtide
from benchmarks import record
from benchmarks.rss import MODELS, Loss, in_child, median
from ebbtide.stores.measured_memory import ProcessMemory

_MIB = 2**20
_INFLIGHT_BYTES = 16 * _MIB  # the models are small
MODES = {
    "no offload": None,
    "offload": ebbtide.ActivationPolicy(max_inflight_bytes=_INFLIGHT_BYTES),
    "recompute": ebbtide.ActivationPolicy(mode="recompute"),
    "recompute+offload": ebbtide.ActivationPolicy(
        mode="recompute+offload", max_inflight_bytes=_INFLIGHT_BYTES
    ),
}


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=5, help="samples of each mode")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each sample")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    names = arguments.models.split(",")
    import neuralop  # noqa: F401  # once, before the processes are forked
    import transformers  # noqa: F401

    samples: dict[str, dict[str, list[Any]]] = {
        name: {mode: [] for mode in MODES} for name in names
    }
    for number in range(arguments.rounds):
        for name in names:
            for mode, policy in MODES.items():
                taken = in_child(_measure, MODELS[name], policy, arguments.steps)
                samples[name][mode].append(taken)
            print(f"round {number + 1}, {name}", flush=True)
    _report(vars(arguments), samples)


def _measure(
    build: Callable[[], tuple[nn.Module, Loss]],
    policy: ebbtide.ActivationPolicy | None,
    steps: int,
) -> dict[str, Any]:
    torch.set_num_threads(1)  # a forked process must not use the parent's threads
    torch.manual_seed(0)
    model, loss = build()
    ctypes.CDLL(None).malloc_trim(0)
    memory = ProcessMemory()
    idle_bytes = memory.now_bytes()
    handle = None if policy is None else ebbtide.offload(model, activations=policy)

    def step() -> str:
        value = loss()
        value.backward()
        model.zero_grad()
        return value.item().hex()

    step()
    memory.reset_peak()
    begin_s = time.perf_counter()
    losses = [step() for _ in range(steps)]
    duration_s = time.perf_counter() - begin_s
    stats = ebbtide.StepStats() if handle is None else handle.stats
    return {
        "peak_bytes": memory.peak_bytes() - idle_bytes,
        "step_s": duration_s / steps,
        "losses": losses,
        "recomputed_bytes": stats.recomputed_bytes,
        "offloaded_bytes": stats.offloaded_bytes,
    }


def _report(configuration: dict[str, Any], samples: dict[str, dict[str, list[Any]]]) -> None:
    lines = [
        "| model | mode | recomputed | offloaded | peak above idle | x none |",
        "|" + "---|" * 6,
    ]
    for name, modes in samples.items():
        plain = modes["no offload"]
        for mode, taken in modes.items():
            assert {tuple(sample["losses"]) for sample in taken} == {tuple(plain[0]["losses"])}
            cells = [
                f"{median(taken, key) / _MIB:.0f} MiB"
                for key in ("recomputed_bytes", "offloaded_bytes", "peak_bytes")
            ]
            cells.append(f"{median(taken, 'peak_bytes') / median(plain, 'peak_bytes'):.2f}")
            lines.append(f"| {name} | {mode} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    print(table)
    print(record.save("recompute", configuration, samples, table).name)


if __name__ == "__main__":
    main()
