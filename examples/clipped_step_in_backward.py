"""Train with clipping where weights, gradients and Adam's state are three times the memory allowed.

    python examples/clipped_step_in_backward.py

The network of `larger_than_memory.py` learns how heat conduction changes a temperature profile. Its
weights, gradients and optimizer state rest in files. It trains three times, each time in a process
of its own: as it is, offloaded, and offloaded with an optimizer that steps inside backward
(`handle.overlap`). The gradients are clipped to a norm in all three. The losses are the same to the
bit, and the example measures peak memory (RSS) and the time of a step. It computes on a CPU, where
the optimizer needs the cores that backward needs, so little time can be won.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch
from larger_than_memory import (
    LAYER_BYTES,
    POINTS,
    Block,
    heat,
    load_what_optimizers_need,
    memory_bytes,
    reset_peak,
)
from torch import nn

import ebbtide
from ebbtide.units import format_size, parse_size_bytes

ROWS = 32
MAX_NORM = 0.15  # bites in one of the first steps
MODES = ("as it is", "offloaded", "and steps inside backward")


def train(mode: str, layers: int, steps: int) -> dict[str, object]:
    device = torch.device("cpu")
    torch.manual_seed(0)
    load_what_optimizers_need()
    idle_bytes = memory_bytes(device, "VmRSS")
    model = nn.Sequential(*[Block() for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if mode != MODES[0]:
        handle = ebbtide.offload(model, weights=ebbtide.WeightPolicy())
    if mode == MODES[2]:
        optimizer = handle.overlap(optimizer, max_norm=MAX_NORM)
    reset_peak(device)
    generator = torch.Generator().manual_seed(1)
    losses, times_s = [], []
    for _ in range(steps):
        x, y = heat(ROWS, generator)
        begin_s = time.perf_counter()
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        if mode != MODES[2]:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        times_s.append(time.perf_counter() - begin_s)
        losses.append(loss.item())
    result = {
        "peak_bytes": memory_bytes(device, "VmHWM") - idle_bytes,
        "losses": losses,
        "step_s": statistics.median(times_s[2:]),  # the first makes state, the second shadows
    }
    if mode == MODES[2]:
        result["overlap"] = str(optimizer.overlap)
        result["shadow_bytes"] = optimizer.overlap.shadow_bytes
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--limit", default="200MiB", help="memory on top of an idle process")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps < 3:
        parser.error("--steps must be 3 or more: the first two are not timed")
    if arguments.mode is not None:
        print(json.dumps(train(arguments.mode, arguments.layers, arguments.steps)))
        return
    limit_bytes = parse_size_bytes(arguments.limit, name="--limit")
    layers = -(-3 * limit_bytes // (4 * LAYER_BYTES))  # four copies take three times the limit
    runs = {}
    for mode in MODES:
        command = [sys.executable, __file__, "--mode", mode, "--layers", str(layers)]
        command += ["--steps", str(arguments.steps)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        runs[mode] = json.loads(done.stdout)
    last = runs[MODES[2]]
    weights_bytes = layers * LAYER_BYTES
    print(f"{layers} layers, clipped to a norm of {MAX_NORM:g}; limit {format_size(limit_bytes)}")
    sizes = {
        "weights": weights_bytes,
        "gradients": weights_bytes,
        "optimizer state": 2 * weights_bytes,
        "shadows, in files": last["shadow_bytes"],
        "activations": layers * 2 * ROWS * POINTS * 4,  # a block's input, and tanh's output
    }
    for what, size_bytes in sizes.items():
        print(f"  {what:<20} {format_size(size_bytes):>10}")
    print(f"{'':<27} {'peak':>10} {'a step':>10}")
    for mode, run in runs.items():
        fits = "fits" if run["peak_bytes"] <= limit_bytes else "does not fit"
        print(f"{mode:<27} {format_size(run['peak_bytes']):>10} {run['step_s']:>8.3f} s  {fits}")
    print(last["overlap"])
    same = all(run["losses"] == last["losses"] for run in runs.values())
    print(f"losses: {'the same, to the bit' if same else 'different'}")
    if last["peak_bytes"] > limit_bytes or not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
