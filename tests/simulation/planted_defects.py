"""Defects that are planted in a copy of the package, and what `ebbtide.verify` says of the copy.

As a program, it verifies a model of eight layers with whatever package it finds first, and prints
the report as JSON: ``python planted_defects.py DEVICE``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from guards import Edit, drop, find_guards, put, remove, then, without

SOURCE = Path(__file__).parents[2] / "src" / "ebbtide"
STUCK_S = 120.0
WIDTH = 64

Plant = Callable[[Path], None]


@dataclass(frozen=True)
class Defect:
    """What is wrong with a copy of the package.

    Args:
        name: says it.
        plant: makes the change, in the folder of a copy.
    """

    name: str
    plant: Plant


def _guard(name: str, edit: Edit) -> Plant:
    """Take a guard of the engine away."""

    def plant(package: Path) -> None:
        guard = find_guards(package)[name]
        file = package / guard.file
        file.write_text(without(file.read_text(), guard, edit))

    return plant


def _text(file: str, old: str, new: str) -> Plant:
    """Put another text in the place of one."""

    def plant(package: Path) -> None:
        source = (package / file).read_text()
        assert source.count(old) == 1, f"{file} has {old!r} {source.count(old)} times"
        (package / file).write_text(source.replace(old, new))

    return plant


_PLACED = "values.set_(storage, self._offset, self._size, self._stride)"
_CONTIGUOUS = "torch.empty(self._size, device='meta').stride()"
DEFECTS = (
    Defect("no wait of a copy down for kernels", _guard("copy-down-after-kernels", drop("ready"))),
    Defect("no wait of a copy up for kernels", _guard("copy-up-after-kernels", drop("free"))),
    Defect("no wait of compute for a copy up", _guard("compute-waits-for-reload", remove)),
    Defect("no wait of compute for weights", _guard("compute-waits-for-weights", remove)),
    Defect("no wait for a gradient's kernels", _guard("gradient-after-kernels", drop("ready"))),
    Defect("source freed early", _guard("source-until-copied", then("record.source = None"))),
    Defect(
        "source freed when tidied",
        _guard(
            "retire-when-complete", put("self.queue and self.queue[0].is_copied()", "self.queue")
        ),
    ),
    Defect("gradient's memory freed early", _guard("gradient-until-copied", remove)),
    Defect(
        "version not compared", _guard("same-version", put("record.version == version", "True"))
    ),
    Defect(
        "strides lost",
        _text("runtime/handles.py", _PLACED, _PLACED.replace("self._stride", _CONTIGUOUS)),
    ),
    Defect(
        "wrong offset", _text("runtime/handles.py", _PLACED, _PLACED.replace("self._offset", "0"))
    ),
    Defect(
        "gradient of biases lost",
        _text(
            "weights/gradients.py",
            "            readable.synchronize()\n        return gradients[0], None",
            "            readable.synchronize()\n"
            "        lost = gradients[0] is not None and gradients[0].dim() == 1\n"
            "        return None if lost else gradients[0], None",
        ),
    ),
    Defect("gradient read before it is there", _guard("gradient-before-accumulation", remove)),
    Defect("released before copied", _guard("bound-after-copy", remove)),
    Defect("weights read up early", _guard("weights-after-kernels", drop("free"))),
)


class Layer(nn.Module):
    """Saves slices, transposed views and masks, and memory that changes between two saves."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.1)
        self.metric: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=1)
        mixed = torch.softmax(q @ k.t() / 8, dim=1) @ v
        hidden = nn.functional.gelu(self.out(mixed)) + x
        self.metric = hidden.sin()  # never in the loss; its graph is alive when `hidden` changes
        hidden.mul_(0.5)
        return self.drop(self.norm(hidden.tanh() * hidden.cos()))


def build(device: str = "cpu") -> tuple[nn.Module, Tensor]:
    """Make a model of eight layers, and its batch."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(8)]).to(device)
    return model, torch.randn(32, WIDTH).to(device)


def verify_copy(directory: Path, device: str, plant: Plant | None = None) -> dict[str, Any]:
    """Verify a copy of the package, in a process of its own.

    Args:
        directory: an empty folder, for the copy.
        device: ``cpu`` or ``softdevice``.
        plant: plants a defect; None: the copy is as good as the original.

    Returns:
        The report's document. A process that crashed or hung has noticed the defect, too, but it
        could not say so: ``{"same": None}``.
    """
    copy = directory / "ebbtide"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    if plant is not None:
        plant(copy)
    path = os.pathsep.join([str(directory), *sys.path])
    try:
        run = subprocess.run(
            [sys.executable, "-W", "ignore", __file__, device],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=STUCK_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"same": None, "stderr": f"stuck for {STUCK_S} s"}
    if not run.stdout:
        return {"same": None, "stderr": run.stderr[-1000:]}
    found: dict[str, Any] = json.loads(run.stdout)
    assert found["file"].startswith(str(directory)), "the copy must be what ran"
    return found


def _main(device: str) -> None:
    if device != "cpu":
        import softdevice

        softdevice.load()
    import ebbtide

    everything = {
        "activations": ebbtide.ActivationPolicy(min_bytes=1),
        "weights": ebbtide.WeightPolicy(min_bytes=1),
    }
    report = ebbtide.verify(*build(device), offload=everything, orders=14)
    print(json.dumps(report.document() | {"file": ebbtide.__file__, "text": str(report)}))


if __name__ == "__main__":
    _main(sys.argv[1])
