"""A plan: what becomes of each layer and of each storage of a training step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import final

from ebbtide.runtime.handles import Decision


class LayerMode(Enum):
    """How a layer runs."""

    AS_IS = "as is"
    RECOMPUTE = "recompute"  # its input stays on the device
    RECOMPUTE_OFFLOAD = "recompute+offload"  # its input is offloaded


@final
@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """What becomes of one layer.

    Args:
        mode: how the layer runs.
        decisions: what becomes of each of its storages, by number. The layer that saves a storage
            first decides for all layers that share it. Those of a recomputed layer do not matter.
        weights_on_host: whether the layer's weights, gradients and optimizer state rest on the
            host.
    """

    mode: LayerMode = LayerMode.AS_IS
    decisions: tuple[Decision, ...] = ()
    weights_on_host: bool = False


@final
@dataclass(frozen=True, kw_only=True)
class Plan:
    """What becomes of each layer and storage, and what that is predicted to cost.

    Args:
        layers: one entry for each layer of the profile.
        max_inflight_bytes: bound, for each direction, on the bytes that occupy device memory only
            because their copy is in flight; see `ActivationPolicy.max_inflight_bytes`.
        windows: such a bound for each pass F0, F1, ..., the loss, ..., B1, B0 alone; empty: all
            passes have the same one. See [Note: windows] in
            `ebbtide.planning.prediction`.
        step_s: predicted seconds of a step; None: not predicted.
        peak_bytes: predicted peak of device memory; None: not predicted.
        bound_s: no plan within the budget has a shorter step than this many seconds; None: not
            known.
        limit_bytes: device memory that the search held plans to; None: not known.
    """

    layers: tuple[LayerPlan, ...]
    max_inflight_bytes: int = 0
    windows: tuple[int, ...] = ()
    step_s: float | None = None
    peak_bytes: int | None = None
    bound_s: float | None = None
    limit_bytes: int | None = None

    @property
    def gap(self) -> float | None:
        """By what share of the bound the step is longer than the bound; None if not known."""
        if self.step_s is None or self.bound_s is None:
            return None
        if self.step_s <= self.bound_s:
            return 0.0
        return (self.step_s - self.bound_s) / self.bound_s if self.bound_s else float("inf")

    @property
    def has_weights_on_host(self) -> bool:
        """Whether the weights of any layer rest on the host."""
        return any(layer.weights_on_host for layer in self.layers)

    @property
    def changes_nothing(self) -> bool:
        """Whether all that autograd saves stays, and nothing is computed again."""
        return not self.has_weights_on_host and all(
            layer.mode is LayerMode.AS_IS and set(layer.decisions) <= {Decision.KEEP}
            for layer in self.layers
        )

    def with_closed_windows(self) -> Plan:
        """Return the plan with nothing in flight in any pass; itself if it has no windows."""
        if not self.windows:
            return self
        closed = (0,) * len(self.windows)
        return dataclasses.replace(self, windows=closed, max_inflight_bytes=0)
