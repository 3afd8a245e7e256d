"""Every Python block of the README and the docs runs as it stands, in an empty directory."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from snippet_summary import ENDED, LEFT_EARLY, OUTCOME, ROOT, TEST, pages, summarize, summarize_run

pytestmark = pytest.mark.slow

BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
NOT_RUN = re.compile(r"^<!-- not run: \S.* -->\n```py\n", re.MULTILINE)
THE_END = "this example has run to its end"


def find_blocks() -> list[tuple[str, str]]:
    return [
        (f"{page.relative_to(ROOT)}:{number}", block)
        for page in pages()
        for number, block in enumerate(BLOCK.findall(page.read_text()))
    ]


@pytest.mark.parametrize(("name", "block"), find_blocks(), ids=[name for name, _ in find_blocks()])
def test_example_runs(
    name: str, block: str, tmp_path: Path, record_property: Callable[[str, str], None]
) -> None:
    if "neuralop" in block or "darcy" in block:
        pytest.importorskip("neuralop", reason=f"{name} needs neuraloperator")
    program = f"{block}\nprint({THE_END!r})"
    result = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 0, f"{name}\n{result.stderr}"
    shown, ending, _ = result.stdout.partition(f"{THE_END}\n")
    record_property(OUTCOME, ENDED if ending else LEFT_EARLY)
    assert shown or not ending, f"{name} prints nothing"


def test_there_are_examples() -> None:
    assert len(find_blocks()) > 4


def test_code_that_is_not_run_says_why() -> None:
    """Other projects' code is fenced as ``py``, and a comment before it says what it would need."""
    for page in pages():
        text = page.read_text()
        assert len(re.findall(r"^```py\n", text, re.MULTILINE)) == len(NOT_RUN.findall(text)), page


def test_the_summary_tells_how_many_examples_ran() -> None:
    outcomes = [ENDED, ENDED, LEFT_EARLY, "failed"]
    assert summarize(outcomes, Counter(python=4, py=2)) == (
        "docs: 4 Python examples, of which 2 ran to their end, 1 ended early for want of a "
        "framework, 1 failed; 2 blocks of other projects' code are not run"
    )


def test_the_summary_counts_the_reports_of_examples() -> None:
    def report(nodeid: str, when: str = "call", **properties: str) -> SimpleNamespace:
        return SimpleNamespace(nodeid=nodeid, when=when, user_properties=list(properties.items()))

    passed = [
        report(f"{TEST}a]", example=ENDED),
        report(f"{TEST}b]", example=LEFT_EARLY),
        report(f"{TEST}a]", when="teardown"),
        report("tests/docs/test_links.py::test_x"),
    ]
    skipped = [report(f"{TEST}c]", when="setup")]
    line = summarize_run({"passed": passed, "skipped": skipped, "error": []})
    assert "1 ran to their end, 1 ended early for want of a framework, 1 skipped;" in line
