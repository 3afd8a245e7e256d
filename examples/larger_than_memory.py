"""Train a model whose weights, gradients and Adam state do not fit in a given amount of memory.

    python examples/larger_than_memory.py --limit 384MiB

A residual network learns to predict how heat conduction changes a temperature profile; the targets
are exact solutions, computed as Fourier series. The network trains once as it is and once with its
weights offloaded, each time in a process of its own. The example measures the peak memory of both:
resident memory (RSS) on a CPU, allocated memory on an accelerator. The model is so large that its
weights, gradients and two optimizer states together exceed the limit.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.units import format_size, parse_size_bytes

POINTS = 1024
LAYER_BYTES = 2 * (POINTS * POINTS + POINTS) * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(POINTS, POINTS), nn.Linear(POINTS, POINTS)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * self.down(torch.tanh(self.up(x)))


def heat(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw temperature profiles on a ring and compute the profiles a moment later.

    Shape:
        return: two tensors of (rows, POINTS), float32.
    """
    modes = torch.arange(1, 17)
    amplitudes = torch.randn(rows, 16, 2, generator=generator) / modes[:, None] ** 1.5
    angles = 2 * math.pi * modes[:, None] * torch.arange(POINTS) / POINTS
    waves = torch.stack([angles.cos(), angles.sin()])
    decay = torch.exp(-0.01 * modes**2)
    before = torch.einsum("rmk,kmp->rp", amplitudes, waves)
    after = torch.einsum("rmk,m,kmp->rp", amplitudes, decay, waves)
    return before, after


def train(layers: int, steps: int, offloaded: bool) -> dict[str, object]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = accelerator or torch.device("cpu")
    torch.manual_seed(0)
    load_what_optimizers_need()
    idle_bytes = memory_bytes(device, "VmRSS")
    model = nn.Sequential(*[Block() for _ in range(layers)]).to(device)
    if offloaded:
        ebbtide.offload(model, weights=ebbtide.WeightPolicy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    reset_peak(device)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x, y = (part.to(device) for part in heat(32, generator))
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    peak_bytes = memory_bytes(device, "VmHWM") - idle_bytes
    return {"peak_bytes": peak_bytes, "losses": losses}


def load_what_optimizers_need() -> None:
    """Build an optimizer, so that the memory of modules that torch imports for it is not counted.

    With the first optimizer of a process torch imports its compiler, and Triton if it is there:
    70 to 160 MiB, in every mode.
    """
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])


def memory_bytes(device: torch.device, field: str) -> int:
    """Return the memory in use now (VmRSS), or its peak since `reset_peak` (VmHWM).

    On a CPU this is the memory of the process, otherwise that of the accelerator.
    """
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
        measure = torch.accelerator.max_memory_allocated
        return measure(device) if field == "VmHWM" else torch.accelerator.memory_allocated(device)
    if not Path("/proc/self/clear_refs").exists():
        raise SystemExit(
            "This example needs Linux: only there a peak of RSS can be measured again."
        )
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith(field))


def reset_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--limit", default="384MiB", help="memory on top of an idle process")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--mode", choices=["as it is", "offloaded"], help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.mode is not None:
        print(json.dumps(train(arguments.layers, arguments.steps, arguments.mode == "offloaded")))
        return
    limit_bytes = parse_size_bytes(arguments.limit, name="--limit")
    # Weights, gradients and two optimizer states are four copies; they take 1.25 x the limit.
    layers = max(8, -(-limit_bytes * 5 // (4 * 4 * LAYER_BYTES)))
    weights_bytes = layers * LAYER_BYTES
    if weights_bytes > limit_bytes:
        parser.error(f"--limit must be {format_size(8 * LAYER_BYTES)} or more")
    runs = {}
    for mode in ("as it is", "offloaded"):
        command = [sys.executable, __file__, "--mode", mode, "--layers", str(layers)]
        command += ["--steps", str(arguments.steps)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        runs[mode] = json.loads(done.stdout)
    print(f"{layers} layers, limit {format_size(limit_bytes)}")
    for what, copies in (("weights", 1), ("gradients", 1), ("optimizer", 2)):
        print(f"  {what:<12} {format_size(copies * weights_bytes):>10}")
    activations_bytes = layers * 2 * 32 * POINTS * 4  # a block saves its input and tanh's output
    print(f"  {'activations':<12} {format_size(activations_bytes):>10}")
    for mode, run in runs.items():
        fits = "fits" if run["peak_bytes"] <= limit_bytes else "does not fit"
        print(f"peak, {mode:<10} {format_size(run['peak_bytes']):>10}  {fits}")
    same = runs["as it is"]["losses"] == runs["offloaded"]["losses"]
    print(f"losses: {'the same, to the bit' if same else 'different'}")
    if runs["offloaded"]["peak_bytes"] > limit_bytes or not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
