"""On paper for an H100: the largest FNO of plain, checkpointed, save_on_cpu and planned training.

Nothing is measured. Bytes come from fake tensors, seconds from a roofline with the figures of the
preset ``h100`` that programs were measured to reach, or estimates of them, and plans from the
search. Every way to train has the same layers and the same 80 GB.

- plain keeps everything; checkpointed recomputes every layer, the lifting and the projection too.
- save_on_cpu is torch's, with page-locked memory: it copies every saved tensor as often as it is
  saved, on the compute stream, each way. Its seconds are those of the operators and of all copies.
- planned is the fastest plan within 80 GB, for parts of the layers if none fits for whole ones.

Peaks of plans count that the host sees copies complete late, as on an accelerator.

The second table is about one size: the largest at which save_on_cpu fits into a quarter of the
memory, so that there is room above its peak. Budgets are multiples of that peak.

Run: ``python -m benchmarks.plan_paper``
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import record
from ebbtide.errors import BudgetError
from ebbtide.planning import Hardware
from ebbtide.tools.fake_profile import Batch, FakeStep, Loss
from ebbtide.tools.models import Task, read_model
from ebbtide.tools.plan_tables import Study
from ebbtide.units import format_size

_CASES = (("fno2d", 8, 512, 16), ("fno3d", 1, 128, 8))  # see `Case`
_MULTIPLES = (1.0, 1.15, 1.25, 1.5, 2.0)


def main() -> None:
    """Predict and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-gb", type=float, default=80.0)
    arguments = parser.parse_args()
    hardware = Hardware.named("h100")
    device_bytes = round(arguments.memory_gb * 1e9)
    sizes, speeds = [], []
    for case in (Case(*each, hardware) for each in _CASES):
        sizes += _largest(case, device_bytes)
        speeds += _beside_save_on_cpu(case, device_bytes // 4)
    for what, found, table in (
        ("plan-largest-fno-h100", sizes, _size_table(sizes)),
        ("plan-beside-save-on-cpu", speeds, _speed_table(speeds)),
    ):
        print(table)
        results = {"cases": found, "sources": _sources(hardware)}
        print(record.save(what, vars(arguments), results, table).name)


def _sources(hardware: Hardware) -> dict[str, Any]:
    return {
        figure: [getattr(hardware, figure), each.kind.value, each.text]
        for figure, each in hardware.sources.items()
    }


class Case(NamedTuple):
    """A model of any resolution."""

    name: str
    batch: int
    start: int  # a resolution that fits
    step: int  # resolutions that count are multiples of it
    hardware: Hardware

    def task(self, length: int) -> Task:
        return read_model(self.name, resolution=length, batch=self.batch)

    def saved_on_cpu(self, length: int) -> SavedOnCpu:
        task = self.task(length)
        return profile_saved_on_cpu(task.model, task.batch, self.hardware, loss=task.loss)

    def largest(self, fits: Callable[[int], bool]) -> int:
        """Return the largest resolution that fits; peaks grow with the points."""
        units = _largest_that(lambda units: fits(units * self.step), self.start // self.step)
        return units * self.step


@functools.cache
def _study(case: Case, length: int) -> Study:
    return Study(case.task(length), case.hardware)


# ---- the largest that fits ----------------------------------------------------------------------

_RULES = {"plain": "keep all", "checkpointed": "recompute all", "offload all": "offload all"}


def _largest(case: Case, device_bytes: int) -> list[dict[str, Any]]:
    entries = []
    for method in (*_RULES, "planned"):

        def fits(length: int, method: str = method) -> bool:
            study = _study(case, length)
            if method == "planned":
                return study.smallest_bytes <= device_bytes
            prediction = study.predict(study.rule(_RULES[method], device_bytes))
            return not study.budget(device_bytes).excess_bytes(prediction)

        length = case.largest(fits)
        study = _study(case, length)
        if method == "planned":
            found = study.predict(study.find(device_bytes))
        else:
            found = study.predict(study.rule(_RULES[method], device_bytes))
        entries.append(_entry(case, method, length, found.peak_bytes, found.step_s))
    length = _largest_saved_on_cpu(case, device_bytes)
    saved = case.saved_on_cpu(length)
    entries.insert(3, _entry(case, "save_on_cpu", length, saved.peak_bytes, saved.step_s))
    entries[3]["copied_bytes_each_way"] = saved.copied_bytes
    entries[3]["compute_s"] = saved.compute_s
    return entries


def _entry(case: Case, method: str, length: int, peak_bytes: int, step_s: float) -> dict[str, Any]:
    return {
        "model": case.name,
        "method": method,
        "resolution": length,
        "batch": case.batch,
        "points": length ** int(case.name[3]),
        "peak_bytes": peak_bytes,
        "step_s": step_s,
    }


def _largest_saved_on_cpu(case: Case, device_bytes: int) -> int:
    return case.largest(lambda length: case.saved_on_cpu(length).peak_bytes <= device_bytes)


def _largest_that(fits: Callable[[int], bool], start: int) -> int:
    low = start
    while fits(low * 2):
        low *= 2
    high = low * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _size_table(entries: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| model | training | largest | points x plain | peak | step | ns a point and sample |",
        "|---|---|---|---|---|---|---|",
    ]
    plain = 1
    for each in entries:
        if each["method"] == "plain":
            plain = each["points"]
        dimensions = int(each["model"][3])
        grid = " x ".join([str(each["resolution"])] * dimensions)
        each_s = each["step_s"] / each["points"] / each["batch"]
        lines.append(
            f"| {each['model']}, batch {each['batch']} | {each['method']} | {grid} | "
            f"{each['points'] / plain:.2f} | {format_size(each['peak_bytes'])} | "
            f"{each['step_s']:.2f} s | {each_s * 1e9:.1f} |"
        )
    return "\n".join(lines)


# ---- beside save_on_cpu -------------------------------------------------------------------------


def _beside_save_on_cpu(case: Case, its_bytes: int) -> list[dict[str, Any]]:
    length = _largest_saved_on_cpu(case, its_bytes)
    its, study = case.saved_on_cpu(length), _study(case, length)
    budgets = {f"{each:g} x its peak": round(each * its.peak_bytes) for each in _MULTIPLES}
    budgets["the smallest of all plans"] = study.smallest_bytes
    entries = []
    for what, budget_bytes in sorted(budgets.items(), key=lambda item: item[1]):
        entry: dict[str, Any] = {
            "model": case.name,
            "resolution": length,
            "batch": case.batch,
            "budget": what,
            "budget_bytes": budget_bytes,
            "save_on_cpu_peak_bytes": its.peak_bytes,
            "save_on_cpu_step_s": its.step_s,
            "save_on_cpu_compute_s": its.compute_s,
            "save_on_cpu_copied_bytes_each_way": its.copied_bytes,
        }
        try:
            found = study.predict(study.find(budget_bytes))
            entry |= {"peak_bytes": found.peak_bytes, "step_s": found.step_s}
        except BudgetError:
            pass
        entries.append(entry)
    return entries


def _speed_table(entries: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| model | save_on_cpu | budget of the plan | planned step | times faster |",
        "|---|---|---|---|---|",
    ]
    for each in entries:
        its = (
            f"{format_size(each['save_on_cpu_peak_bytes'])}, {each['save_on_cpu_step_s']:.2f} s, "
            f"{format_size(each['save_on_cpu_copied_bytes_each_way'])} each way"
        )
        model = f"{each['model']} at {each['resolution']}, batch {each['batch']}"
        budget = f"{format_size(each['budget_bytes'])}, {each['budget']}"
        if "step_s" not in each:
            lines.append(f"| {model} | {its} | {budget} | no plan fits | |")
            continue
        faster = each["save_on_cpu_step_s"] / each["step_s"]
        lines.append(f"| {model} | {its} | {budget} | {each['step_s']:.2f} s | {faster:.1f} |")
    return "\n".join(lines)


# ---- What `torch.autograd.graph.save_on_cpu` would copy and need, found with fake tensors ----


class SavedOnCpu(NamedTuple):
    """A step in which autograd saves everything on the CPU.

    Attributes:
        step_s: seconds of the step: of all operators, of the copies, and of Adam's update.
        compute_s: that without the copies.
        copied_bytes: bytes that are copied down, and again up.
        num_copies: copies down.
        peak_bytes: peak of device memory, gradients and the optimizer's state included throughout.
    """

    step_s: float
    compute_s: float
    copied_bytes: int
    num_copies: int
    peak_bytes: int


def profile_saved_on_cpu(
    model: nn.Module,
    batch: Batch,
    hardware: Hardware,
    *,
    loss: Loss | None = None,
    optimizer_states: int = 2,
) -> SavedOnCpu:
    """Predict a training step under ``save_on_cpu(pin_memory=True)``.

    It copies every saved tensor when autograd saves it, as often as it is saved and parameters too,
    and copies it back when backward asks for it. The copies run on the compute stream, so compute
    waits for each of them. Memory is page-locked in the first step only, and does not count here.

    Args:
        model: the model; it may be on the meta device.
        batch: what the model is called with.
        hardware: the machine.
        loss: computes the loss from what the model returns.
        optimizer_states: tensors of the weights' size that the optimizer keeps.

    Not modelled: copies that make a tensor contiguous on the device before it is copied down.
    """
    step = FakeStep(model, batch, hardware)
    sizes_bytes: list[int] = []

    def pack(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
        sizes_bytes.append(tensor.nbytes)
        return tensor.shape, tensor.dtype

    def unpack(packed: tuple[torch.Size, torch.dtype]) -> Tensor:
        return torch.empty(packed[0], dtype=packed[1], device=step.device)

    step.run(loss, pack, unpack)
    sizes = step.ledger.sizes
    gradient_bytes = sum(sizes[gradient] for _, gradient in step.gradients)
    state_bytes = gradient_bytes * optimizer_states
    update_bytes = 3 * gradient_bytes + 2 * state_bytes
    compute_s = sum(step.seconds.values())
    compute_s += update_bytes / hardware.device_memory_bytes_per_s
    copied_bytes = sum(sizes_bytes)
    copies_s = sum(hardware.offload_s(each) + hardware.reload_s(each) for each in sizes_bytes)
    return SavedOnCpu(
        step_s=compute_s + copies_s,
        compute_s=compute_s,
        copied_bytes=copied_bytes,
        num_copies=len(sizes_bytes),
        peak_bytes=max(step.peaks().values()) + gradient_bytes + state_bytes,
    )


if __name__ == "__main__":
    main()
