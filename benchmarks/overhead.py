"""Measure the host time that hooks cost per saved tensor, without the time of copies.

The model is a chain of small operations, each of which saves one tensor: an activation or the
module's own weight. One round runs forward and backward in every mode in turn, so that a change in
the machine's speed affects all modes. The cost of a mode is the median over rounds of its time less
the time without hooks, divided by the number of saved tensors. The host work of offloading a tensor
is measured on a device whose copies move nothing.

Run: ``python -m benchmarks.overhead``
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import ebbtide
from benchmarks import record
from benchmarks.instant import InstantDevice
from ebbtide.policy import ActivationPolicy
from ebbtide.runtime.activations import Activations
from ebbtide.runtime.parameter_index import ParameterIndex
from ebbtide.runtime.rebuild import Placement
from ebbtide.runtime.saved_tensors import SavedTensorHooks
from ebbtide.runtime.transfers import Transfers
from ebbtide.stores.pinned import PinnedStore

Context = Callable[[], contextlib.AbstractContextManager[object]]


class Chain(nn.Module):
    """A chain of operations on a small activation, each of which saves one tensor.

    Args:
        steps: number of operations.
        by: what each operation saves: an ``"activation"``, an activation of an operation that is
            ``"unknown"`` to rebuilding, or the module's own ``"parameter"``.
        size: number of elements of the activation.
    """

    def __init__(self, steps: int, by: str, size: int) -> None:
        super().__init__()
        self.steps = steps
        self.by = by
        self.weight = nn.Parameter(torch.ones(size), requires_grad=by != "parameter")

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "parameter":
            for _ in range(self.steps):
                x = x * self.weight  # saves the frozen weight
            return x
        x = x * self.weight
        function = torch.erf if self.by == "unknown" else torch.sin
        for _ in range(self.steps - 1):
            x = function(x)  # saves its input
        return x


def main() -> None:
    """Measure and write the result file."""
    arguments = _arguments()
    torch.set_num_threads(1)
    results = {}
    rows = ["| saved tensor | mode | us per saved tensor | over identity |", "|---|---|---|---|"]
    for by in ("activation", "parameter"):
        samples = _measure(by, arguments.steps, arguments.rounds, arguments.size)
        costs = {
            name: _cost_us(samples[name], samples["none"], arguments.steps) for name in samples
        }
        results[by] = {"cost_us": costs, "samples_s": samples}
        for name, cost_us in costs.items():
            over = cost_us - costs["identity hooks"]
            rows.append(f"| {by} | {name} | {cost_us:.2f} | {over:+.2f} |")
    table = "\n".join(rows)
    print(table)
    print(record.save("overhead", vars(arguments), results, table).name)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="saved tensors in one forward")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--size", type=int, default=16, help="elements of each saved tensor")
    return parser.parse_args()


def _measure(by: str, steps: int, rounds: int, size: int) -> dict[str, list[float]]:
    plain, offloaded = Chain(steps, by, size), Chain(steps, by, size)
    ebbtide.offload(offloaded)
    modes: dict[str, tuple[Chain, Context]] = {
        "none": (plain, contextlib.nullcontext),
        "identity hooks": (plain, identity_hooks),
        "save_on_cpu": (plain, torch.autograd.graph.save_on_cpu),
        "ebbtide, passed through": (offloaded, contextlib.nullcontext),
    }
    if by == "activation":
        modes["ebbtide, moved in no time"] = (plain, _offload_in_no_time(plain, rebuild=False))
        unknown = Chain(steps, "unknown", size)
        modes["an operation without a recipe: none"] = (unknown, contextlib.nullcontext)
        for rebuild in (False, True):
            name = f"an operation without a recipe: moved, rebuild={rebuild}"
            modes[name] = (unknown, _offload_in_no_time(unknown, rebuild=rebuild))
    samples: dict[str, list[float]] = {name: [] for name in modes}
    for turn in range(rounds + 1):
        for name, (model, context) in modes.items():
            seconds = _step(model, context, size)
            if turn:  # the first round warms up
                samples[name].append(seconds)
    return samples


def _step(model: Chain, context: Context, size: int) -> float:
    x = torch.ones(size, requires_grad=True)
    gc.collect()
    gc.disable()  # as timeit does, because a full collection would be charged to one mode
    begin = time.perf_counter()
    with context():
        out = model(x)
    out.backward(torch.ones_like(out))
    seconds = time.perf_counter() - begin
    gc.enable()
    return seconds


def identity_hooks() -> contextlib.AbstractContextManager[object]:
    """Return hooks that do nothing: what torch's own mechanism costs."""
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


def _offload_in_no_time(model: Chain, *, rebuild: bool) -> Context:
    """Return a context that offloads everything, on a device whose copies do nothing."""
    device = InstantDevice()
    activations = Activations(Transfers(device, PinnedStore(device), 256 * 2**20))
    placement = Placement(ActivationPolicy(min_bytes=1, rebuild=rebuild))
    hooks = SavedTensorHooks(activations, placement, ParameterIndex([model]))

    @contextlib.contextmanager
    def offloading() -> Iterator[None]:
        hooks.begin()
        try:
            yield
        finally:
            hooks.end()

    return offloading


def _cost_us(samples: list[float], none: list[float], steps: int) -> float:
    return statistics.median(a - b for a, b in zip(samples, none, strict=True)) / steps * 1e6


if __name__ == "__main__":
    main()
