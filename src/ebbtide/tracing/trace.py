"""The trace of one step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from os import PathLike
from typing import final

from ebbtide.errors import PolicyError
from ebbtide.interface.display import brief, count
from ebbtide.tracing.chrome import chrome_document, write_chrome
from ebbtide.tracing.events import LANES, TraceEvent
from ebbtide.tracing.memory_plot import write_memory_plot
from ebbtide.tracing.plot import write_plot
from ebbtide.tracing.step_memory import StepMemory
from ebbtide.tracing.timeline import render_timeline
from ebbtide.tracing.trace_card import trace_card


@final
class Trace:
    """The events of one step, in the order in which they began.

    Printing a trace shows how busy each lane was. `timeline` and `plot` show when each lane did
    what, and `save` writes a file for Perfetto.

    Attributes:
        events: the events.
        memory: what memory held in each phase of the step; None where it was not recorded.
    """

    def __init__(self, events: Iterable[TraceEvent] = (), memory: StepMemory | None = None) -> None:
        self.events = tuple(sorted(events, key=lambda event: (event.begin_s, event.end_s)))
        self.memory = memory

    @property
    def duration_s(self) -> float:
        """Seconds from the begin of the first event to the latest end; 0 for an empty trace."""
        if not self.events:
            return 0.0
        return max(event.end_s for event in self.events) - self.events[0].begin_s

    def save(self, path: str | PathLike[str]) -> None:
        """Write the trace as Chrome trace-event JSON, which https://ui.perfetto.dev opens.

        Where memory was recorded, the file has it as a counter with a series for each owner.

        Args:
            path: path of the file, such as ``"trace.json"``.

        Raises:
            OSError: the file cannot be written.

        Source: Trace Event Format, Google.
        """
        write_chrome(path, chrome_document(self.events, LANES, self.memory))

    def timeline(self, width: int = 80) -> str:
        """Draw the lanes over time in plain text.

        A column shows what fills most of its time: passes as ``F3>>>`` and ``B3<<<``, copies and
        waits with the layer's number, and signs alone where there is no room for a label. The last
        lines explain the signs.

        Args:
            width: largest number of columns in a line, 40 or more.

        Returns:
            Lines of ASCII, without a newline at the end. The time axis is in s, ms or us.

        Raises:
            PolicyError: ``width`` is less than 40.
        """
        return render_timeline(self.events, LANES, width)

    def plot(self, path: str | PathLike[str], *, show: str = "lanes") -> None:
        """Draw the lanes, or memory, over time as a picture, 12 inches wide.

        Args:
            path: path of the file, such as ``"step.png"``; ``.svg`` and ``.pdf`` work too.
            show: ``"lanes"`` for what each lane did when, ``"memory"`` for what memory held.

        Raises:
            PolicyError: the path has another suffix, ``show`` is neither, or the trace has no
                memory.
            ImportError: matplotlib is not installed; ``pip install "ebbtide[plots]"`` installs it.
            OSError: the file cannot be written.
        """
        if show not in ("lanes", "memory"):
            raise PolicyError(f'show must be "lanes" or "memory", got {show!r}')
        if show == "lanes":
            write_plot(path, self.events, LANES)
        elif self.memory is None:
            raise PolicyError(
                "the trace has no memory to draw, because it was not recorded; offload the model "
                'with trace=True and run a step, or draw the lanes: show="lanes"'
            )
        else:
            write_memory_plot(path, self.memory)

    def __repr__(self) -> str:
        return brief("Trace", [count(len(self.events), "event"), f"{self.duration_s:.4f} s"])

    def _repr_html_(self) -> str:
        return trace_card(self.events, LANES, str(self))

    def __str__(self) -> str:
        if not self.events:
            return "an empty trace"
        groups: dict[tuple[str, str], list[TraceEvent]] = defaultdict(list)
        for event in self.events:
            copies = event.what in ("offload", "reload")
            groups[event.lane, (copies and event.kind) or event.what].append(event)
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
