"""The demo: trains the same FNO on Darcy flow without and with offload, and compares and reports.

Each mode has a process of its own, so that its memory can be measured.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import statistics
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from ebbtide.api import offload
from ebbtide.errors import PolicyError
from ebbtide.handle import OffloadHandle, record_run
from ebbtide.observe.page import write_page
from ebbtide.observe.run_record import RunRecord, versions_with
from ebbtide.policy import ActivationPolicy
from ebbtide.stores.measured_memory import memory_of
from ebbtide.tools.darcy import load_darcy_flow_small
from ebbtide.tools.machine import cpu_name, find_directory
from ebbtide.units import format_seconds, format_size

FORMAT: Final = "ebbtide-demo"
VERSION: Final = 4
QUICK: Final = {"resolution": 128, "steps": 6}  # of a quick look

_LEAST_RESOLUTION: Final = 32  # that has the modes of the model
_SEED: Final = 0
_LEARNING_RATE: Final = 0.02  # with which the error halves in 15 steps
_WIDTH: Final = 80
_ABSENT: Final = "-"


MODES: Final = {"none": "no offload", "ebbtide": "ebbtide"}
"""How a run treats saved activations, and the names of that in the table and the sentences."""


@dataclass(frozen=True)
class DemoConfig:
    """The configuration of one run of the demo.

    Args:
        resolution: nodes along each side of the grid.
        batch_size: number of samples in a training step.
        steps: number of training steps of each mode; all but the first two are timed.
        device: device on which the models compute.
        store: where ebbtide stores offloaded bytes, as for `ebbtide.offload`.
        out: directory for the results.

    Raises:
        PolicyError: a number is out of range, or there is no such store.
    """

    resolution: int = 256
    batch_size: int = 8
    steps: int = 15
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    store: str = "auto"
    out: Path = Path("runs/demo")

    def __post_init__(self) -> None:
        least = {"resolution": _LEAST_RESOLUTION, "batch_size": 1, "steps": 3}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                option = name.replace("_", "-")
                raise PolicyError(f"--{option} must be {bound} or more, got {getattr(self, name)}")
        find_directory(self.store)


# ---- The results of each mode, and the bitwise comparison of two modes ----

UNTIMED: Final = 2  # first steps of a mode, in which memory is taken and libraries warm up


Result = dict[str, Any]
"""The figures of one mode, as the JSON has them.

``idle_bytes``: in use just before the first training step; ``peak_bytes``: the most in any step;
``median_s``: of the timed steps; ``parameters_sha256``: hash of all parameters after the last step;
``steps``: of each step ``duration_s``, ``peak_bytes``, ``loss``, ``gradients_sha256``, and
ebbtide's ``stats``, or None.
"""


def first_difference(reference: Result, other: Result) -> str | None:
    """Compare losses and gradients of every step and the final parameters, bit by bit.

    Returns:
        None if all are the same, else the first difference, such as ``"gradients, step 2"``.
    """
    pairs = zip(reference["steps"], other["steps"], strict=True)
    for number, (expected, step) in enumerate(pairs, start=1):
        for name in ("loss", "gradients_sha256"):
            if expected[name] != step[name]:
                return f"{name.partition('_')[0]}, step {number}"
    same = reference["parameters_sha256"] == other["parameters_sha256"]
    return None if same else "final parameters"


def timed_s(result: Result) -> list[float]:
    """Return the durations of the steps that count: all but the first ones."""
    return [step["duration_s"] for step in result["steps"][UNTIMED:]]


# ---- The model and its training, as in neuraloperator's example on Darcy flow ----


def build_model(device: torch.device) -> nn.Module:
    """Build the FNO. Its weights are the same each time."""
    from neuralop.models import FNO

    torch.manual_seed(_SEED)
    model: nn.Module = FNO(
        n_modes=(16, 16),
        in_channels=1,
        out_channels=1,
        hidden_channels=32,
        projection_channel_ratio=2,
    )
    return model.to(device)


def load_data(config: DemoConfig) -> tuple[Iterable[dict[str, torch.Tensor]], Any]:
    """Return a batch for every step and two more, and neuraloperator's processor of batches.

    Samples that no run before has left in the cache are generated.
    """
    count = (config.steps + 2) * config.batch_size
    loader, _, processor = load_darcy_flow_small(
        count, [], config.batch_size, [], train_resolution=config.resolution, test_resolutions=[],
        encode_input=True, seed=_SEED,
    )  # fmt: skip
    processor.eval()  # in training mode it would leave predictions normalized
    processor.to(config.device)
    return loader, processor


# ---- The process of one mode ----


def train_mode(config: DemoConfig, mode: str) -> tuple[Result, RunRecord]:
    """Train the model of one mode in this process, and measure it.

    Returns:
        Its figures, and what a page can show of one more step.
    """
    from neuralop import LpLoss
    from neuralop.training import AdamW

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    on_cpu = config.device.type == "cpu"
    if not on_cpu:
        _compute_reproducibly(config.device)
    warnings.filterwarnings("ignore", message=".*_skip", category=UserWarning)
    model = build_model(config.device)
    handle = _offload(model, mode, config)
    loss_of = LpLoss(d=2, p=2)
    optimizer = AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=1e-4)
    loader, processor = load_data(config)
    memory = memory_of(config.device)

    def train(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        batch = processor.preprocess(batch)
        prediction, batch = processor.postprocess(model(batch["x"]), batch)
        loss: torch.Tensor = loss_of(prediction, batch["y"])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    def synchronize() -> None:
        if not on_cpu:
            torch.accelerator.synchronize()

    # A tiny grid creates thread pools, FFT plans and code pages, so that they count as idle memory.
    tiny = torch.ones(1, 1, _LEAST_RESOLUTION, _LEAST_RESOLUTION, device=config.device)
    model(tiny).sum().backward()
    synchronize()
    result: Result = {"idle_bytes": memory.now_bytes(), "steps": []}
    batches = iter(loader)
    for batch in itertools.islice(batches, config.steps):
        memory.reset_peak()
        synchronize()
        begin_s = time.perf_counter()
        loss = train(batch)
        synchronize()
        duration_s, peak_bytes = time.perf_counter() - begin_s, memory.peak_bytes()
        gradients = digest((name, value.grad) for name, value in model.named_parameters())
        entry = {"duration_s": duration_s, "peak_bytes": peak_bytes, "gradients_sha256": gradients}
        entry["loss"] = loss.item() / config.batch_size
        entry["stats"] = None if handle is None else dataclasses.asdict(handle.stats)
        result["steps"].append(entry)
    result["peak_bytes"] = max(step["peak_bytes"] for step in result["steps"])
    result["median_s"] = statistics.median(timed_s(result))
    result["parameters_sha256"] = digest(model.named_parameters())
    if handle is not None:
        handle.detach()
    memory.return_freed()
    with cast(OffloadHandle, _offload(model, mode, config, trace=True)) as traced:
        for batch in batches:  # two more steps, of which the second is recorded
            train(batch)
        return result, record_run(traced, MODES[mode])


def _offload(
    model: nn.Module, mode: str, config: DemoConfig, *, trace: bool = False
) -> OffloadHandle | None:
    """Offload as the mode says; None without offload, unless a step is to be recorded.

    Args:
        model: the model.
        mode: the mode.
        config: the run.
        trace: whether to record steps. Without offload, everything is then kept.
    """
    if mode == "ebbtide":
        return offload(model, store=config.store, trace=trace)
    if not trace:
        return None
    kept = ActivationPolicy(num_layers=0, rebuild=False)
    return offload(model, activations=kept, store=config.store, trace=trace)


def _compute_reproducibly(device: torch.device) -> None:
    """Choose deterministic kernels; without them two runs of a mode may differ in the last bits."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    torch.use_deterministic_algorithms(True, warn_only=True)
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)


def digest(tensors: Iterable[tuple[str, torch.Tensor | None]]) -> str:
    """Return the SHA-256 over the names, types, shapes and bytes of tensors."""
    hashed = hashlib.sha256()
    for name, tensor in tensors:
        if tensor is None:
            hashed.update(f"{name}: none".encode())
            continue
        hashed.update(f"{name}: {tensor.dtype} {tuple(tensor.shape)}".encode())
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        hashed.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


# ---- One process after the other ----

# [Note: a fair baseline] On a CPU, two costs would hide those of offloading. Torch takes the memory
# of every large tensor fresh from the kernel, and in pages of 4 KiB that took two thirds of a plain
# step. Threads that spin while they wait for one another become several times slower when another
# program runs. These variables avoid both costs; settings of the user take precedence.
ENVIRONMENT = {"THP_MEM_ALLOC_ENABLE": "1", "OMP_WAIT_POLICY": "passive"}


def _run_mode(config: DemoConfig, mode: str) -> tuple[Result, RunRecord]:
    """Train a mode in a process of its own.

    Raises:
        PolicyError: the mode cannot do what the user asked for.
        BrokenProcessPool: the process has died.
    """
    # A forked child would inherit the parent's memory, and a state of torch in which the parent's
    # threads seem to run but do not exist.
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    try:
        outcome = pool.submit(train_mode, config, mode).result()
    except BaseException:
        # Shutting the pool down would wait for what the process is at, and raise another error if
        # Ctrl+C came while the pool was starting.
        for process in multiprocessing.active_children():
            process.kill()
            process.join()
        raise
    pool.shutdown()
    return outcome


def run_demo(config: DemoConfig, progress: Console) -> bool:
    """Train, measure, compare and report.

    Args:
        config: the run.
        progress: where to say what is under way.

    Returns:
        Whether ebbtide's run was bitwise the same as the run without offload.

    Raises:
        PolicyError: the configuration asks for something that cannot be done on this machine.
        ImportError: neuraloperator is not installed.
        BrokenProcessPool: the process of a mode has died.
    """
    config.out.mkdir(parents=True, exist_ok=True)
    (config.out / "demo.json").touch()  # or fails now, and not after minutes of training
    begin_s = time.perf_counter()
    where = "the CPU" if config.device.type == "cpu" else str(config.device)
    for line in (
        f"A Fourier neural operator learns Darcy flow at {config.resolution} x "
        f"{config.resolution} on {where}, batch {config.batch_size}.",
        f"Modes: {', '.join(MODES.values())}. Each trains {config.steps} steps.",
        "The data are generated, unless a run before has left them here.",
    ):
        progress.print(line, highlight=False)
    load_data(config)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # the processes inherit the environment
    results, records = dict[str, Result](), list[RunRecord]()
    for mode, title in MODES.items():
        with progress.status(f"Training: {title}"):
            results[mode], record = _run_mode(config, mode)
        records.append(record)
    _report(config, results, records)
    progress.print(f"{time.perf_counter() - begin_s:.0f} s in all", highlight=False)
    return first_difference(*results.values()) is None


# ---- The report ----


def _report(
    config: DemoConfig, results: Mapping[str, Result], records: Sequence[RunRecord]
) -> None:
    """Write the files, and print the table."""
    figures, page = config.out / "demo.json", config.out / "demo.html"
    figures.write_text(json.dumps(_as_document(config, results), indent=2) + "\n")
    write_page(page, records)
    report = Console()
    width = min(report.width, _WIDTH)
    report.print()
    report.print(build_table(config, results), width=width)
    report.print(describe_copies(results["ebbtide"]), width=width, highlight=False)
    for line in ("", f"Report: {page}", f"Figures: {figures}"):
        report.print(line, soft_wrap=True, markup=False, highlight=False)


def build_table(config: DemoConfig, results: Mapping[str, Result]) -> Table:
    """Build the table of results, with one column per mode."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(
        f"FNO, Darcy {config.resolution} x {config.resolution}, batch {config.batch_size}"
    )
    for mode, title in MODES.items():
        style = "bold" if mode == "ebbtide" else ""
        table.add_column(title, justify="right", style=style)
    what = "RSS" if config.device.type == "cpu" else "device memory"
    difference = first_difference(*results.values())
    same = "[green]same bits[/]" if difference is None else f"[red]differ: {difference}[/]"
    plain, offloaded = (_cells(each, what, results["none"]) for each in results.values())
    for (label, cell), (_, other) in zip(plain, offloaded, strict=True):
        table.add_row(label, cell, other)
    table.add_row("Losses, gradients, weights", _ABSENT, same)
    return table


def _cells(result: Result, what: str, reference: Result) -> list[tuple[str, str]]:
    """Return what the rows of the table say of a mode, each with the label of its row."""
    above_idle, of = (each["peak_bytes"] - each["idle_bytes"] for each in (result, reference))
    steps, timed = result["steps"], timed_s(result)
    stats = steps[-1]["stats"]
    sizes = [
        _ABSENT if stats is None else format_size(stats[f"{name}_bytes"])
        for name in ("saved", "unique", "rebuilt", "offloaded")
    ]
    return [
        (f"Peak {what} of a step", format_size(result["peak_bytes"])),
        ("  above idle", format_size(above_idle)),
        ("  relative to no offload", _ratio(above_idle, of)),
        (f"Step, median of {len(timed)}", format_seconds(result["median_s"])),
        ("  relative to no offload", _ratio(result["median_s"], reference["median_s"])),
        ("  fastest - slowest", f"{format_seconds(min(timed))} - {format_seconds(max(timed))}"),
        ("Saved by autograd in a step", sizes[0]),
        ("  without repeats and weights", sizes[1]),
        ("  rebuilt in backward", sizes[2]),
        ("  offloaded", sizes[3]),
        ("Error, first - last step", f"{steps[0]['loss']:.3f} - {steps[-1]['loss']:.3f}"),
    ]


def describe_copies(result: Result) -> str:
    """Say what ebbtide moves in a step, and how long the model waited for it."""
    stats = result["steps"][-1]["stats"]
    where = "disk" if stats["peak_disk_bytes"] else "host memory"
    rate = format_size(int(stats["offloaded_bytes"] / result["median_s"]))
    return (
        f"In each step {format_size(stats['offloaded_bytes'])} go to {where} and come back while "
        f"the model computes, which needs {rate}/s each way. In the last step the model waited "
        f"{stats['stall_s']:.2f} s for copies ({stats['late_reloads']} reloads were late)."
    )


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}x" if base else _ABSENT


def _as_document(config: DemoConfig, results: Mapping[str, Result]) -> dict[str, Any]:
    """Return all figures for a JSON file."""
    settings = dataclasses.asdict(config)
    settings |= {name: str(settings[name]) for name in ("device", "out")}
    return {
        "format": FORMAT,
        "version": VERSION,
        "environment": {
            **versions_with(config.device),
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "variables": {name: os.environ.get(name) for name in ENVIRONMENT},
        },
        "configuration": settings,
        "modes": results,
        "first_difference": first_difference(*results.values()),
    }
