"""The results of each mode, and the bitwise comparison of two modes."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import final

import numpy as np
from numpy.typing import NDArray

from ebbtide.demo.config import Mode
from ebbtide.pages.run_record import RunRecord
from ebbtide.transfers.stats import StepStats

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
        user_s: processor seconds in the program itself, summed over all threads.
        kernel_s: processor seconds in the kernel (new memory, files), summed over all threads.
        peak_bytes: largest number of bytes in use during the step.
        loss: the loss, which backward differentiates.
        train_l2: error in the L2 norm.
        train_h1: error in the H1 norm.
        gradients_sha256: hash of the bytes of all parameters' gradients.
        stats: ebbtide's statistics of the step; None for modes without ebbtide.
        timeline: pairs of seconds since the step began and bytes in use, one every 5 ms.
    """

    duration_s: float
    user_s: float
    kernel_s: float
    peak_bytes: int
    loss: float
    train_l2: float
    train_h1: float
    gradients_sha256: str
    stats: StepStats | None
    timeline: list[tuple[float, int]]


@final
@dataclass(frozen=True)
class FinalResult:
    """The result of a mode after its last step.

    Attributes:
        test_l2: relative error in the L2 norm, mean over the test samples.
        test_h1: relative error in the H1 norm, mean over the test samples.
        parameters_sha256: hash of the bytes of all parameters.
        lasting_bytes: number of bytes in use between steps: weights, gradients, optimizer state.
        forward_bytes: number of bytes that a forward without autograd, which saves nothing, needs
            beside these for a training batch.
        sample: permeability, pressure and predicted pressure of the first test sample.
        record: what a page can show of one more step, which was recorded; None where it cannot be.
    """

    test_l2: float
    test_h1: float
    parameters_sha256: str
    lasting_bytes: int
    forward_bytes: int
    sample: tuple[NDArray[np.float32], ...]
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
    def typical(self) -> StepResult:
        """The timed step with the median duration, or the next faster one."""
        return sorted(self.timed, key=lambda step: step.duration_s)[(len(self.timed) - 1) // 2]

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
