"""Draw what memory held in a step as a picture: areas stacked by owner, and the peak."""

from __future__ import annotations

from os import PathLike
from typing import Any, Final

from ebbtide.tracing.figure_file import make_figure, save_figure
from ebbtide.tracing.palette import HATCHED_OWNERS, INK, OWNER_COLOURS
from ebbtide.tracing.step_memory import Owner, StepMemory
from ebbtide.tracing.timeline import TimeUnit
from ebbtide.units import format_size

_HEIGHT_INCHES: Final = 4.6
_UNITS: Final = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
_HEADROOM: Final = 1.16  # of the axis above the peak, for the label


def write_memory_plot(path: str | PathLike[str], memory: StepMemory) -> None:
    """Write the picture.

    Args:
        path: path of the file; its suffix selects the format.
        memory: what is drawn.

    Raises:
        PolicyError: the suffix is none that pictures have.
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figure = make_figure(path, _HEIGHT_INCHES)
    _draw(figure, figure.subplots(), memory)
    save_figure(figure, path)


def _draw(figure: Any, axes: Any, memory: StepMemory) -> None:
    samples = memory.samples
    time = TimeUnit.over(samples[0].begin_s, samples[-1].end_s)
    unit, unit_bytes = next(each for each in _UNITS if memory.peak_bytes >= each[1] or each[1] == 1)
    edges = [sample.begin_s * time.per_s for sample in samples]
    edges.append(samples[-1].end_s * time.per_s)
    below = [0.0] * len(samples)
    for owner in Owner:
        sizes = [sample.owned.get(owner, 0) / unit_bytes for sample in samples]
        if not any(sizes):
            continue
        above = [low + size for low, size in zip(below, sizes, strict=True)]
        # The last value is given twice, because there is one more edge than there are phases.
        axes.fill_between(
            edges, [*below, below[-1]], [*above, above[-1]], step="post", linewidth=0,
            facecolor=OWNER_COLOURS[owner], edgecolor="white", label=owner.value,
            hatch="////" if owner in HATCHED_OWNERS else None,
        )  # fmt: skip
        below = above
    _mark_peak(axes, memory, time.per_s, unit_bytes)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, memory.peak_bytes / unit_bytes * _HEADROOM or 1)
    axes.ticklabel_format(style="plain", useOffset=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(f"time since the step began ({time.name})", fontsize=10)
    axes.set_ylabel(unit, fontsize=10)
    axes.set_title(f"Memory by owner: {memory.counted}", loc="left", fontsize=11)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(  # in the order in which the areas are stacked
        handles[::-1], labels[::-1], loc="outside right upper", fontsize=9, frameon=False
    )


def _mark_peak(axes: Any, memory: StepMemory, per_s: float, unit_bytes: int) -> None:
    sample = memory.samples[memory.peak]
    middle = (sample.begin_s + sample.end_s) / 2 * per_s
    right_half = middle > (memory.samples[0].begin_s + memory.samples[-1].end_s) / 2 * per_s
    axes.annotate(
        f"peak {format_size(memory.peak_bytes)} in {memory.peak_phase}",
        (middle, memory.peak_bytes / unit_bytes),
        xytext=(-10 if right_half else 10, 14),
        textcoords="offset points",
        ha="right" if right_half else "left",
        fontsize=10,
        color=INK,
        arrowprops={"arrowstyle": "-|>", "color": INK, "shrinkB": 0},
    )
