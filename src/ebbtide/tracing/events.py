"""One event type for every executor, and the trace of one step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from typing import final

from ebbtide.tracing.chrome import write_chrome
from ebbtide.tracing.plot import write_plot
from ebbtide.tracing.timeline import render_timeline

LANES = ("compute", "d2h", "h2d", "disk", "cpu_optimizer")


@final
@dataclass(frozen=True)
class TraceEvent:
    """Something that one lane did for one layer.

    Attributes:
        what: ``"forward"``, ``"backward"``, ``"offload"``, ``"release"``, ``"reload"``, ``"wait"``
            or ``"rebuild"``.
        lane: what did it: ``"compute"``, ``"d2h"``, ``"h2d"``, ``"disk"`` or ``"cpu_optimizer"``.
        begin_s: seconds since the step began.
        end_s: the same; a release takes no time.
        layer: number of the layer in forward order, None for what belongs to no layer.
        microbatch: which of the step's forwards it belongs to, from 0.
        name: of the layer's module, if it has one.
        size_bytes: moved, released or waited for.
    """

    what: str
    lane: str
    begin_s: float
    end_s: float
    layer: int | None = None
    microbatch: int = 0
    name: str = ""
    size_bytes: int = 0

    @property
    def duration_s(self) -> float:
        """Seconds from begin to end."""
        return self.end_s - self.begin_s

    @property
    def label(self) -> str:
        """``F3`` or ``B3`` for a pass, ``offload 3`` and so on for the rest."""
        if self.what in ("forward", "backward"):
            text = f"{self.what[0].upper()}{self.layer}"
        else:
            text = self.what if self.layer is None else f"{self.what} {self.layer}"
        return f"{text}.m{self.microbatch}" if self.microbatch else text


@final
class Trace:
    """The events of one step, in the order in which they began.

    `print` shows how busy each lane was, `timeline` and `plot` when it did what. `save` writes a
    file for Perfetto.
    """

    def __init__(self, events: Iterable[TraceEvent] = ()) -> None:
        self.events = tuple(sorted(events, key=lambda event: (event.begin_s, event.end_s)))

    @property
    def duration_s(self) -> float:
        """From the first event's begin to the last one's end; 0 for an empty trace."""
        if not self.events:
            return 0.0
        return max(event.end_s for event in self.events) - self.events[0].begin_s

    def save(self, path: str | PathLike[str]) -> None:
        """Write the trace as Chrome trace-event JSON: open it at https://ui.perfetto.dev.

        Args:
            path: of the file, such as ``"trace.json"``.

        Raises:
            OSError: the file cannot be written.

        Source: Trace Event Format, Google.
        """
        write_chrome(path, self.events, LANES)

    def timeline(self, width: int = 80) -> str:
        """Draw lanes by time in plain text.

        A column shows what fills most of its time: passes as ``F3>>>`` and ``B3<<<``, copies and
        waits with the layer's number, signs alone where that has no room. The last lines say what
        the signs mean.

        Args:
            width: columns that no line exceeds, 40 or more.

        Returns:
            Lines of ASCII, without a newline at the end. The axis is in s, ms or us.

        Raises:
            PolicyError: ``width`` is less than 40.
        """
        return render_timeline(self.events, LANES, width)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw lanes by time as a picture, 12 inches wide.

        Args:
            path: of the file, such as ``"step.png"``; ``.svg`` and ``.pdf`` can be written too.

        Raises:
            PolicyError: the path ends in something else.
            ImportError: matplotlib is missing; ``pip install "ebbtide[plots]"``.
            OSError: the file cannot be written.
        """
        write_plot(path, self.events, LANES)

    def __str__(self) -> str:
        if not self.events:
            return "an empty trace"
        groups: dict[tuple[str, str], list[TraceEvent]] = defaultdict(list)
        for event in self.events:
            groups[event.lane, event.what].append(event)
        lines = [f"{'lane':<14} {'what':<9} {'events':>7} {'MiB':>10} {'busy s':>9} {'share':>6}"]
        whole_s = self.duration_s or 1.0
        for lane, what in sorted(groups, key=lambda key: (LANES.index(key[0]), key[1])):
            events = groups[lane, what]
            size_mib = sum(event.size_bytes for event in events) / 2**20
            busy_s = sum(event.duration_s for event in events)
            lines.append(
                f"{lane:<14} {what:<9} {len(events):>7,} {size_mib:>10,.1f} {busy_s:>9.4f} "
                f"{busy_s / whole_s:>6.0%}"
            )
        return "\n".join(lines)
