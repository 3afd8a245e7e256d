"""Measure the host time per saved tensor of ebbtide and of its peers, on an accelerator.

The model is a chain of small operations, each of which saves one tensor, and every tensor is
offloaded with ordinary copies. One round runs forward and backward in every mode in turn, so that a
change in the machine's speed affects all modes. The cost of a mode is the median over rounds of its
time less the time without hooks, divided by the number of saved tensors. The time ends when all is
queued; then the device finishes, and only that is not counted.

Run: ``python -m benchmarks.overhead_peers --out DIR``; on the software accelerator
``SOFTDEVICE_ORDER=compute-first python -m benchmarks.overhead_peers --import softdevice.loaded``.
In that order nothing runs until the host waits, so the kernels take no time from the host.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import statistics
import time
from pathlib import Path

import torch
from torch import nn

import ebbtide
from benchmarks import record
from benchmarks.models import Stack
from benchmarks.modes import AbstractMode, Context, Ebbtide, all_modes
from benchmarks.overhead import Chain, identity_hooks

EVERY = ebbtide.ActivationPolicy(min_bytes=1, rebuild=False)
PEERS = ("save_on_cpu", "torchtune", "trl")
OURS = "ebbtide"
Modes = dict[str, tuple[nn.Module, Context]]


def main() -> None:
    """Measure and write the result file."""
    arguments = _arguments()
    if arguments.load is not None:
        importlib.import_module(arguments.load)
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        raise SystemExit("no accelerator: the peers offload from accelerators only")
    record.refuse_to_commit(device, arguments.out)
    modes, missing = make_modes(device, arguments.steps, arguments.size)
    samples = measure(modes, device, arguments.size, arguments.rounds)
    costs = {name: cost_us(samples[name], samples["none"], arguments.steps) for name in samples}
    table = _table(costs, missing)
    print(record.warning_of(record.environment()) + table)
    configuration = {**vars(arguments), "out": str(arguments.out)}
    results = {"cost_us": costs, "samples_s": samples, "missing": missing}
    print(record.save("overhead-peers", configuration, results, table, arguments.out).name)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--import", dest="load", metavar="MODULE", help="import a module first")
    parser.add_argument("--steps", type=int, default=2_000, help="saved tensors in one forward")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument(
        "--size", type=int, default=512, help="elements of each; TRL moves none below 1024 bytes"
    )
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    return parser.parse_args()


def make_modes(device: torch.device, steps: int, size: int) -> tuple[Modes, dict[str, str]]:
    """Return a model and its context for each mode, and why other modes are missing."""
    found = all_modes()
    chosen: dict[str, AbstractMode] = {name: found[name] for name in PEERS}
    chosen[OURS] = Ebbtide(OURS, "every tensor is offloaded", EVERY)
    modes: Modes = {"none": (_chain(device, steps, size), contextlib.nullcontext)}
    modes["identity hooks"] = (_chain(device, steps, size), identity_hooks)
    missing = {}
    for name, mode in chosen.items():
        excuse = mode.missing(device)
        if excuse is None:
            model = _chain(device, steps, size)
            modes[name] = (model, mode.attach(model))
        else:
            missing[name] = excuse
    return modes, missing


def measure(modes: Modes, device: torch.device, size: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round in each mode. A first round warms up."""
    samples: dict[str, list[float]] = {name: [] for name in modes}
    for turn in range(rounds + 1):
        for name, (model, context) in modes.items():
            seconds = _step(model, context, torch.ones(size, device=device, requires_grad=True))
            if turn:
                samples[name].append(seconds)
    return samples


def _chain(device: torch.device, steps: int, size: int) -> Stack:
    chain = Chain(steps, "activation", size).to(device)
    return Stack(nn.Identity(), [chain], nn.Identity())


def _step(model: nn.Module, context: Context, x: torch.Tensor) -> float:
    torch.accelerator.synchronize()
    gc.collect()
    gc.disable()
    begin_s = time.perf_counter()
    with context():
        out = model(x)
    out.backward(torch.ones_like(out))
    seconds = time.perf_counter() - begin_s
    gc.enable()
    torch.accelerator.synchronize()
    return seconds


def cost_us(samples: list[float], none: list[float], steps: int) -> float:
    """Return the microseconds that a mode takes per saved tensor."""
    return statistics.median(a - b for a, b in zip(samples, none, strict=True)) / steps * 1e6


def _table(costs: dict[str, float], missing: dict[str, str]) -> str:
    rows = ["| mode | us per saved tensor | x ebbtide |", "|---|---|---|"]
    for name, cost in costs.items():
        rows.append(f"| {name} | {cost:.2f} | {cost / costs[OURS]:.2f} |")
    excuses = [f"- {name}: skipped: {excuse}" for name, excuse in missing.items()]
    return "\n".join([*rows, "", *excuses])


if __name__ == "__main__":
    main()
