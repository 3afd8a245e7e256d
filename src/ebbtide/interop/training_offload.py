"""What the callbacks of the frameworks share: a model is offloaded while it is trained."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Sequence
from os import PathLike
from typing import Final, NoReturn, final

from torch import nn

from ebbtide.api import offload
from ebbtide.errors import PolicyError, warn_of_untested
from ebbtide.handle import OffloadHandle
from ebbtide.planning.planned_step import PlannedStep
from ebbtide.policy import (
    ActivationPolicy,
    WeightPolicy,
    check_arguments,
    check_budgeted,
)
from ebbtide.runtime.stats import StepStats
from ebbtide.schedule import Schedule
from ebbtide.units import parse_budget_bytes
from ebbtide.version import TESTED_FRAMEWORKS

_OFFLOADED: Final = weakref.WeakKeyDictionary[
    nn.Module, tuple[OffloadHandle, weakref.ref[object]]
]()
"""The handles of models that are offloaded for a training run, and an object that is the run's.

A run that raises tells no callback, and its model stays offloaded. The next run finds the handle
here and detaches it.
"""


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadArguments:
    """The arguments of `ebbtide.offload` but the model, checked as far as that needs no model.

    Raises:
        PolicyError: an argument is not what `ebbtide.offload` takes, or contradicts another.
    """

    activations: ActivationPolicy | None = None
    weights: WeightPolicy | None = None
    layers: Sequence[nn.Module | str] | None = None
    store: str = "auto"
    host_budget: int | str | None = None
    trace: bool = False
    schedule: Schedule | None = None
    budget: int | str | None = None
    plan: PlannedStep | str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_arguments(activations=self.activations, weights=self.weights, trace=self.trace)
        if self.budget is not None or self.plan is not None:
            twice = self.budget is not None and self.plan is not None
            check_budgeted(self.activations, self.schedule, given_twice=twice)
        if self.budget is not None:
            parse_budget_bytes(self.budget)

    def attach_to(self, model: nn.Module) -> OffloadHandle:
        """Offload a model with these arguments."""
        for package, newest in TESTED_FRAMEWORKS.items():
            if package in sys.modules:
                warn_of_untested(package, sys.modules[package].__version__, newest)
        handle: OffloadHandle = offload(model, **vars(self))
        return handle


@final
class TrainingOffload:
    """Offloads a model while a framework trains it, and adds up what its steps report.

    Args:
        arguments: how to offload.

    Attributes:
        handle: the handle of the last run; None before the first one.
    """

    def __init__(self, arguments: OffloadArguments) -> None:
        self.arguments = arguments
        self.handle: OffloadHandle | None = None
        self._model: nn.Module | None = None
        self._seen: StepStats | None = None
        self._counted: list[StepStats] = []

    def __reduce__(self) -> tuple[type[TrainingOffload], tuple[OffloadArguments]]:
        """A copy, such as that of a spawned process, offloads nothing yet."""
        return TrainingOffload, (self.arguments,)

    @property
    def is_attached(self) -> bool:
        """Whether a model is offloaded now."""
        return self._model is not None

    def begin(self, model: nn.Module, run: object) -> None:
        """Offload a model, instead of what an earlier run that raised has left.

        Args:
            model: the model.
            run: an object that is the same one during the whole run.

        Raises:
            PolicyError: the model cannot be offloaded so, or two callbacks of one run offload it.
        """
        self.end()
        for module in model.modules():
            if module not in _OFFLOADED:
                continue
            handle, known = _OFFLOADED[module]
            if known() is run:
                raise PolicyError(
                    "two callbacks offload the same model in one training run; leave one of them "
                    "out"
                )
            handle.detach()
            del _OFFLOADED[module]
        self.handle = self.arguments.attach_to(model)
        self._model, self._seen, self._counted = model, self.handle.stats, []
        _OFFLOADED[model] = self.handle, weakref.ref(run)

    def end(self) -> None:
        """Put the model back as it was. A second call does nothing."""
        model, self._model = self._model, None
        if model is None:
            return
        assert self.handle is not None
        if model in _OFFLOADED and _OFFLOADED[model][0] is self.handle:
            del _OFFLOADED[model]
        self.handle.detach()

    def count_step(self) -> None:
        """Count the last finished step, if it has not been counted yet."""
        if self._model is None or self.handle is None:
            return
        stats = self.handle.stats
        if stats is not self._seen:
            self._seen = stats
            self._counted.append(stats)

    def take_metrics(self, num_updates: int) -> dict[str, float]:
        """Return the figures of the steps counted since the last call; empty if there are none.

        Args:
            num_updates: for how many updates of the weights these steps computed gradients.

        Returns:
            The highest ``ebbtide/peak_device_bytes`` of a step; and for one update, on average, the
            ``ebbtide/offloaded_bytes``, the seconds ``ebbtide/stall_s``, and, if weights are
            offloaded, ``ebbtide/weight_reload_bytes``.
        """
        counted, self._counted = self._counted, []
        if not counted:
            return {}
        updates = max(num_updates, 1)
        metrics: dict[str, float] = {
            "ebbtide/peak_device_bytes": max(each.peak_device_bytes for each in counted),
            "ebbtide/offloaded_bytes": sum(each.offloaded_bytes for each in counted) // updates,
            "ebbtide/stall_s": sum(each.stall_s for each in counted) / updates,
        }
        if self.arguments.weights is not None:
            reloaded = sum(each.weight_reload_bytes for each in counted)
            metrics["ebbtide/weight_reload_bytes"] = reloaded // updates
        return metrics


def refuse_missing(error: ModuleNotFoundError, *, package: str, extra: str) -> NoReturn:
    """Raise an error that says what to install, if a framework itself is what is missing.

    Args:
        error: what importing the framework raised.
        package: the module that was imported.
        extra: the extra of ebbtide that installs it.

    Raises:
        ModuleNotFoundError: always; ``error`` itself if something else is missing.
    """
    if error.name is None or error.name.partition(".")[0] != package.partition(".")[0]:
        raise error
    raise ModuleNotFoundError(
        f"ebbtide.interop.{extra} needs {package}, which is not installed: "
        f'pip install "ebbtide[{extra}]"',
        name=error.name,
    ) from error
