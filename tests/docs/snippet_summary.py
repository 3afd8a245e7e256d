"""Counts the examples of the README and the docs, and how many of them ran."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)\n", re.MULTILINE)
TEST = "tests/docs/test_docs.py::test_example_runs["
OUTCOME = "example"  # the property of a test's report that says how far its example came
ENDED, LEFT_EARLY = "ran to its end", "ended early"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def count_shown() -> Counter[str]:
    """Count the blocks of the pages by the language that follows their fence."""
    return Counter(word for page in pages() for word in FENCE.findall(page.read_text()))


def summarize(outcomes: Iterable[str], shown: Counter[str]) -> str:
    """Return the line of the summary.

    Args:
        outcomes: for each example whose test came to an end: ENDED, LEFT_EARLY, "failed" or
            "skipped".
        shown: the number of blocks by language.
    """
    counts = Counter(outcomes)
    words = [f"{counts[ENDED]} ran to their end"]
    if counts[LEFT_EARLY]:
        words.append(f"{counts[LEFT_EARLY]} ended early for want of a framework")
    words += [f"{counts[each]} {each}" for each in ("skipped", "failed") if counts[each]]
    return (
        f"docs: {shown['python']} Python examples, of which {', '.join(words)}; "
        f"{shown['py']} blocks of other projects' code are not run"
    )


def summarize_run(reports: Mapping[str, list[Any]]) -> str:
    """Return the line of the summary for pytest's reports by status."""
    outcomes = []
    for status in ("passed", "failed", "skipped"):
        for report in reports.get(status, []):
            if report.nodeid.startswith(TEST) and (report.when == "call" or status == "skipped"):
                properties = dict(report.user_properties)
                outcomes.append(properties.get(OUTCOME, status) if status == "passed" else status)
    return summarize(outcomes, count_shown())
