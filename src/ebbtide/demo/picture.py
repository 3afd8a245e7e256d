"""Draw the demo's picture: memory over one step, and a prediction of the trained model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ebbtide.demo.config import DemoConfig, Mode
from ebbtide.demo.results import ModeResult

# The palette of Okabe and Ito, whose colours colour-blind readers can tell apart.
_COLOURS = {
    Mode.NONE: "#D55E00",
    Mode.SAVE_ON_CPU: "#E69F00",
    Mode.REBUILD: "#009E73",
    Mode.EBBTIDE: "#0072B2",
}
_PIXELS_PER_INCH = 200
_SIZE_INCHES = (8.0, 3.0)


def draw(config: DemoConfig, results: list[ModeResult], path: Path) -> bool:
    """Write the picture, 1600 x 600 pixels.

    Returns:
        False if there is no picture because matplotlib is not installed, else True.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, dpi=_PIXELS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    halves: Any = figure.subfigures(1, 2, width_ratios=(1.0, 1.55))
    memory, fields = halves
    _draw_memory(memory.subplots(), config, results)
    _draw_sample(fields, config, results[-1])
    figure.savefig(path)
    return True


def _draw_memory(axes: Any, config: DemoConfig, results: list[ModeResult]) -> None:
    for result in results:
        times_s, sizes = zip(*result.typical.timeline, strict=True)
        above_gib = [(size - result.idle_bytes) / 2**30 for size in sizes]
        colour = _COLOURS[result.mode]
        label = f"{result.mode.title}: peak {max(above_gib):.2f} GiB"
        axes.plot(times_s, above_gib, color=colour, linewidth=1.2, label=label)
        axes.fill_between(times_s, above_gib, color=colour, alpha=0.12, linewidth=0)
    what = "Process" if config.device.type == "cpu" else "Device"
    axes.set_title(f"{what} memory in a training step", fontsize=10, loc="left")
    axes.set_xlabel("time since the step began (s)", fontsize=9)
    axes.set_ylabel("above idle (GiB)", fontsize=9)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.25)  # room for the legend
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, frameon=False, loc="upper left", handlelength=1.2)


def _draw_sample(figure: Any, config: DemoConfig, result: ModeResult) -> None:
    assert result.final is not None
    coefficient, true, predicted = result.final.sample
    axes = figure.subplots(1, 3)
    axes[0].imshow(
        coefficient.T, origin="lower", cmap="Greys", vmin=0, vmax=1.6 * coefficient.max()
    )
    scale = {"vmin": 0, "vmax": 1e3 * max(true.max(), predicted.max())}
    for axis, pressure in zip(axes[1:], (true, predicted), strict=True):
        image = axis.imshow(1e3 * pressure.T, origin="lower", cmap="viridis", **scale)
    titles = (
        f"permeability\n{config.resolution} x {config.resolution} nodes",
        "pressure\nfinite differences",
        f"predicted pressure\ntest error {result.final.test_l2:.1%}",
    )
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=9)
        axis.set_xticks([])
        axis.set_yticks([])
    bar = figure.colorbar(
        image, ax=axes, location="bottom", shrink=0.66, anchor=(1.0, 1.0), aspect=30, pad=0.04
    )
    bar.set_label("pressure (10$^{-3}$)", fontsize=8)
    bar.ax.tick_params(labelsize=8)
