"""Shows how far the demo is, and how long the rest takes. Progress goes to standard error."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ebbtide.demo.config import Mode
from ebbtide.demo.results import StepResult
from ebbtide.units import format_size

Note = Callable[[Mode, StepResult], None]

_MINUTE_S = 60.0


class TimeLeft:
    """Estimates the seconds that the steps to come will take, from those that were taken.

    Args:
        modes: the modes that train.
        steps: number of steps of each.
    """

    def __init__(self, modes: Sequence[Mode], steps: int) -> None:
        self._left = dict.fromkeys(modes, steps)
        self._taken_s: dict[Mode, list[float]] = {mode: [] for mode in modes}

    def note(self, mode: Mode, seconds: float) -> None:
        """Note a step of a mode, with all that went with it."""
        self._left[mode] -= 1
        self._taken_s[mode].append(seconds)

    def estimate_s(self) -> float | None:
        """Return the seconds that are left; None before the first step.

        A mode that has not begun is taken to be as fast as the others are on average.
        """
        means = {mode: sum(each) / len(each) for mode, each in self._taken_s.items() if each}
        if not means:
            return None
        other_s = sum(means.values()) / len(means)
        return sum(left * means.get(mode, other_s) for mode, left in self._left.items())


def format_left(seconds: float | None) -> str:
    """Format the time that is left, such as ``"about 40 s left"``; none if it is not known or 0."""
    if not seconds:
        return ""
    if seconds < 1.5 * _MINUTE_S:
        return f"about {max(1, round(seconds))} s left"
    return f"about {round(seconds / _MINUTE_S)} min left"


@contextlib.contextmanager
def activity(console: Console, what: str) -> Iterator[None]:
    """Show that something is under way; when it is done, say how long it took."""
    if not console.is_terminal:
        console.print(what, highlight=False, markup=False)
        yield
        return
    begin_s = time.perf_counter()
    spinner = "dots" if console.encoding.lower().startswith("utf") else "line"
    with console.status(what, spinner=spinner):
        yield
    taken_s = time.perf_counter() - begin_s
    console.print(f"{what} ({taken_s:.0f} s)", highlight=False, markup=False)


@contextlib.contextmanager
def training(console: Console, modes: Sequence[Mode], steps: int) -> Iterator[Note]:
    """Show a bar for each mode on a terminal; elsewhere print a line for each step.

    Yields:
        A function to call with each step as soon as it is done.
    """
    left = TimeLeft(modes, steps)
    begin_s = time.perf_counter()

    def take() -> float:
        nonlocal begin_s
        taken_s, begin_s = time.perf_counter() - begin_s, time.perf_counter()
        return taken_s

    shown = _bars if console.is_terminal else _lines
    with shown(console, modes, steps) as show:

        def note(mode: Mode, step: StepResult) -> None:
            left.note(mode, take())
            show(mode, step, format_left(left.estimate_s()))

        yield note


_Show = Callable[[Mode, StepResult, str], None]


@contextlib.contextmanager
def _lines(console: Console, modes: Sequence[Mode], steps: int) -> Iterator[_Show]:
    numbers = dict.fromkeys(modes, 0)

    def show(mode: Mode, step: StepResult, left: str) -> None:
        numbers[mode] += 1
        place = f"{mode.title}: step {numbers[mode]} of {steps}"
        words = ", ".join(filter(None, [_describe(step), left]))
        console.print(f"{place:<27} {words}", highlight=False, markup=False)

    yield show


@contextlib.contextmanager
def _bars(console: Console, modes: Sequence[Mode], steps: int) -> Iterator[_Show]:
    columns = (
        TextColumn("{task.description:>11}"),
        BarColumn(16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[last]}"),
    )
    with Progress(*columns, console=console) as bars:
        tasks = {mode: bars.add_task(mode.title, total=steps, last="") for mode in modes}
        total = bars.add_task("all", total=steps * len(modes), last="")

        def show(mode: Mode, step: StepResult, left: str) -> None:
            bars.update(tasks[mode], advance=1, last=_describe(step))
            bars.update(total, advance=1, last=left)

        yield show


def _describe(step: StepResult) -> str:
    return f"{step.duration_s:5.2f} s, peak {format_size(step.peak_bytes)}"
