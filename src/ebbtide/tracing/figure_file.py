"""Figures of matplotlib that are written to a file, without a window and without pyplot."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, Final

from ebbtide.errors import PolicyError

SUFFIXES: Final = (".png", ".svg", ".pdf")
WIDTH_INCHES: Final = 12.0
_PIXELS_PER_INCH: Final = 200


def make_figure(path: str | PathLike[str], height_inches: float) -> Any:
    """Return a figure that can be saved to the path.

    Raises:
        PolicyError: the suffix is not one of `SUFFIXES`.
        ImportError: matplotlib is not installed.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise PolicyError(f"path must end in {', '.join(SUFFIXES)}, got {str(path)!r}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        message = 'a plot needs matplotlib: pip install "ebbtide[plots]"'
        raise ImportError(message) from error

    size = (WIDTH_INCHES, height_inches)
    figure = Figure(figsize=size, dpi=_PIXELS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: str | PathLike[str]) -> None:
    """Write the figure in the format that the suffix of the path names."""
    figure.savefig(path, format=Path(path).suffix.lower()[1:])
