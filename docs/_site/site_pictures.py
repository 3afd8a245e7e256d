"""Draws the pictures of the documentation, from real steps and from ebbtide's own rehearsals.

    python docs/_site/site_pictures.py             # all of them, a few minutes
    python docs/_site/site_pictures.py link        # those whose names contain "link"

They go to docs/images. Each function's name is the name of its picture.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

import ebbtide
from ebbtide.planning import Hardware
from ebbtide.stores.measured_memory import ProcessMemory
from ebbtide.tools.demo import ENVIRONMENT
from ebbtide.tools.plan_tables import run_plan
from ebbtide.units import format_size

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
MIB = 2**20

# The palette of Okabe and Ito, as in the pictures that ebbtide draws itself.
BLUE, SKY, ORANGE, GREEN, RED, GREY, INK = (
    "#0072B2",
    "#56B4E9",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#999999",
    "#222222",
)


Draw = Callable[[Path], None]
PICTURES: dict[str, Draw] = {}


def picture(draw: Draw) -> Draw:
    """Register a function that draws a picture into a file."""
    PICTURES[draw.__name__.replace("_", "-")] = draw
    return draw


@contextlib.contextmanager
def sampled(memory: ProcessMemory) -> Iterator[list[tuple[float, int]]]:
    """Sample memory from a thread while the block runs.

    Yields:
        Pairs of seconds since the block began and bytes in use, one every 5 ms; the list grows.
    """
    samples: list[tuple[float, int]] = []
    over = threading.Event()
    begin_s = time.perf_counter()

    def sample() -> None:
        while not over.wait(0.005):
            samples.append((time.perf_counter() - begin_s, memory.now_bytes()))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def new_figure(height_inches: float, width_inches: float = 9.0) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width_inches, height_inches), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    return figure, axes


# ---- the first picture ----------------------------------------------------------------------


def memory_over_a_step(offloaded: bool) -> list[tuple[float, float]]:
    """Train an FNO; return (s, MiB above an idle process) over its third step, every 5 ms."""
    from neuralop.models import FNO

    torch.manual_seed(0)
    memory = ProcessMemory()
    model = FNO(n_modes=(16, 16), in_channels=1, out_channels=1, hidden_channels=32)
    model(torch.ones(1, 1, 32, 32)).sum().backward()  # creates gradients and thread pools
    x = torch.randn(8, 1, 256, 256)
    idle_bytes = memory.now_bytes()
    if offloaded:
        ebbtide.offload(model)
    for _ in range(3):
        with sampled(memory) as samples:
            model(x).square().mean().backward()
            time.sleep(0.05)  # what the step has freed
    return [(at_s, (size - idle_bytes) / MIB) for at_s, size in samples]


@picture
def before_and_after(path: Path) -> None:
    """The process's memory over one step of an FNO, without and with ebbtide."""
    figure, axes = new_figure(3.4, 6.4)  # narrow, so that it can be read on a phone
    os.environ.update(ENVIRONMENT)  # as the demo does, so that the baseline is a fast one
    for name, colour in {"without ebbtide": RED, "with ebbtide": BLUE}.items():
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            samples = process.submit(memory_over_a_step, name == "with ebbtide").result()
        times_s, sizes = zip(*samples, strict=True)
        shares = [100 * at_s / times_s[-1] for at_s in times_s]  # other programs share the cores
        label = f"{name}: peak {max(sizes):,.0f} MiB"
        axes.plot(shares, sizes, color=colour, linewidth=1.6, label=label)
        axes.fill_between(shares, sizes, color=colour, alpha=0.12, linewidth=0)
    axes.set_xlim(0, 100)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.25)
    axes.set_xlabel("% of the step: forward, then backward", fontsize=11)
    axes.set_ylabel("MiB above idle (RSS)", fontsize=11)
    axes.set_title("One training step of an FNO, 256 x 256, on a CPU", loc="left")
    axes.legend(frameon=False, loc="upper center", ncols=2, fontsize=10)
    figure.savefig(path)


# ---- what a step keeps ----------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 1024), nn.Linear(1024, 512)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return out


def held_by_passes(policy: ebbtide.ActivationPolicy, blocks: int = 10) -> list[float]:
    """Train a chain of blocks; return the MiB that saved tensors hold when each pass begins."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(blocks)])
    held: list[float] = []
    with ebbtide.offload(model, activations=policy) as handle:

        def note(*_: object) -> None:
            now = handle.inspect().in_flight
            held.append((now.kept_bytes + now.offload_bytes + now.reload_bytes) / MIB)

        for _ in range(2):  # the second step prefetches in the order of the first
            held.clear()
            for block in model:
                block.register_forward_pre_hook(note)
                block.register_full_backward_pre_hook(note)
            model(torch.randn(4096, 512)).square().mean().backward()
            for block in model:
                block._forward_pre_hooks.clear()
                block._backward_pre_hooks.clear()
    return held


@picture
def held_by_a_step(path: Path) -> None:
    """What saved tensors hold on the device, over the passes of a step."""
    policies = {
        "kept: autograd alone": ebbtide.ActivationPolicy(num_layers=0, rebuild=False),
        "GELU rebuilt, the rest kept": ebbtide.ActivationPolicy(num_layers=0),
        "offloaded": ebbtide.ActivationPolicy(max_inflight_bytes="32MiB"),
    }
    figure, axes = new_figure(4.0)
    for (label, policy), colour in zip(policies.items(), (BLUE, ORANGE, GREEN), strict=True):
        held = held_by_passes(policy)
        axes.step(range(len(held)), held, where="mid", color=colour, linewidth=2, label=label)
        axes.fill_between(range(len(held)), held, step="mid", color=colour, alpha=0.12, linewidth=0)
    blocks = len(held) // 2
    names = [f"F{n}" for n in range(blocks)] + [f"B{n}" for n in reversed(range(blocks))]
    axes.set_xticks(range(len(held)), names, fontsize=9)
    axes.set_ylabel("saved tensors on the device (MiB)")
    axes.set_ylim(bottom=0)
    axes.set_title(f"One step of {blocks} blocks: forward to the right, then backward", loc="left")
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(path)


def fno_stats() -> ebbtide.StepStats:
    from neuralop.models import FNO

    torch.manual_seed(0)
    model = FNO(n_modes=(16, 16), in_channels=1, out_channels=1, hidden_channels=32)
    with ebbtide.offload(model) as handle:
        model(torch.randn(8, 1, 128, 128)).square().mean().backward()
        return handle.stats


@picture
def fno_bytes(path: Path) -> None:
    """What becomes of the bytes that one step of an FNO saves."""
    stats = fno_stats()
    repeats = stats.saved_bytes - stats.unique_bytes - stats.parameter_bytes
    parts = {
        "saved again: the same storage": (repeats, GREY),
        "parameters, on the device anyway": (stats.parameter_bytes, SKY),
        "rebuilt in backward": (stats.rebuilt_bytes, ORANGE),
        "small, kept": (stats.kept_bytes, BLUE),
        "offloaded": (stats.offloaded_bytes, GREEN),
    }
    figure, axes = new_figure(3.0)
    total = left = 0.0
    for row, (size, colour) in enumerate(parts.values()):
        axes.barh(row, size / MIB, left=left, color=colour)
        total = left = left + size / MIB
        axes.text(left, row, f"  {format_size(size)}", va="center", fontsize=9)
    axes.set_yticks(range(len(parts)), parts)
    axes.invert_yaxis()
    axes.set_xlim(0, total * 1.15)
    axes.set_xlabel("MiB")
    axes.set_title(
        f"FNO, 128 x 128, batch 8: of {format_size(stats.saved_bytes)} saved, "
        f"{format_size(stats.offloaded_bytes)} leave",
        loc="left",
    )
    figure.savefig(path)


# ---- tiers ----------------------------------------------------------------------------------


@picture
def tiers(path: Path) -> None:
    """How many bytes a second each tier takes, for three machines."""
    machines = [Hardware.named(name) for name in ("rtx4090", "h100-sxm", "gh200")]
    rows = {
        "the device's own memory": [each.device_memory_bytes_per_s for each in machines],
        "down to host memory": [each.d2h_bytes_per_s for each in machines],
        "down to one NVMe disk": [each.disk_write_bytes_per_s or 0 for each in machines],
    }
    figure, axes = new_figure(3.6)
    for place, (machine, colour) in enumerate(zip(machines, (BLUE, ORANGE, GREEN), strict=True)):
        for row, rates in enumerate(rows.values()):
            height = row + 0.26 * (place - 1)
            label = machine.name if row == 0 else None
            axes.barh(height, rates[place] / 1e9, 0.24, color=colour, label=label)
            text = f" {rates[place] / 1e9:,.4g} GB/s"
            axes.text(rates[place] / 1e9, height, text, va="center", fontsize=9)
    axes.set_xscale("log")
    axes.set_xlim(1, 30_000)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel("GB/s, as programs get it; each division is ten times the one before")
    axes.set_title("Each tier down is much slower than the one above", loc="left")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


# ---- what bounds you ------------------------------------------------------------------------


def rehearsed(num_layers: int, bandwidth_bytes_per_s: float) -> ebbtide.Trace:
    """Rehearse k of 8 layers of 64 MiB, whose forward takes 10 ms and backward 20 ms."""
    return ebbtide.rehearse(
        ebbtide.schedule.default(num_layers, 8),
        layer_bytes="64MiB",
        forward_s=10e-3,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
    )


@picture
def link_fast(path: Path) -> None:
    """Five of eight layers over a link of 12 GB/s: copies hide."""
    rehearsed(5, 12e9).plot(path)


@picture
def link_slow(path: Path) -> None:
    """The same over a link of 3 GB/s: compute waits."""
    rehearsed(5, 3e9).plot(path)


@picture
def link_fewer(path: Path) -> None:
    """Two of eight layers over the link of 3 GB/s: copies hide again."""
    rehearsed(2, 3e9).plot(path)


@picture
def working_set(path: Path) -> None:
    """An FNO's step within a small budget, pass by pass, as `ebbtide plan` predicts it."""
    study = run_plan("fno2d", {"resolution": 512}, "h100", "2.4GiB")
    assert study.chosen is not None
    count = len(study.profile.layers)
    kept = study.predict(study.rule("keep all", study.budget_bytes)).peak_by_position
    curves = {
        ("everything kept", ORANGE): kept,
        ("within the budget", BLUE): study.predict(study.chosen).peak_by_position,
    }
    figure, axes = new_figure(4.5)
    for (name, colour), peaks in curves.items():
        heights = [peak / 2**30 for peak in (*peaks, peaks[-1])]
        axes.fill_between(range(len(heights)), heights, step="post", color=colour, label=name)
    budget = study.budget_bytes / 2**30
    axes.axhline(budget, color=RED, linestyle="--", label=f"budget of {budget:.1f} GiB")
    names = [*(f"F{n}" for n in range(count)), "loss", *(f"B{n}" for n in reversed(range(count)))]
    axes.set_xticks([n + 0.5 for n in range(len(names))], names)
    axes.set(ylim=(0, max(kept) / 2**30 * 1.35), ylabel="device memory at the peak (GiB)")
    axes.set_title(f"{study.task.title}, 512 x 512: predicted", loc="left", fontsize=10)
    axes.legend(loc="upper left", ncols=2, frameon=False, fontsize=8.5)
    figure.savefig(path)


# ---- examples -------------------------------------------------------------------------------


def run_example(arguments: list[str]) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


@picture
def example_memory(path: Path) -> None:
    """The peaks that examples/larger_than_memory.py measures."""
    text = run_example(["examples/larger_than_memory.py"])
    sizes = {
        name.strip(): float(size) * (1024 if unit == "GiB" else 1)
        for name, size, unit in re.findall(r"^ *([a-z, ]+?) +([\d.]+) ([MG]iB)", text, re.MULTILINE)
    }
    limit = float(re.findall(r"limit ([\d.]+) MiB", text)[0])
    figure, axes = new_figure(3.0)
    left = 0.0
    parts = {"weights": BLUE, "gradients": SKY, "optimizer": ORANGE, "activations": GREEN}
    for name, colour in parts.items():
        axes.barh(0, sizes[name], left=left, color=colour, label=name)
        left += sizes[name]
    for row, (name, colour) in enumerate({"peak, as it is": GREY, "peak, offloaded": INK}.items()):
        axes.barh(row + 1, sizes[name], color=colour)
        axes.text(sizes[name], row + 1, f"  {sizes[name]:.0f} MiB", va="center", fontsize=9)
    axes.axvline(limit, color=RED, linestyle="--", linewidth=1.3)
    axes.text(limit, -0.55, f" limit {limit:.0f} MiB", color=RED, fontsize=9)
    axes.set_yticks(range(3), ["what training needs", "measured peak, as it is", "with ebbtide"])
    axes.invert_yaxis()
    axes.set_xlabel("MiB above an idle process")
    axes.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.45, -0.2))
    figure.savefig(path)


@picture
def example_fno(path: Path) -> None:
    """One real step of the FNO of examples/neuralop_darcy.py on this machine's CPU."""
    from neuralop.models import FNO

    torch.manual_seed(0)
    model = FNO(
        n_modes=(16, 16), in_channels=1, out_channels=1, hidden_channels=32,
        projection_channel_ratio=2,
    )  # fmt: skip
    with ebbtide.offload(model, trace=True) as handle:
        for _ in range(3):
            model(torch.randn(8, 1, 128, 128)).square().mean().backward()
        handle.trace.plot(path)


@picture
def example_pipeline(path: Path) -> None:
    """The schedule that rank 0 of examples/pipeline.py follows, rehearsed."""
    order = pipeline_order(rank=0, ranks=2, stages_a_rank=2, microbatches=8)
    schedule = ebbtide.schedule.from_pipeline(order, resident=2)
    trace = ebbtide.rehearse(
        schedule, layer_bytes="64MiB", forward_s=10e-3, bandwidth_bytes_per_s=12e9
    )
    trace.plot(path)


def pipeline_order(rank: int, ranks: int, stages_a_rank: int, microbatches: int) -> list[Any]:
    """Return what torch's interleaved 1F1B does on one rank."""
    from torch.distributed.pipelining import ScheduleInterleaved1F1B

    class Stage:  # what the schedule reads of a stage while it is built
        def __init__(self, index: int) -> None:
            self.stage_index, self.num_stages = index, ranks * stages_a_rank
            self.group_size, self.group_rank = ranks, rank
            self.has_backward, self.is_first, self.is_last = True, index == 0, False

    stages = [Stage(number) for number in range(rank, ranks * stages_a_rank, ranks)]
    pipeline = ScheduleInterleaved1F1B(stages, microbatches, loss_fn=nn.functional.mse_loss)
    return [action for action in pipeline.pipeline_order[rank] if action is not None]


def main(wanted: str = "") -> None:
    for name, draw in PICTURES.items():
        if wanted in name:
            path = IMAGES / f"{name}.png"
            draw(path)
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main(*sys.argv[1:2])
