"""How much memory a plan may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from ebbtide.errors import PolicyError
from ebbtide.planning.prediction.step_timing import Prediction


@final
@dataclass(frozen=True, kw_only=True)
class PlanBudget:
    """How much memory a plan may use, in bytes.

    Args:
        device_bytes: the peak of device memory.
        host_bytes: the peak of what rests in the tier below; None: no limit.
        pinned_bytes: how much of that may be page-locked; None: no limit.

    Raises:
        PolicyError: a figure is not a whole number, 0 or more.
    """

    device_bytes: int
    host_bytes: int | None = None
    pinned_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("device_bytes", "host_bytes", "pinned_bytes"):
            value = getattr(self, name)
            if value is None and name != "device_bytes":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise PolicyError(f"{name} must be a whole number, 0 or more; got {value!r}")

    def excess_bytes(self, prediction: Prediction) -> int:
        """Return by how many bytes a step is over its limits, added up; 0 if it is within all."""
        over = [max(0, prediction.peak_bytes - self.device_bytes)]
        if self.host_bytes is not None:
            over.append(max(0, prediction.host_peak_bytes - self.host_bytes))
        if self.pinned_bytes is not None:
            over.append(max(0, prediction.pinned_bytes - self.pinned_bytes))
        return sum(over)

    def most_host_bytes(self, *, pins: bool) -> int | None:
        """Return the most bytes that may rest in the tier below; None: no limit.

        Args:
            pins: whether that tier is page-locked memory.
        """
        limits = [self.host_bytes, self.pinned_bytes if pins else None]
        known = [limit for limit in limits if limit is not None]
        return min(known) if known else None
