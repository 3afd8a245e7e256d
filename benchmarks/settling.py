"""Train ten models at five budgets each: is every step within the budget, how soon is it settled?

Budgets lie between what a process or a device holds before training and the peak of plain training.
A step is over its budget if its tensors are; what torch has reserved then is a column of its own.
Each case trains in a process of its own. Beside the plan that has settled stand the settings that
people make by hand, in virtual time: one rule for all layers, and offloading the first k layers.

Run: ``python -m benchmarks.settling``; on an accelerator, with models of its size,
``python -m benchmarks.settling --device cuda``; on the accelerator in software
``PYTHONPATH=src:tests/softdevice python -m benchmarks.settling --device softdevice``.
With ``--parallel N`` N cases run at once: memory is then as it is alone, and seconds are not.
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
from concurrent.futures import ThreadPoolExecutor
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
_STEPS: Final = 18
_TIMED: Final = 4  # the last steps, whose seconds count
_POLICY: Final = ebbtide.ActivationPolicy(min_bytes=64 * 1024)

Made = tuple[nn.Module, tuple[Tensor, ...]]


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu, softdevice, cuda, xpu …")
    parser.add_argument("--models", nargs="+", default=list(_MODELS), choices=list(_MODELS))
    parser.add_argument("--shares", nargs="+", type=float, default=_SHARES)
    parser.add_argument("--parallel", type=int, default=1, help="number of cases run at once")
    parser.add_argument("--dry", action="store_true", help="write no result file")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.device == "softdevice":
        import softdevice  # type: ignore[import-not-found, unused-ignore]

        softdevice.load("threads")
    if given.worker is not None:
        print(json.dumps(_work(given.device, given.worker[0], int(given.worker[1]))))
        return
    with ThreadPoolExecutor(given.parallel) as pool:
        found = list(pool.map(lambda name: _run_plainly(given.device, name), given.models))
        plain = dict(zip(given.models, found, strict=True))
        cases = [(name, share) for name in given.models for share in given.shares]
        found = pool.map(lambda case: _measure(given.device, case, plain[case[0]]), cases)
        results = {name: [each] for name, each in plain.items()}
        for (name, _), each in zip(cases, found, strict=True):
            results[name].append(each)
    table = _table(results)
    print(table)
    if not given.dry:
        configuration = {
            "steps": _STEPS,
            "shares": given.shares,
            "threads": 1,
            "parallel": given.parallel,
        }
        print(record.save(f"settling-{given.device}", configuration, results, table).name)
    sys.exit(any(_has_wrong_bits(each) for entries in results.values() for each in entries[1:]))


def _measure(device: str, case: tuple[str, float], plain: Mapping[str, Any]) -> dict[str, Any]:
    name, share = case
    if "failed" in plain:
        return {"share": share, "budget_bytes": 0, **plain}
    room_bytes = plain["peak_bytes"] - plain["idle_bytes"]
    budget_bytes = plain["idle_bytes"] + int(share * room_bytes)
    found = {"share": share, "budget_bytes": budget_bytes, **_run(device, name, budget_bytes)}
    found["repeats"] = plain.get("repeats", True)
    found["other_bits"] = found.get("losses", plain["losses"]) != plain["losses"]
    print(_row(name, found), file=sys.stderr, flush=True)
    return found


def _run_plainly(device: str, name: str) -> dict[str, Any]:
    """Train without a budget; on a GPU twice, as some of its kernels never add up alike."""
    found = _run(device, name, 0)
    if device not in ("cpu", "softdevice") and "failed" not in found:
        found["repeats"] = _run(device, name, 0).get("losses") == found["losses"]
    return found


def _run(device: str, name: str, budget_bytes: int) -> dict[str, Any]:
    """Train in a process of its own; without a budget if that is 0."""
    command = [sys.executable, "-m", "benchmarks.settling", "--device", device]
    command += ["--worker", name, str(budget_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr[-2000:]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _work(device_name: str, name: str, budget_bytes: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device(device_name)
    # Convolutions' fastest kernels add up in an order that changes from run to run.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # that takes time
    model, arguments = _MODELS[name](device_name not in ("cpu", "softdevice"))
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
    peaks, used, seconds, losses, settled, rested = [], [], [], [], [], []
    for _ in range(_STEPS):
        memory.reset_peak()
        begin_s = time.perf_counter()
        optimizer.zero_grad()
        output = model(*arguments)
        loss = output if output.dim() == 0 else output.square().mean()
        plan = None if handle is None else handle.plan
        settled.append(plan is not None and plan.settled)
        rested.append(plan is not None and plan.plan.has_weights_on_host)
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
        "used": used,
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
            "weights_rested": rested,
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
    heads = "model | budget | steps over | settled after | at the end, reserved / budget | peak: "
    heads += "measured / predicted | step: measured / predicted | predicted / best by hand | which"
    lines = [f"| {heads} |", "|" + "---|" * 9]
    lines += [_row(name, each) for name, entries in results.items() for each in entries[1:]]
    return "\n".join(lines)


def by_share(results: Mapping[str, list[dict[str, Any]]]) -> str:
    """Return a table of how many cases did as they should, for each share of the room.

    Args:
        results: what `main` has measured.
    """
    heads = (
        "budget, of the room | refused | every step within | at the end, reserved within | settled"
    )
    heads += " in 4 steps | at most 1.02 x the best by hand | predicted peak within 2%"
    lines = [f"| {heads} |", "|" + "---|" * 7]
    found = [each for entries in results.values() for each in entries[1:] if "failed" not in each]
    for share in dict.fromkeys(each["share"] for each in found):
        cases = [each for each in found if each["share"] == share]
        kept = [each for each in cases if "refused_bytes" not in each]
        by_hand = [each["by_hand"][1] <= 1.02 for each in kept if each["by_hand"] is not None]
        counts = [
            _share_of(
                max(each.get("used", each["peaks"])) <= each["budget_bytes"] for each in kept
            ),
            _share_of(each["last_peak_bytes"] <= each["budget_bytes"] for each in kept),
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


def _has_wrong_bits(found: Mapping[str, Any]) -> bool:
    """Whether losses differ for no reason that is known."""
    return found.get("other_bits", False) and found["repeats"] and not any(found["weights_rested"])


def _of_bits(found: Mapping[str, Any]) -> str:
    """Say whether losses differ, and why: a host may round an optimizer's step otherwise."""
    if not found["other_bits"]:
        return ""
    if not found["repeats"]:
        return "; bits that differ without a budget, too"
    return "; OTHER BITS" if _has_wrong_bits(found) else "; other bits, weights rested"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:120] if lines else "no output"


def _row(name: str, found: dict[str, Any]) -> str:
    budget_bytes = found["budget_bytes"]
    cells = [name, f"{found['share']:.0%}, {budget_bytes / _MIB:.1f} MiB"]
    if "failed" in found:
        return f"| {' | '.join([*cells, 'failed: ' + _last_line(found['failed']), *[''] * 6])} |"
    if "refused_bytes" in found:
        smallest = f"refused; the smallest is {found['refused_bytes'] / _MIB:.1f} MiB"
        return f"| {' | '.join([*cells, smallest, *[''] * 6])} |"
    over = [number for number, each in enumerate(found["used"]) if each > budget_bytes]
    by_hand = found["by_hand"]
    cells += [
        (", ".join(map(str, over)) or "none") + _of_bits(found),
        "never" if found["settled_after"] is None else str(found["settled_after"]),
        f"{found['last_peak_bytes'] / budget_bytes:.3f}",
        f"{found['last_used_bytes'] / found['predicted_peak_bytes']:.3f}",
        f"{found['step_s'] / found['predicted_s']:.2f}",
        "" if by_hand is None else f"{by_hand[1]:.3f}",
        "" if by_hand is None else by_hand[0],
    ]
    return f"| {' | '.join(cells)} |"


# ---- models: small ones save tens of MiB, large ones several GiB ---------------------------------


def _wave(*shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.sin(torch.linspace(0.0, 40.0, count)).view(shape)


def _operator(
    kind: str, modes: tuple[int, ...], size: int, batch: int, channels: int, **more: Any
) -> Made:
    import neuralop.models

    build = getattr(neuralop.models, kind)
    model = build(n_modes=modes, in_channels=1, out_channels=1, hidden_channels=channels, **more)
    return model, (_wave(batch, 1, *[size] * len(modes)),)


def _fno2d(large: bool, kind: str = "FNO", **more: Any) -> Made:
    return _operator(kind, *(((32, 32), 384, 4, 64) if large else ((12, 12), 96, 4, 24)), **more)


def _fno3d(large: bool) -> Made:
    return _operator("FNO", *(((12, 12, 12), 64, 4, 32) if large else ((6, 6, 6), 24, 2, 24)))


def _uno(large: bool) -> Made:
    import neuralop.models

    channels, size = (64, 384) if large else (24, 96)
    model = neuralop.models.UNO(
        in_channels=1,
        out_channels=1,
        hidden_channels=channels,
        uno_out_channels=[channels] * 4,
        uno_n_modes=[[8, 8]] * 4,
        uno_scalings=[[1.0, 1.0], [0.5, 0.5], [1, 1], [2, 2]],
        channel_mlp_skip="linear",
        horizontal_skips_map={3: 0},
    )
    return model, (_wave(4, 1, size, size),)


def _language(large: bool, *, rotary: bool) -> Made:
    if large:
        shape, length = LanguageModelShape(1024, 12, 16, 16, 4096, 8000), 2048
    else:
        shape, length = LanguageModelShape(160, 8, 4, 4, 640, 1000), 192
    tokens = torch.arange(4 * length).view(4, length) * 7 % 1000
    model = LanguageModel(shape, None if rotary else length)
    return _repeatable(model) if large else model, (tokens, tokens.roll(-1, 1))


def _repeatable(model: nn.Module) -> nn.Module:
    """In this precision the kernels of attention on CUDA compute the same each time."""
    return model.to(torch.bfloat16)


def _stage(inputs: int, outputs: int) -> nn.Module:
    first = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*first, nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU())


def _unet(large: bool) -> Made:
    widths, size = ((64, 128, 256), 384) if large else ((24, 48, 64), 96)
    return UNet(_stage, widths), (_wave(4, 1, size, size),)


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


def _resnet(large: bool) -> Made:
    channels, size = (64, 256) if large else (24, 64)
    blocks: list[nn.Module] = [_Residual(channels) for _ in range(8)]
    model = Stack(nn.Conv2d(1, channels, 3, padding=1), blocks, nn.Conv2d(channels, 1, 1))
    return model, (_wave(4, 1, size, size),)


def _vit(large: bool) -> Made:
    width, heads, batch, size = (768, 12, 16, 224) if large else (128, 4, 4, 128)
    blocks: list[nn.Module] = [TransformerBlock(width, heads) for _ in range(8)]
    lift = nn.Sequential(nn.Conv2d(3, width, 8, stride=8), nn.Flatten(2), _Swap())
    model, images = Stack(lift, blocks, nn.Linear(width, 10)), _wave(batch, 3, size, size)
    return (_repeatable(model), (images.bfloat16(),)) if large else (model, (images,))


class _Swap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def _tower(large: bool) -> Made:
    width, rows = (2048, 16384) if large else (256, 4096)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(10)]
    return nn.Sequential(*blocks), (_wave(rows, width),)


_MODELS: Final[dict[str, Callable[[bool], Made]]] = {
    "FNO 2D": _fno2d,
    "FNO 3D": _fno3d,
    "TFNO": lambda large: _fno2d(large, "TFNO", factorization="tucker", rank=0.1),
    "UNO": _uno,
    "UNet": _unet,
    "ResNet": _resnet,
    "GPT": lambda large: _language(large, rotary=False),
    "Llama": lambda large: _language(large, rotary=True),
    "ViT": _vit,
    "MLP": _tower,
}


if __name__ == "__main__":
    main()
