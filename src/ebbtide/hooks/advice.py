"""Says once what a user would want to know about the first steps."""

from __future__ import annotations

from typing import final

from ebbtide.activations.activations import Activations
from ebbtide.activations.placement import Placement
from ebbtide.interface.warning import warn_user
from ebbtide.units import format_size


@final
class Advice:
    """Warns where offloading has had no effect.

    Args:
        activations: the model's activations.
        placement: decides what becomes of them.
    """

    def __init__(self, activations: Activations, placement: Placement) -> None:
        self._activations = activations
        self._placement = placement
        self._account = activations.transfers.account
        self._has_warned = self._has_looked = False

    def give(self) -> None:
        """Warn if there is reason to. Called when a forward begins."""
        self._warn_of_double_backward()
        self._warn_if_nothing_left()

    def _warn_of_double_backward(self) -> None:
        """Say once that what a second backward needs is kept from now on."""
        if self._activations.wanted_again and not self._has_warned:
            self._has_warned = True
            warn_user(
                "double-backward",
                f"a backward with create_graph=True makes a graph that holds what it has read "
                f"until the second backward, so it saves nothing to offload that. From now on "
                f"{len(self._activations.wanted_again)} storages of each step stay on the device; "
                f"nothing needs to be changed",
            )

    def _warn_if_nothing_left(self) -> None:
        """Say after the first step why it has offloaded nothing, if so.

        Layers that a policy recomputes are verified in the first step, so the second one tells.
        """
        meter, first = self._account.last_meter, 1 + self._placement.verifies_first
        if self._has_looked or meter is None or self._account.num_steps < first:
            return
        self._has_looked = True
        left = meter.offloaded_bytes + meter.rebuilt_bytes + meter.packed_bytes
        left += meter.recomputed_bytes
        if left or not self._placement.wants_any:
            return
        if meter.parameter_bytes == meter.saved_bytes:
            why = (
                "all that autograd saved are parameters, buffers, or casts of them, which "
                "weights=ebbtide.WeightPolicy() offloads"
            )
        elif self._placement.min_bytes > 1:
            why = (
                f"none of the {meter.num_saved} tensors that autograd saved is in a chosen layer "
                f"and has {format_size(self._placement.min_bytes)} or more; lower it with "
                f"ActivationPolicy(min_bytes=...)"
            )
        else:
            why = (
                "none of the tensors that autograd saved is in a chosen layer; choose others with "
                "layers=[...] or ActivationPolicy(num_layers=...)"
            )
        warn_user(
            "nothing-offloaded",
            f"ebbtide offloaded nothing in this model's first training step: {why}",
        )
