"""The configuration of a run of the demo, checked before anything expensive begins."""

from __future__ import annotations

import enum
import importlib.util
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ebbtide.errors import PolicyError

WARM_RESOLUTION = 32
QUICK = {"resolution": 128, "steps": 6, "warm_steps": 40}  # of a quick look


class UsageError(PolicyError):
    """An option of the command line cannot be honoured; the message, one line, says how."""


class Mode(enum.Enum):
    """How a run treats saved activations. The values are the names on the command line."""

    NONE = "none"
    SAVE_ON_CPU = "save_on_cpu"
    REBUILD = "rebuild"  # ebbtide with rebuilding but without offload
    EBBTIDE = "ebbtide"

    @property
    def title(self) -> str:
        """The name in the progress, the table, the sentences and the picture."""
        return "no offload" if self is Mode.NONE else self.value


@dataclass(frozen=True)
class DemoConfig:
    """The configuration of one run of the demo.

    Args:
        resolution: nodes along each side of the training grid.
        batch_size: number of samples in a training step.
        steps: number of training steps of each mode; three of every five are timed.
        modes: modes to run, in the order of the table.
        device: device on which the models compute.
        store: where ebbtide stores offloaded bytes, as for `ebbtide.offload`.
        data: directory that has the published files or receives the generated ones; None means the
            user's cache.
        out: directory for the results.
        seed: random seed of the samples and of the model's weights.
        threads: number of torch threads in each mode's process; None leaves the choice to torch.
        warm_steps: number of training steps at 32 x 32 that precede the run and that all modes
            share.

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
            raise UsageError(
                "--modes names no mode that can run on this device; try --modes none,ebbtide"
            )


def parse_modes(text: str, device: torch.device) -> tuple[Mode, ...]:
    """Parse names of modes such as ``"none,ebbtide"``; leave out `save_on_cpu` on a CPU.

    Raises:
        UsageError: a name is not that of a mode.
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
    """Parse the name of a device; ``"auto"`` means the accelerator if there is one, else the CPU.

    Raises:
        UsageError: this machine has no such device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return torch.device("cpu") if accelerator is None else accelerator
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device: {name!r} is not a torch device; try auto or cpu") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or device.type != accelerator.type:
        seen = "no accelerator" if accelerator is None else f"an accelerator of type {accelerator}"
        raise UsageError(f"--device {name}: torch sees {seen} on this machine; try auto or cpu")
    if device.index is not None and device.index >= torch.accelerator.device_count():
        raise UsageError(
            f"--device {name}: this machine has {torch.accelerator.device_count()} such devices, "
            f"numbered from 0"
        )
    return device


def check_writable(out: Path) -> None:
    """Check that results can be written to ``out``; create the directory if it is missing.

    The check comes first, so that a wrong path shows at once and not after minutes of training.

    Raises:
        UsageError: the directory cannot be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written to: {error.strerror}") from error


def check_neuralop() -> None:
    """Check that neuraloperator is installed, without importing it.

    Raises:
        UsageError: neuraloperator is not installed.
    """
    if importlib.util.find_spec("neuralop") is None:
        raise UsageError(
            'the demo needs neuraloperator: pip install "ebbtide[neuralop,plots]" installs it'
        )
