"""What a run of the demo is asked for, checked before anything expensive begins."""

from __future__ import annotations

import enum
import importlib.util
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

WARM_RESOLUTION = 32


class UsageError(Exception):
    """The user can put this right; the message, one line, says how."""


class Mode(enum.Enum):
    """How the saved activations are treated. Values are the names on the command line."""

    NONE = "none"
    SAVE_ON_CPU = "save_on_cpu"
    REBUILD = "rebuild"  # ebbtide, and nothing leaves
    EBBTIDE = "ebbtide"


@dataclass(frozen=True)
class DemoConfig:
    """One run of the demo.

    Args:
        resolution: nodes a side of the grid that is trained on.
        batch_size: samples in a training step.
        steps: training steps of each mode; of every five, three are timed.
        modes: the modes, in the order of the table.
        device: where the models compute.
        store: where ebbtide puts the bytes, as for `ebbtide.offload`.
        data: directory with published files, or for generated ones; None: the user's cache.
        out: directory for the results.
        seed: of the samples and of the model's weights.
        threads: that torch computes with in each mode's process; None: torch's choice.
        warm_steps: training steps at 32 x 32 before, shared by all modes.

    Raises:
        UsageError: a number is out of range, or there is no mode.
    """

    resolution: int = 256
    batch_size: int = 8
    steps: int = 15
    modes: tuple[Mode, ...] = (Mode.NONE, Mode.SAVE_ON_CPU, Mode.EBBTIDE)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    store: str = "auto"
    data: Path | None = None
    out: Path = Path("runs/demo")
    seed: int = 0
    threads: int | None = None
    warm_steps: int = 100

    def __post_init__(self) -> None:
        least = {"resolution": WARM_RESOLUTION, "batch_size": 1, "steps": 3, "seed": 0}
        least |= {"warm_steps": 0} | ({"threads": 1} if self.threads is not None else {})
        for name, bound in least.items():
            if getattr(self, name) < bound:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} must be {bound} or more, got {getattr(self, name)}")
        if not self.modes:
            raise UsageError("--modes names no mode that can run here")


def parse_modes(text: str, device: torch.device) -> tuple[Mode, ...]:
    """Read ``"none,ebbtide"``; on a CPU, `save_on_cpu` is left out.

    Raises:
        UsageError: a name is no mode's.
    """
    known = {mode.value: mode for mode in Mode}
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"--modes: {name!r} is not one of {', '.join(known)}")
    modes = dict.fromkeys(known[name] for name in names)
    if device.type == "cpu":
        modes.pop(Mode.SAVE_ON_CPU, None)
    return tuple(modes)


def parse_device(name: str) -> torch.device:
    """Read ``"auto"`` (the accelerator if there is one), or a device that this machine has.

    Raises:
        UsageError: there is no such device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return torch.device("cpu") if accelerator is None else accelerator
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device: torch knows no device {name!r}; try auto or cpu") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or device.type != accelerator.type:
        seen = "no accelerator" if accelerator is None else f"an accelerator of type {accelerator}"
        raise UsageError(f"--device {name}: torch sees {seen} on this machine; try auto or cpu")
    if device.index is not None and device.index >= torch.accelerator.device_count():
        raise UsageError(f"--device {name}: there are {torch.accelerator.device_count()} of them")
    return device


def check_writable(out: Path) -> None:
    """Create the directory for the results, and a file in it, now rather than in three minutes.

    Raises:
        UsageError: that is impossible.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written to: {error.strerror}") from error


def check_neuralop() -> None:
    """Find neuraloperator without importing it.

    Raises:
        UsageError: it is not installed.
    """
    if importlib.util.find_spec("neuralop") is None:
        raise UsageError('neuraloperator is missing; pip install "ebbtide[neuralop]"')
