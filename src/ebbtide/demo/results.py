"""What each mode reports, and how two modes compare."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import final

import numpy as np
from numpy.typing import NDArray

from ebbtide.demo.config import Mode
from ebbtide.runtime.stats import StepStats

# [Note: turns] The modes alternate, so that what disturbs the machine for a while disturbs all. Not
# step by step: the memory that a mode freed in its last step has gone back to the kernel, and in a
# virtual machine even to the host, by the time the other modes are through. Getting it again took
# `none` twice as long as a step after steps. So a turn is several steps, the first ones untimed.
STEPS_PER_TURN = 5
UNTIMED_PER_TURN = 2


@final
@dataclass(frozen=True)
class StepResult:
    """One training step. Errors are relative, means over the batch before its update.

    Attributes:
        duration_s: forward, backward and optimizer.
        user_s: processor seconds in the program itself, over all threads.
        kernel_s: processor seconds in the kernel, over all threads: fresh memory, files.
        peak_bytes: most memory in use during the step.
        loss: what was differentiated.
        train_l2: error in the L2 norm.
        train_h1: error in the H1 norm.
        gradients_sha256: over the bytes of every parameter's gradient.
        stats: ebbtide's, where it was at work.
        timeline: (seconds since the step began, bytes in use), every 5 ms.
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
    """A mode after its last step.

    Attributes:
        test_l2: relative error in the L2 norm, mean over the test samples.
        test_h1: the same in the H1 norm.
        parameters_sha256: over the bytes of every parameter.
        sample: permeability, pressure and predicted pressure of the first test sample.
    """

    test_l2: float
    test_h1: float
    parameters_sha256: str
    sample: tuple[NDArray[np.float32], ...]


@final
@dataclass
class ModeResult:
    """Everything of one mode.

    Attributes:
        mode: which one.
        idle_bytes: in use just before the first training step.
        steps: in order.
        final: None until the mode has ended.
    """

    mode: Mode
    idle_bytes: int
    steps: list[StepResult] = field(default_factory=list)
    final: FinalResult | None = None

    @property
    def peak_bytes(self) -> int:
        """The most memory in use during any step."""
        return max(step.peak_bytes for step in self.steps)

    @property
    def timed(self) -> list[StepResult]:
        """The steps whose times count; the first of each turn warm up, see [Note: turns]."""
        return [
            step for at, step in enumerate(self.steps) if at % STEPS_PER_TURN >= UNTIMED_PER_TURN
        ]

    @property
    def median_s(self) -> float:
        """Of a step."""
        return statistics.median(step.duration_s for step in self.timed)

    @property
    def typical(self) -> StepResult:
        """The timed step of median time, or the next faster one."""
        return sorted(self.timed, key=lambda step: step.duration_s)[(len(self.timed) - 1) // 2]

    @property
    def stats(self) -> StepStats | None:
        """Ebbtide's figures of the last step, where it was at work."""
        return self.steps[-1].stats


def first_difference(reference: ModeResult, other: ModeResult) -> str | None:
    """Compare losses and gradients of every step and the final parameters, bit by bit.

    Returns:
        None when all are the same, else the first that is not, such as ``"gradients, step 2"``.
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
