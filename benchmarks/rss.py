"""Measure how the resident memory (RSS) of a process on a CPU is made to fall, and what that costs.

glibc keeps the memory of freed tensors. This measures the ways to have it returned to the system,
in memory and in time, beside training without offload. Every sample is a forked process of its own,
so that no sample inherits the heap of another, and all modes take turns, so that a change in the
machine's speed affects all of them.
Processor time counts what the kernel and the worker threads do, and other programs disturb it less
than they disturb the time on the clock.

Run: ``python -m benchmarks.rss``
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import ebbtide
from benchmarks import record
from ebbtide.stores import measured_memory as freed_memory
from ebbtide.stores.measured_memory import ProcessMemory

Loss = Callable[[], Tensor]

_MIB = 2**20
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of mallopt(3)
_NEVER = 2**62


@dataclass(frozen=True)
class Way:
    """One way to train and to return freed memory.

    Args:
        offloaded: whether the model is offloaded.
        every_bytes: return freed memory after so many moved bytes.
        share: or after this part of the bytes in the store, if that is more.
        threshold_bytes: `M_MMAP_THRESHOLD`; None leaves glibc's own.
        late: set the threshold only after a step without offload.
    """

    offloaded: bool = True
    every_bytes: int = _NEVER
    share: int = freed_memory.SHARE
    threshold_bytes: int | None = None
    late: bool = False


_OURS = freed_memory.LEAST_BYTES
WAYS = {
    "no offload": Way(offloaded=False),
    "offload, freed memory kept": Way(),
    "**offload, as built**": Way(every_bytes=_OURS),
    "as built, after a plain step": Way(every_bytes=_OURS, late=True),
    "trim every 4 MiB": Way(every_bytes=4 * _MIB, share=_NEVER),
    "trim every 64 MiB": Way(every_bytes=64 * _MIB, share=_NEVER),
    "threshold 1 MiB": Way(threshold_bytes=_MIB),
    "threshold 1 MiB, after a plain step": Way(threshold_bytes=_MIB, late=True),
    "threshold 4 MiB": Way(threshold_bytes=4 * _MIB),
    "no offload, threshold 1 MiB": Way(offloaded=False, threshold_bytes=_MIB),
}


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=7, help="samples of each mode")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each sample")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    names = arguments.models.split(",")
    import neuralop  # noqa: F401  # once, before the processes are forked
    import transformers  # noqa: F401

    samples: dict[str, dict[str, list[Any]]] = {name: {way: [] for way in WAYS} for name in names}
    for number in range(arguments.rounds):
        for name in names:
            for title, way in WAYS.items():
                sample = in_child(_measure, MODELS[name], way, arguments.steps)
                samples[name][title].append(sample)
            print(f"round {number + 1}, {name}", flush=True)
    _report(vars(arguments), samples)


def in_child(measure: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Return the figures of one sample, measured in a process of its own."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writes, json.dumps(measure(*arguments)).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    figures: dict[str, Any] = json.loads(text)
    return figures


def _measure(build: Callable[[], tuple[nn.Module, Loss]], way: Way, steps: int) -> dict[str, Any]:
    freed_memory.LEAST_BYTES, freed_memory.SHARE = way.every_bytes, way.share
    torch.set_num_threads(1)  # a forked process must not use the parent's threads
    torch.manual_seed(0)
    model, loss = build()
    library = ctypes.CDLL(None)
    library.malloc_trim(0)
    memory = ProcessMemory()
    idle_bytes = memory.now_bytes()

    def step() -> str:
        value = loss()
        value.backward()
        model.zero_grad()
        return value.item().hex()

    if way.late:
        step()
    handle = None
    if way.offloaded:
        policy = ebbtide.ActivationPolicy(max_inflight_bytes=16 * _MIB)
        handle = ebbtide.offload(model, activations=policy)
    if way.threshold_bytes is not None:
        library.mallopt(_MMAP_THRESHOLD, way.threshold_bytes)
    step()
    torch.manual_seed(1)  # dropout is the same in all modes, however many steps came before
    memory.reset_peak()
    begin, begin_s = os.times(), time.perf_counter()
    losses = [step() for _ in range(steps)]
    end, duration_s = os.times(), time.perf_counter() - begin_s
    return {
        "peak_bytes": memory.peak_bytes() - idle_bytes,
        "step_s": duration_s / steps,
        "processor_s": (end.user + end.system - begin.user - begin.system) / steps,
        "kernel_s": (end.system - begin.system) / steps,
        "losses": losses,
        "offloaded_bytes": 0 if handle is None else handle.stats.offloaded_bytes,
    }


# ---- models -------------------------------------------------------------------------------------


def _gpt2() -> tuple[nn.Module, Loss]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=512, n_embd=256, n_layer=6, n_head=4, n_positions=256)
    model = GPT2LMHeadModel(config)
    tokens = torch.randint(0, 512, (4, 256))
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(y)) + x)


def _residual() -> tuple[nn.Module, Loss]:
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *(_Residual(32) for _ in range(10)))
    images = torch.randn(8, 3, 64, 64)
    return model, lambda: model(images).square().mean()


def _fno() -> tuple[nn.Module, Loss]:
    from neuralop.models import FNO

    model = FNO(n_modes=(16, 16), in_channels=1, out_channels=1, hidden_channels=32)
    fields = torch.randn(2, 1, 128, 128)
    return model, lambda: model(fields).square().mean()


MODELS = {"gpt2": _gpt2, "residual": _residual, "fno": _fno}


# ---- report -------------------------------------------------------------------------------------


def _report(configuration: dict[str, Any], samples: dict[str, dict[str, list[Any]]]) -> None:
    lines = [
        "| model | mode | peak above idle | x none | processor time | x none | step | x none |",
        "|" + "---|" * 8,
    ]
    for name, ways in samples.items():
        plain = ways["no offload"]
        for title, taken in ways.items():
            assert {tuple(sample["losses"]) for sample in taken} == {tuple(plain[0]["losses"])}
            cells = [f"{median(taken, 'peak_bytes') / _MIB:.0f} MiB"]
            cells.append(f"{median(taken, 'peak_bytes') / median(plain, 'peak_bytes'):.2f}")
            for key in ("processor_s", "step_s"):
                cells.append(f"{median(taken, key):.2f} s")
                cells.append(f"{median(taken, key) / median(plain, key):.2f}")
            lines.append(f"| {name} | {title} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    print(table)
    print(record.save("rss", configuration, samples, table).name)


def median(taken: list[Any], key: str) -> float:
    """Return the median of one figure of all samples."""
    return statistics.median(sample[key] for sample in taken)


if __name__ == "__main__":
    main()
