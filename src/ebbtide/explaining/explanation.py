"""What a step's memory consists of, in words."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from ebbtide.explaining.causes import FIRST, LAST, PARTS
from ebbtide.explaining.evidence import Evidence, find_limit
from ebbtide.interface.notebook import card, facts, folded, note
from ebbtide.tracing.finding import Finding
from ebbtide.tracing.step_memory import StepMemory
from ebbtide.units import format_size

_WIDTH = 80
_NEAR = 1.15  # a peak below this many times the limit is as low as offloading can make it


@final
@dataclass(frozen=True)
class Explanation:
    """Why memory is as high as it is; it prints as text of 80 columns.

    Attributes:
        verdict: the answer in a sentence or two.
        findings: what was found, the most important first; empty if there is nothing to change.
        memory: what memory held, by owner; None if the step was not recorded (``trace=True``).
        limit_bytes: the smallest peak that moving activations could reach; None if the step was not
            recorded.
        limit_why: why it cannot be lower.
    """

    verdict: str
    findings: tuple[Finding, ...]
    memory: StepMemory | None
    limit_bytes: int | None
    limit_why: str

    def _repr_html_(self) -> str:
        parts = [note(self.verdict)]
        for number, finding in enumerate(self.findings, 1):
            told = {"Evidence": finding.evidence, "Change": finding.setting}
            parts += [note(f"{number}. {finding.sentence}"), facts(told)]
        if self.memory is not None:
            parts.append(folded("What memory held at the peak", self.memory._repr_html_()))
        return card("Why the peak is where it is", *parts, note(self.limit_why))

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield from textwrap.wrap(self.verdict, _WIDTH)
        for number, finding in enumerate(self.findings, 1):
            yield ""
            yield from textwrap.wrap(
                f"{number}. {finding.sentence}", _WIDTH, subsequent_indent="   "
            )
            for what, text in (("Evidence", finding.evidence), ("Change", finding.setting)):
                if text:
                    yield from textwrap.wrap(
                        f"{what}: {text}.",
                        _WIDTH,
                        initial_indent="   ",
                        subsequent_indent="      ",
                        break_on_hyphens=False,
                    )
        if self.memory is not None:
            yield ""
            first, *rows = str(self.memory).splitlines()
            yield from textwrap.wrap(f"{first[0].upper()}{first[1:]}:", _WIDTH)
            yield from rows
        if self.limit_why:
            yield ""
            yield from textwrap.wrap(self.limit_why, _WIDTH)


def explain(evidence: Evidence) -> Explanation:
    """Explain a step.

    Args:
        evidence: what is known of it.
    """
    first = [finding for cause in FIRST for finding in cause(evidence)]
    parts = [finding for cause in PARTS for finding in cause(evidence)]
    parts.sort(key=lambda finding: -finding.size_bytes)
    last = [finding for cause in LAST for finding in cause(evidence)]
    if not evidence.num_steps:
        parts = last = []
    findings = (*first, *(last if evidence.plan_keeps_all else []), *parts)
    if not evidence.plan_keeps_all:
        findings += tuple(last)
    limit = find_limit(evidence)
    return Explanation(
        verdict=_verdict(evidence, findings, limit),
        findings=findings,
        memory=evidence.memory,
        limit_bytes=None if limit is None else limit[0],
        limit_why="" if limit is None else _why(evidence, *limit),
    )


def _verdict(
    evidence: Evidence, findings: tuple[Finding, ...], limit: tuple[int, str] | None
) -> str:
    if not evidence.num_steps:
        return findings[0].sentence
    stats = evidence.stats
    moved = {
        "offloaded": stats.offloaded_bytes,
        "rebuilt": stats.rebuilt_bytes + stats.packed_bytes,
        "recomputed": stats.recomputed_bytes,
    }
    done = ", ".join(f"{format_size(size)} {what}" for what, size in moved.items() if size)
    saved = f"Of {format_size(stats.unique_bytes)} of activations, {done or 'nothing'} left memory."
    if not done:
        saved = f"None of {format_size(stats.unique_bytes)} of activations left memory."
    if evidence.memory is None:
        return f"{saved} Record a step with trace=True to see what the peak consists of."
    peak = evidence.memory
    where = f"The peak is {format_size(peak.peak_bytes)}, in {peak.peak_phase}."
    if not findings and limit is not None and peak.peak_bytes <= _NEAR * limit[0]:
        return f"{where} {saved} It is as low as offloading can make it."
    return f"{where} {saved}"


def _why(evidence: Evidence, limit_bytes: int, phase: str) -> str:
    assert evidence.memory is not None
    above = evidence.memory.peak_bytes - limit_bytes
    return (
        f"No offloader of activations can get below {format_size(limit_bytes)}: that much is in "
        f"memory in {phase} without any activation that could be elsewhere. This step is "
        f"{format_size(max(0, above))} above it."
    )
