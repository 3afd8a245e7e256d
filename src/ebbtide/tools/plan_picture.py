"""The picture of a planned step: memory over the step by what it is, and the lanes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ebbtide.observe.plots import TimeUnit, draw_lanes, make_figure, save_figure
from ebbtide.planning.prediction import MemoryParts, StepRecord, StepTiming
from ebbtide.runtime.events import TraceEvent
from ebbtide.tools.plan_tables import Findings, format_seconds
from ebbtide.units import format_size

# From the palette of Okabe and Ito; the lanes below have the same colour for the same thing.
_LAYERS: Final = (
    ("weights, gradients, optimizer", "#7F7F7F"),
    ("fixed", "#BDBDBD"),
    ("saved, stays", "#0072B2"),
    ("saved, leaving", "#E69F00"),
    ("saved, back again", "#009E73"),
    ("working memory of the pass", "#CFE8F7"),
)
_INK: Final = "#222222"
_GIB: Final = 2**30
_HEIGHT_INCHES: Final = 7.2


def draw_plan(found: Findings, path: Path) -> None:
    """Write the picture of the plan within the budget.

    Args:
        found: the findings, with a plan.
        path: path of the file; its suffix selects the format.

    Raises:
        OSError: the file cannot be written.
    """
    assert found.chosen is not None
    study = found.study
    record = StepTiming(study.profile, study.hardware).record(found.chosen.plan)
    events = sorted(record.events(), key=lambda event: (event.begin_s, event.end_s))
    end_s, step_s = record.passes[-1].end_s, found.chosen.prediction.step_s
    if step_s > end_s:
        events.append(TraceEvent("update", "compute", end_s, step_s))
    figure = make_figure(path, _HEIGHT_INCHES)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[5, 2])
    _draw_memory(above, found, record)
    draw_lanes(figure, below, events)
    below.set_title("", loc="left")
    save_figure(figure, path)


def _draw_memory(axes: Any, found: Findings, record: StepRecord) -> None:
    assert found.chosen is not None
    edges_s = [*(each.begin_s for each in record.passes), record.passes[-1].end_s]
    stacks = [_stack(each.memory) for each in record.passes]
    layers = [
        (name, [stack[number] / _GIB for stack in stacks], {"color": colour})
        for number, (name, colour) in enumerate(_LAYERS)
    ]
    upper = stack_areas(axes, edges_s, layers)
    axes.step(edges_s, upper, where="post", color=_INK, linewidth=0.8)
    budget = found.budget_bytes / _GIB
    axes.axhline(budget, color="#D55E00", linewidth=1.2, linestyle="--")
    axes.set_ylim(0, max(budget, max(upper)) * 1.18)
    axes.annotate(
        f"budget {format_size(found.budget_bytes)}",
        (1, budget),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=9,
        color="#D55E00",
    )
    family, prediction = found.study.family, found.chosen.prediction
    size = family.describe(family.size)
    axes.set_title(
        f"{family.title}{size and ', '}{size}, on {found.study.hardware.name}\n"
        f"predicted, not measured: step {format_seconds(prediction.step_s)}, peak "
        f"{format_size(prediction.peak_bytes)}",
        loc="left",
        fontsize=11,
    )
    axes.set_ylabel("device memory (GiB)", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="both", labelsize=9)
    axes.tick_params(axis="x", labelbottom=False)
    axes.legend(loc="upper left", fontsize=8.5, ncols=3, frameon=False)


def _stack(memory: MemoryParts) -> tuple[int, ...]:
    moving = memory.leaving_bytes + memory.returning_bytes
    return (
        memory.parameters_bytes,
        memory.fixed_bytes,
        memory.saved_bytes - moving,
        memory.leaving_bytes,
        memory.returning_bytes,
        memory.working_bytes,
    )
