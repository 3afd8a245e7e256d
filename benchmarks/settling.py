"""Train ten models at five budgets each: is every step within the budget, how soon is it settled?

Budgets lie between what a process or a device holds before training and the peak of plain training.
Each case trains in a process of its own. Beside the plan that has settled stand the settings that
people make by hand, in virtual time: one rule for all layers, and offloading the first k layers.

Run: ``python -m benchmarks.settling``, and for the accelerator in software
``PYTHONPATH=src:tests/softdevice python -m benchmarks.settling --device softdevice``
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

import ebbtide
from benchmarks import record
from benchmarks.models import Stack, TransformerBlock, UNet
from ebbtide.planning import PlanBudget, PlannedStep, StepTiming, offload_first, rule_plans
from ebbtide.stores.measured_memory import AbstractMemory, memory_of
from ebbtide.tools.models import LanguageModel, LanguageModelShape

_MIB: Final = 2**20
_SHARES: Final = (0.3, 0.45, 0.6, 0.8, 1.1)
_STEPS: Final = 14
_TIMED: Final = 4  # the last steps, whose seconds count
_POLICY: Final = ebbtide.ActivationPolicy(min_bytes=64 * 1024)

Made = tuple[nn.Module, tuple[Tensor, ...]]


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "softdevice"), default="cpu")
    parser.add_argument("--models", nargs="+", default=list(_MODELS), choices=list(_MODELS))
    parser.add_argument("--shares", nargs="+", type=float, default=_SHARES)
    parser.add_argument("--dry", action="store_true", help="write no result file")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        print(json.dumps(_work(given.device, given.worker[0], int(given.worker[1]))))
        return
    results = {name: _measure(given.device, name, given.shares) for name in given.models}
    table = _table(results)
    print(table)
    if not given.dry:
        configuration = {"steps": _STEPS, "shares": given.shares, "threads": 1}
        print(record.save(f"settling-{given.device}", configuration, results, table).name)


def _measure(device: str, name: str, shares: tuple[float, ...]) -> list[dict[str, Any]]:
    plain = _run(device, name, 0)
    found = [plain]
    for share in shares:
        room_bytes = plain["peak_bytes"] - plain["idle_bytes"]
        budget_bytes = plain["idle_bytes"] + int(share * room_bytes)
        entry = _run(device, name, budget_bytes)
        assert entry.get("losses", plain["losses"]) == plain["losses"], f"{name}: other losses"
        found.append({"share": share, "budget_bytes": budget_bytes, **entry})
        print(_row(name, found[-1]), file=sys.stderr, flush=True)
    return found


def _run(device: str, name: str, budget_bytes: int) -> dict[str, Any]:
    """Train in a process of its own; without a budget if that is 0."""
    command = [sys.executable, "-m", "benchmarks.settling", "--device", device]
    command += ["--worker", name, str(budget_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}, {budget_bytes}: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _work(device_name: str, name: str, budget_bytes: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    if device_name != "cpu":
        import softdevice  # type: ignore[import-not-found, unused-ignore]

        softdevice.load("threads")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device(device_name)
    model, arguments = _MODELS[name]()
    model, arguments = model.to(device), tuple(each.to(device) for each in arguments)
    memory = memory_of(device)
    idle_bytes = memory.now_bytes()
    handle = None
    if budget_bytes:
        handle = ebbtide.offload(model, budget=budget_bytes, activations=_POLICY)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    try:
        return {"idle_bytes": idle_bytes, **_train(model, arguments, optimizer, memory, handle)}
    except ebbtide.BudgetError as error:
        return {"refused_bytes": error.smallest_bytes}


def _train(
    model: nn.Module,
    arguments: tuple[Tensor, ...],
    optimizer: torch.optim.Optimizer,
    memory: AbstractMemory,
    handle: ebbtide.OffloadHandle | None,
) -> dict[str, Any]:
    peaks, used, seconds, losses, settled = [], [], [], [], []
    for _ in range(_STEPS):
        memory.reset_peak()
        begin_s = time.perf_counter()
        optimizer.zero_grad()
        output = model(*arguments)
        loss = output if output.dim() == 0 else output.square().mean()
        plan = None if handle is None else handle.plan
        settled.append(plan is not None and plan.settled)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.item()).hex())
        peaks.append(memory.reserved_peak_bytes())
        used.append(memory.peak_bytes())
        seconds.append(time.perf_counter() - begin_s)
        del output, loss
    found: dict[str, Any] = {
        "peak_bytes": max(peaks),
        "peaks": peaks,
        "step_s": statistics.median(seconds[-_TIMED:]),
        "samples_s": seconds,
        "losses": losses,
    }
    if handle is not None and plan is not None:
        found |= {
            "settled_after": settled.index(True) if any(settled) else None,
            "changed_after_settling": False in settled[settled.index(True) :]
            if any(settled)
            else 0,
            "last_peak_bytes": max(peaks[-_TIMED:]),
            "last_used_bytes": max(used[-_TIMED:]),
            "predicted_peak_bytes": plan.plan.peak_bytes,
            "predicted_s": plan.plan.step_s,
            "by_hand": _by_hand(plan),
            "plan": str(plan).splitlines(),
        }
    return found


def _by_hand(plan: PlannedStep) -> list[float | str] | None:
    """The best of the settings by hand that fit, and its step in virtual time beside the plan's."""
    timing = StepTiming(plan.profile, plan.hardware)
    budget = PlanBudget(device_bytes=plan.budget_bytes)
    rules = dict(rule_plans(plan.profile))
    for count in range(1, len(plan.profile.layers)):
        rules[f"offload the first {count}"] = offload_first(plan.profile, count)
    predicted = {name: timing.predict(each) for name, each in rules.items()}
    fitting = {n: each.step_s for n, each in predicted.items() if not budget.excess_bytes(each)}
    if not fitting:
        return None
    best = min(fitting, key=lambda each: fitting[each])
    return [best, timing.predict(plan.plan).step_s / fitting[best]]


def _table(results: Mapping[str, list[dict[str, Any]]]) -> str:
    heads = "model | budget | steps over | settled after | peak: measured / budget | measured / "
    heads += "predicted | step: measured / predicted | predicted / best by hand | which"
    lines = [f"| {heads} |", "|" + "---|" * 9]
    lines += [_row(name, each) for name, entries in results.items() for each in entries[1:]]
    return "\n".join(lines)


def by_share(results: Mapping[str, list[dict[str, Any]]]) -> str:
    """Return a table of how many cases did as they should, for each share of the room.

    Args:
        results: what `main` has measured.
    """
    heads = (
        "budget, of the room | refused | every step within | settled in 4 steps | at most 1.02 x"
    )
    heads += " the best by hand | predicted peak within 2% of what was in use, or reserved"
    lines = [f"| {heads} |", "|" + "---|" * 6]
    found = [each for entries in results.values() for each in entries[1:]]
    for share in dict.fromkeys(each["share"] for each in found):
        cases = [each for each in found if each["share"] == share]
        kept = [each for each in cases if "refused_bytes" not in each]
        by_hand = [each["by_hand"][1] <= 1.02 for each in kept if each["by_hand"] is not None]
        counts = [
            _share_of(max(each["peaks"]) <= each["budget_bytes"] for each in kept),
            _share_of((each["settled_after"] or _STEPS) <= 4 for each in kept),
            _share_of(by_hand),
            _share_of(
                any(
                    abs(each[name] / each["predicted_peak_bytes"] - 1) <= 0.02
                    for name in ("last_used_bytes", "last_peak_bytes")
                )
                for each in kept
            ),
        ]
        lines.append(f"| {share:.0%} | {len(cases) - len(kept)} | {' | '.join(counts)} |")
    return "\n".join(lines)


def _share_of(held: Iterable[bool]) -> str:
    every = list(held)
    return f"{sum(every)} of {len(every)}"


def _row(name: str, found: dict[str, Any]) -> str:
    budget_bytes = found["budget_bytes"]
    cells = [name, f"{found['share']:.0%}, {budget_bytes / _MIB:.1f} MiB"]
    if "refused_bytes" in found:
        smallest = f"refused; the smallest is {found['refused_bytes'] / _MIB:.1f} MiB"
        return f"| {' | '.join([*cells, smallest, *[''] * 6])} |"
    over = [number for number, each in enumerate(found["peaks"]) if each > budget_bytes]
    by_hand = found["by_hand"]
    cells += [
        ", ".join(map(str, over)) or "none",
        "never" if found["settled_after"] is None else str(found["settled_after"]),
        f"{found['last_peak_bytes'] / budget_bytes:.3f}",
        f"{found['last_used_bytes'] / found['predicted_peak_bytes']:.3f}",
        f"{found['step_s'] / found['predicted_s']:.2f}",
        "" if by_hand is None else f"{by_hand[1]:.3f}",
        "" if by_hand is None else by_hand[0],
    ]
    return f"| {' | '.join(cells)} |"


# ---- models: small ones, whose activations are tens of MiB ---------------------------------------


def _wave(*shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.sin(torch.linspace(0.0, 40.0, count)).view(shape)


def _operator(kind: str, modes: tuple[int, ...], size: int, batch: int, **more: Any) -> Made:
    import neuralop.models

    build = getattr(neuralop.models, kind)
    model = build(n_modes=modes, in_channels=1, out_channels=1, hidden_channels=24, **more)
    return model, (_wave(batch, 1, *[size] * len(modes)),)


def _uno() -> Made:
    import neuralop.models

    model = neuralop.models.UNO(
        in_channels=1,
        out_channels=1,
        hidden_channels=24,
        uno_out_channels=[24, 24, 24, 24],
        uno_n_modes=[[8, 8]] * 4,
        uno_scalings=[[1.0, 1.0], [0.5, 0.5], [1, 1], [2, 2]],
        channel_mlp_skip="linear",
        horizontal_skips_map={3: 0},
    )
    return model, (_wave(4, 1, 96, 96),)


def _language(*, rotary: bool) -> Made:
    shape = LanguageModelShape(160, 8, 4, 4, 640, 1000)
    tokens = torch.arange(4 * 192).view(4, 192) * 7 % 1000
    return LanguageModel(shape, None if rotary else 192), (tokens, tokens.roll(-1, 1))


def _stage(inputs: int, outputs: int) -> nn.Module:
    first = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*first, nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU())


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.GroupNorm(4, channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(4, channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x)  # type: ignore[no-any-return]


def _resnet() -> Made:
    blocks: list[nn.Module] = [_Residual(24) for _ in range(8)]
    model = Stack(nn.Conv2d(1, 24, 3, padding=1), blocks, nn.Conv2d(24, 1, 1))
    return model, (_wave(4, 1, 64, 64),)


def _vit() -> Made:
    blocks: list[nn.Module] = [TransformerBlock(128, 4) for _ in range(8)]
    lift = nn.Sequential(nn.Conv2d(3, 128, 8, stride=8), nn.Flatten(2), _Swap())
    return Stack(lift, blocks, nn.Linear(128, 10)), (_wave(4, 3, 128, 128),)


class _Swap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def _tower() -> Made:
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(10)]
    return nn.Sequential(*blocks), (_wave(4096, 256),)


_MODELS: Final[dict[str, Callable[[], Made]]] = {
    "FNO 2D": lambda: _operator("FNO", (12, 12), 96, 4),
    "FNO 3D": lambda: _operator("FNO", (6, 6, 6), 24, 2),
    "TFNO": lambda: _operator("TFNO", (12, 12), 96, 4, factorization="tucker", rank=0.1),
    "UNO": _uno,
    "UNet": lambda: (UNet(_stage, (24, 48, 64)), (_wave(4, 1, 96, 96),)),
    "ResNet": _resnet,
    "GPT": lambda: _language(rotary=False),
    "Llama": lambda: _language(rotary=True),
    "ViT": _vit,
    "MLP": _tower,
}


if __name__ == "__main__":
    main()
