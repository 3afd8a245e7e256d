"""Bounds the bytes in flight pass by pass, as a plan says.

See [Note: windows] in `ebbtide.planning.prediction.pass_windows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ebbtide.activations.activations import Activations
from ebbtide.transfers.prefetch import ForwardLog


class Window(NamedTuple):
    """What may be in flight in one pass, in bytes.

    Attributes:
        others_bytes: in a forward, what earlier passes have on its way down when the pass begins;
            in a backward, what is brought back before it is needed.
        own_bytes: what the pass itself offloads, or brings back for itself.
    """

    others_bytes: int
    own_bytes: int


class PassWindows(NamedTuple):
    """The windows of a step.

    Attributes:
        forward: of the forward of each layer's call.
        between: of the work in the forward before the first call, and after each call; None where
            there is none.
        loss: of what comes between the model's forward and the backward of its last layer.
        backward: of the backward of each layer's call.
    """

    forward: Sequence[Window]
    between: Sequence[Window | None]
    loss: Window
    backward: Sequence[Window]

    def begin_forward(self, activations: Activations) -> None:
        """Begin the model's forward."""
        self._begin_between(0, activations)

    def begin_forward_of(self, layer: int, activations: Activations) -> None:
        """Begin the forward of a layer's call; a model may make more calls than the plan has."""
        if layer < len(self.forward):
            _begin_forward(self.forward[layer], activations)

    def end_forward_of(self, layer: int, activations: Activations) -> None:
        """Begin what comes after it."""
        self._begin_between(layer + 1, activations)

    def end_forward(self, activations: Activations) -> None:
        """Begin what comes after the model's forward."""
        _begin_forward(self.loss, activations)
        with activations.transfers.gate:
            activations.transfers.reloads.window(0, 0)

    def begin_backward_of(self, layer: int, activations: Activations, log: ForwardLog) -> None:
        """Begin the backward of a layer's call.

        Args:
            layer: number of the call.
            activations: the model's activations.
            log: of the forward that the call belongs to.
        """
        transfers = activations.transfers
        if layer >= len(self.backward) or transfers.windows is not self:
            return  # another plan is followed since the forward
        window = self.backward[layer]
        with transfers.gate:
            transfers.offloads.hold_to(0)
            transfers.reloads.window(window.others_bytes, window.own_bytes)
        activations.note_backward(log)

    def _begin_between(self, place: int, activations: Activations) -> None:
        window = self.between[place] if place < len(self.between) else None
        if window is not None:
            _begin_forward(window, activations)


def _begin_forward(window: Window, activations: Activations) -> None:
    offloads = activations.transfers.offloads
    with activations.transfers.gate:
        offloads.hold_to(window.others_bytes)
        offloads.bound_bytes = window.others_bytes + window.own_bytes
