"""The colours of charts, which are the same in pictures and on pages.

They are the palette of Okabe and Ito, whose colours colour-blind readers can tell apart, and tints
of it. Colours of one chart also differ in lightness, and some areas are hatched.
"""

from __future__ import annotations

from typing import Final

from ebbtide.tracing.step_memory import Owner

INK: Final = "#222222"
OTHER_EVENT_COLOUR: Final = "#999999"
EVENT_COLOURS: Final = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "rebuild": "#CC79A7",
    "recompute": "#F0E442",
    "wait": "#D55E00",
    "offload": "#E69F00",
    "reload": "#009E73",
}
HATCHED_EVENTS: Final = frozenset({"wait"})

OWNER_COLOURS: Final = {
    Owner.OTHER: "#999999",
    Owner.PARAMETERS: "#0072B2",
    Owner.OPTIMIZER: "#003F63",
    Owner.GRADIENTS: "#56B4E9",
    Owner.WEIGHTS: "#A9D8F3",
    Owner.INPUTS: "#C4C4C4",
    Owner.OUTPUTS: "#6E6E6E",
    Owner.KEPT: "#009E73",
    Owner.LEAVING: "#E69F00",
    Owner.REFERENCED: "#8A5F00",
    Owner.RELOADED: "#F0E442",
    Owner.REBUILT: "#CC79A7",
    Owner.RECOMPUTED: "#7D3C5D",
    Owner.PASSED: "#F0B48C",
    Owner.RUNNING: "#D55E00",
}
# Tints of the colour of another owner.
HATCHED_OWNERS: Final = frozenset(
    {
        Owner.OPTIMIZER,
        Owner.WEIGHTS,
        Owner.OUTPUTS,
        Owner.REFERENCED,
        Owner.RECOMPUTED,
        Owner.PASSED,
    }
)
