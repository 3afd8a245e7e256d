"""The configuration of a run of the demo, checked before anything expensive begins."""

from __future__ import annotations

import enum
import importlib.util
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch

from ebbtide.errors import PolicyError
from ebbtide.observe.run_record import RunRecord
from ebbtide.runtime.stats import StepStats

WARM_RESOLUTION = 32
QUICK = {"resolution": 128, "steps": 6, "warm_steps": 40}  # of a quick look


class Mode(enum.Enum):
    """How a run treats saved activations. The values are the names on the command line."""

    NONE = "none"
    SAVE_ON_CPU = "save_on_cpu"
    REBUILD = "rebuild"  # ebbtide with rebuilding but without offload
    EBBTIDE = "ebbtide"

    @property
    def title(self) -> str:
        """The name in the progress, the table and the sentences."""
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
        data: directory for the generated samples; None means the user's cache.
        out: directory for the results.
        seed: random seed of the samples and of the model's weights.
        threads: number of torch threads in each mode's process; None leaves the choice to torch.
        warm_steps: number of training steps at 32 x 32 that precede the run and that all modes
            share.

    Raises:
        PolicyError: a number is out of range, or there is no mode.
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
                raise PolicyError(f"--{option} must be {bound} or more, got {getattr(self, name)}")
        if not self.modes:
            raise PolicyError(
                "--modes names no mode that can run on this device; try --modes none,ebbtide"
            )


def parse_modes(text: str, device: torch.device) -> tuple[Mode, ...]:
    """Parse names of modes such as ``"none,ebbtide"``; leave out `save_on_cpu` on a CPU.

    Raises:
        PolicyError: a name is not that of a mode.
    """
    known = {mode.value: mode for mode in Mode}
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise PolicyError(f"--modes: {name!r} is not one of {', '.join(known)}")
    modes = dict.fromkeys(known[name] for name in names)
    if device.type == "cpu":
        modes.pop(Mode.SAVE_ON_CPU, None)
    return tuple(modes)


def parse_device(name: str) -> torch.device:
    """Parse the name of a device; ``"auto"`` means the accelerator if there is one, else the CPU.

    Raises:
        PolicyError: this machine has no such device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return torch.device("cpu") if accelerator is None else accelerator
    try:
        device = torch.device(name)
    except RuntimeError:
        raise PolicyError(f"--device: {name!r} is not a torch device; try auto or cpu") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or device.type != accelerator.type:
        seen = "no accelerator" if accelerator is None else f"an accelerator of type {accelerator}"
        raise PolicyError(f"--device {name}: torch sees {seen} on this machine; try auto or cpu")
    if device.index is not None and device.index >= torch.accelerator.device_count():
        raise PolicyError(
            f"--device {name}: this machine has {torch.accelerator.device_count()} such devices, "
            f"numbered from 0"
        )
    return device


def check_writable(out: Path) -> None:
    """Check that results can be written to ``out``; create the directory if it is missing.

    The check comes first, so that a wrong path shows at once and not after minutes of training.

    Raises:
        PolicyError: the directory cannot be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise PolicyError(f"--out {out} cannot be written to: {error.strerror}") from error


def check_neuralop() -> None:
    """Check that neuraloperator is installed, without importing it.

    Raises:
        PolicyError: neuraloperator is not installed.
    """
    if importlib.util.find_spec("neuralop") is None:
        raise PolicyError(
            'the demo needs neuraloperator: pip install "ebbtide[neuralop]" installs it'
        )


# ---- The results of each mode, and the bitwise comparison of two modes ----

# [Note: turns] The modes take turns, so that a temporary disturbance of the machine affects all of
# them. A turn is several steps, of which the first are not timed. By the time the other modes have
# had their turn, the memory that a mode freed in its last step has gone back to the kernel, and in
# a virtual machine even to the host. Getting it again made the first step of a turn of `none` take
# twice as long as the later ones.
STEPS_PER_TURN = 5
UNTIMED_PER_TURN = 2


@final
@dataclass(frozen=True)
class StepResult:
    """The result of one training step.

    Errors are relative and are means over the batch, computed before the step's update.

    Attributes:
        duration_s: seconds for forward, backward and optimizer.
        peak_bytes: largest number of bytes in use during the step.
        loss: the loss, which backward differentiates.
        train_l2: error in the L2 norm.
        train_h1: error in the H1 norm.
        gradients_sha256: hash of the bytes of all parameters' gradients.
        stats: ebbtide's statistics of the step; None for modes without ebbtide.
    """

    duration_s: float
    peak_bytes: int
    loss: float
    train_l2: float
    train_h1: float
    gradients_sha256: str
    stats: StepStats | None


@final
@dataclass(frozen=True)
class FinalResult:
    """The result of a mode after its last step.

    Attributes:
        test_l2: relative error in the L2 norm, mean over the test samples.
        test_h1: relative error in the H1 norm, mean over the test samples.
        parameters_sha256: hash of the bytes of all parameters.
        record: what a page can show of one more step, which was recorded; None where it cannot be.
    """

    test_l2: float
    test_h1: float
    parameters_sha256: str
    record: RunRecord | None = None


@final
@dataclass
class ModeResult:
    """All results of one mode.

    Attributes:
        mode: the mode.
        idle_bytes: number of bytes in use just before the first training step.
        steps: results of the steps so far, in order.
        final: result after the last step; None until then.
    """

    mode: Mode
    idle_bytes: int
    steps: list[StepResult] = field(default_factory=list)
    final: FinalResult | None = None

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes in use during any step."""
        return max(step.peak_bytes for step in self.steps)

    @property
    def timed(self) -> list[StepResult]:
        """The steps whose times count: all but the first ones of each turn, see [Note: turns]."""
        return [
            step for at, step in enumerate(self.steps) if at % STEPS_PER_TURN >= UNTIMED_PER_TURN
        ]

    @property
    def median_s(self) -> float:
        """Median duration of the timed steps, in seconds."""
        return statistics.median(step.duration_s for step in self.timed)

    @property
    def stats(self) -> StepStats | None:
        """Ebbtide's statistics of the last step; None for modes without ebbtide."""
        return self.steps[-1].stats


def first_difference(reference: ModeResult, other: ModeResult) -> str | None:
    """Compare losses and gradients of every step and the final parameters, bit by bit.

    Returns:
        None if all are the same, else the first difference, such as ``"gradients, step 2"``.
    """
    if len(reference.steps) != len(other.steps):
        return "number of steps"
    pairs = zip(reference.steps, other.steps, strict=True)
    for number, (expected, step) in enumerate(pairs, start=1):
        if expected.loss.hex() != step.loss.hex():
            return f"loss, step {number}"
        if expected.gradients_sha256 != step.gradients_sha256:
            return f"gradients, step {number}"
    assert reference.final is not None and other.final is not None
    if reference.final.parameters_sha256 != other.final.parameters_sha256:
        return "final parameters"
    return None
