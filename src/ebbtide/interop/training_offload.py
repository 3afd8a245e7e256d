"""What the callbacks of the frameworks share: a model is offloaded while it is trained."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final, NoReturn, final

from torch import nn

from ebbtide.api import offload
from ebbtide.errors import PolicyError, warn_of_untested
from ebbtide.handle import OffloadHandle
from ebbtide.policy import check_arguments, check_budgeted
from ebbtide.runtime.stats import StepStats
from ebbtide.units import parse_budget_bytes
from ebbtide.version import TESTED_FRAMEWORKS

_TAKEN: Final = inspect.signature(offload).parameters.keys() - {"model", "device", "materialize"}

_OFFLOADED: Final = weakref.WeakKeyDictionary[
    nn.Module, tuple[OffloadHandle, weakref.ref[object]]
]()
"""The handles of models that are offloaded for a training run, and an object that is the run's.

A run that raises tells no callback, and its model stays offloaded. The next run finds the handle
here and detaches it.
"""


@final
class TrainingOffload:
    """Offloads a model while a framework trains it, and adds up what its steps report.

    Args:
        **arguments: those of `ebbtide.offload`, but the model, ``device`` and ``materialize``. They
            are checked as far as that needs no model.

    Attributes:
        arguments: as given.
        handle: the handle of the last run; None before the first one.

    Raises:
        PolicyError: an argument is not what `ebbtide.offload` takes, or contradicts another.
        TypeError: there is no such argument.
    """

    def __init__(self, **arguments: Any) -> None:
        if unknown := arguments.keys() - _TAKEN:
            raise TypeError(f"a callback does not take {', '.join(sorted(unknown))}")
        activations, budget, plan = (arguments.get(n) for n in ("activations", "budget", "plan"))
        check_arguments(
            activations=activations,
            weights=arguments.get("weights"),
            trace=arguments.get("trace", False),
        )
        if budget is not None or plan is not None:
            twice = budget is not None and plan is not None
            check_budgeted(activations, arguments.get("schedule"), given_twice=twice)
        if budget is not None:
            parse_budget_bytes(budget)
        self.arguments = arguments
        self.handle: OffloadHandle | None = None
        self._model: nn.Module | None = None
        self._seen: StepStats | None = None
        self._counted: list[StepStats] = []

    def __reduce__(self) -> tuple[Callable[..., TrainingOffload], tuple[()]]:
        """A copy, such as that of a spawned process, offloads nothing yet."""
        return functools.partial(TrainingOffload, **self.arguments), ()

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
        for package, newest in TESTED_FRAMEWORKS.items():
            if package in sys.modules:
                warn_of_untested(package, sys.modules[package].__version__, newest)
        self.handle = offload(model, **self.arguments)
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
        if self.arguments.get("weights") is not None:
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
