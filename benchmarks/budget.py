"""Train under byte budgets on a CPU: is each kept, was the step predicted, is it the fastest?

Each mode trains in a process of its own, because the peak of resident memory (RSS) belongs to the
process. Budgets lie between what a process occupies before training and the peak of plain training.
Beside them stand the rules that people make by hand: one for all layers, and offloading the first k
layers for each k. All modes of a model run in turn, in several rounds, so that what else the
machine does meets each of them.

Run: ``python -m benchmarks.budget``
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

import ebbtide
from benchmarks import record
from benchmarks.models import UNet
from ebbtide.stores.measured_memory import AbstractMemory, ProcessMemory
from ebbtide.tools.darcy import gaussian_field

_MIB = 2**20
_SHARES = (0.3, 0.5, 0.7)
_WARM_UP = 2  # steps of a rule that are not timed
_SETTLING = 60  # steps that a budget may take to settle
_RULES: dict[str, Any] = {
    "offload all": {"activations": ebbtide.ActivationPolicy(rebuild=False)},
    "recompute all": {"activations": ebbtide.ActivationPolicy(mode="recompute", rebuild=False)},
    "recompute + offload all": {
        "activations": ebbtide.ActivationPolicy(mode="recompute+offload", rebuild=False)
    },
    "rebuild alone": {"activations": ebbtide.ActivationPolicy(num_layers=0)},
}

_PART = "offload the first"  # and how many layers

Step = Callable[[], Tensor]


@final
class _Highest(AbstractMemory):
    """The process's memory; remembers the highest peak, however often the peak is reset."""

    def __init__(self) -> None:
        self._process = ProcessMemory()
        self.highest_bytes = 0

    def now_bytes(self) -> int:
        return self._process.now_bytes()

    def peak_bytes(self) -> int:
        return self._process.peak_bytes()

    @property
    def total_bytes(self) -> int:
        return self._process.total_bytes

    def return_freed(self) -> None:
        self._process.return_freed()

    def reset_peak(self) -> None:
        self.highest_bytes = max(self.highest_bytes, self._process.peak_bytes())
        self._process.reset_peak()


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(_MODELS), choices=list(_MODELS))
    parser.add_argument("--steps", type=int, default=4, help="steps that are timed in a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        _work(*arguments.worker, arguments.steps)
        return
    results = {name: _measure(name, arguments.steps, arguments.rounds) for name in arguments.models}
    table = _table(results)
    print(table)
    configuration = {
        "steps": arguments.steps,
        "rounds": arguments.rounds,
        "shares": _SHARES,
        "threads": 1,
    }
    print(record.save("budget", configuration, results, table).name)


def _measure(name: str, steps: int, rounds: int) -> dict[str, Any]:
    """Train one model in all modes."""
    plain = _run(name, "rule", "no offload", steps)
    room = plain["peak_bytes"] - plain["idle_bytes"]
    budgets = [plain["idle_bytes"] + int(share * room) for share in _SHARES]
    modes = [("rule", "no offload", "no offload")]
    modes += [("budget", str(each), f"budget {each / _MIB:.0f} MiB") for each in budgets]
    modes += [("rule", rule, rule) for rule in _RULES]
    with ebbtide.offload(_MODELS[name]()[0]) as handle:
        parts = [f"{_PART} {count}" for count in range(1, len(handle.layers))]
    modes += [("rule", rule, rule) for rule in parts]
    found: dict[str, list[dict[str, Any]]] = {label: [] for _, _, label in modes}
    for _ in range(rounds):
        for kind, value, label in modes:
            found[label].append(_run(name, kind, value, steps))
    return {label: _together(runs) for label, runs in found.items()}


def _together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What several runs of one mode show together: the highest peaks, and median seconds."""
    for run in runs:
        if "refused" in run:
            return run
    together = {**max(runs, key=lambda run: run["peak_bytes"]), "runs": runs}
    together["settling_peak_bytes"] = max(run["settling_peak_bytes"] for run in runs)
    timed = [run["samples_s"][run["settling_steps"] :] for run in runs]
    together["step_s"] = statistics.median(itertools.chain.from_iterable(timed))
    for figure in ("predicted_s", "first_s"):
        if figure in together:
            together[figure] = statistics.median(run[figure] for run in runs)
    return together


def _run(name: str, kind: str, value: str, steps: int) -> dict[str, Any]:
    """Train in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.budget", "--steps", str(steps)]
    done = subprocess.run(
        [*command, "--worker", name, kind, value],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name}, {value}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}, {kind} {value}: {_cells(found)}", file=sys.stderr, flush=True)
    return found


def _work(name: str, kind: str, value: str, steps: int) -> None:
    """Train in this process and print what was measured."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, compute = _MODELS[name]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    memory = _Highest()
    idle_bytes = memory.now_bytes()
    handle, budget = None, None
    if kind == "budget":
        budget = int(value)
        handle = ebbtide.offload(model, budget=budget)
    elif value in _RULES:
        handle = ebbtide.offload(model, **_RULES[value])
    elif value != "no offload":
        policy = ebbtide.ActivationPolicy(num_layers=int(value.split()[-1]), rebuild=False)
        handle = ebbtide.offload(model, activations=policy)
    try:
        _train(compute, optimizer, memory, idle_bytes, handle, budget, steps)
    except ebbtide.BudgetError as error:
        print(json.dumps({"refused": str(error), "smallest_bytes": error.smallest_bytes}))


def _train(
    compute: Step,
    optimizer: torch.optim.Optimizer,
    memory: _Highest,
    idle_bytes: int,
    handle: ebbtide.OffloadHandle | None,
    budget: int | None,
    steps: int,
) -> None:
    losses, seconds = [], []
    memory.reset_peak()
    memory.highest_bytes = 0

    def step() -> None:
        begin_s = time.perf_counter()
        optimizer.zero_grad()
        loss = compute()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seconds.append(time.perf_counter() - begin_s)
        losses.append(loss.item().hex())

    plan = None
    if budget is None:
        for _ in range(_WARM_UP):
            step()
    else:
        for _ in range(_SETTLING):
            step()
            plan = None if handle is None else handle.plan
            if plan is not None and plan.settled:
                break
    settling = len(seconds)
    memory.reset_peak()
    settling_bytes, memory.highest_bytes = memory.highest_bytes, 0
    for _ in range(steps):
        step()
    memory.reset_peak()
    found: dict[str, Any] = {
        "idle_bytes": idle_bytes,
        "settling_steps": settling,
        "settling_peak_bytes": settling_bytes,
        "peak_bytes": memory.highest_bytes,
        "step_s": statistics.median(seconds[settling:]),
        "samples_s": seconds,
        "losses": losses[:4],
    }
    if plan is not None:
        found["budget_bytes"] = budget
        found["settled"] = plan.settled
        found["predicted_peak_bytes"] = plan.plan.peak_bytes
        found["predicted_s"] = plan.plan.step_s
        if plan.at_first is not None:
            found["first_peak_bytes"], found["first_s"] = plan.at_first
        found["gap"] = plan.plan.gap
        found["plan"] = str(plan).splitlines()
    print(json.dumps(found))


def _table(results: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| model | mode | peak | highest while settling | predicted peak | at first | step "
        "| predicted step | at first | fastest rule that fits |",
        "|" + "---|" * 10,
    ]
    for name, modes in results.items():
        losses = modes["no offload"]["losses"]
        for mode, found in modes.items():
            if "refused" not in found:
                assert found["losses"] == losses, f"{name}, {mode}: other losses"
            if not mode.startswith(_PART):
                lines.append(f"| {name} | {mode} | {_cells(found)} | {_rival(found, modes)} |")
    return "\n".join(lines)


def _rival(found: dict[str, Any], modes: dict[str, Any]) -> str:
    """The fastest rule whose peak is within the same budget."""
    rules = {mode: each for mode, each in modes.items() if not mode.startswith("budget")}
    fits = [mode for mode in rules if rules[mode]["peak_bytes"] <= found.get("budget_bytes", 0)]
    if not fits:
        return ""
    best = min(fits, key=lambda mode: float(rules[mode]["step_s"]))
    return f"{best}: {rules[best]['step_s']:.2f} s"


def _cells(found: dict[str, Any]) -> str:
    if "refused" in found:
        smallest = f"refused; the smallest is {found['smallest_bytes'] / _MIB:.0f} MiB"
        return " | ".join([smallest, *[""] * 6])

    def size(figure: str) -> str:
        return f"{found[figure] / _MIB:.0f} MiB" if figure in found else ""

    def seconds(figure: str) -> str:
        return f"{found[figure]:.2f} s" if figure in found else ""

    sizes = ("peak_bytes", "settling_peak_bytes", "predicted_peak_bytes", "first_peak_bytes")
    times = ("step_s", "predicted_s", "first_s")
    return " | ".join([*map(size, sizes), *map(seconds, times)])


# ---- models --------------------------------------------------------------------------------------


def _field(batch: int, channels: int, size: int) -> Tensor:
    """Smooth random fields, as neural operators get them."""
    rng = np.random.default_rng(0)
    fields = [torch.from_numpy(gaussian_field(size, rng)) for _ in range(batch * channels)]
    return torch.stack(fields).float().view(batch, channels, size, size)


def _operator(kind: str, size: int, batch: int, **more: Any) -> tuple[nn.Module, Step]:
    import neuralop.models

    build = getattr(neuralop.models, kind)
    model = build(
        n_modes=(16, 16), in_channels=1, out_channels=1, hidden_channels=32, n_layers=4, **more
    )
    x = _field(batch, 1, size)
    return model, lambda: model(x).square().mean()


def _unet() -> tuple[nn.Module, Step]:
    def stage(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        )

    model, x = UNet(stage, (24, 48, 96)), _field(4, 1, 192)
    return model, lambda: model(x).square().mean()


def _gpt() -> tuple[nn.Module, Step]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=6, n_embd=192, n_head=4, vocab_size=2000, n_positions=256, use_cache=False
    )
    model = GPT2LMHeadModel(config)
    text = torch.frombuffer(bytearray((ebbtide.__doc__ or " ").encode() * 100), dtype=torch.uint8)
    ids = text[: 6 * 256].long().view(6, 256)
    return model, lambda: model(input_ids=ids, labels=ids).loss


_MODELS: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
    "FNO 128": lambda: _operator("FNO", 128, 8),
    "FNO 256": lambda: _operator("FNO", 256, 3),
    "TFNO 128": lambda: _operator("TFNO", 128, 8, factorization="tucker", rank=0.2),
    "UNet 192": _unet,
    "GPT": _gpt,
}


if __name__ == "__main__":
    main()
