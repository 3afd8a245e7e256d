"""Every Python block of the README and the docs runs as it stands, in an empty directory."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def find_blocks() -> list[tuple[str, str]]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        (f"{page.relative_to(ROOT)}:{number}", block)
        for page in pages
        for number, block in enumerate(BLOCK.findall(page.read_text()))
    ]


@pytest.mark.parametrize(("name", "block"), find_blocks(), ids=[name for name, _ in find_blocks()])
def test_example_runs(name: str, block: str, tmp_path: Path) -> None:
    if "neuralop" in block or "darcy" in block:
        pytest.importorskip("neuralop", reason=f"{name} needs neuraloperator")
    result = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", block],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 0, f"{name}\n{result.stderr}"


def test_there_are_examples() -> None:
    assert len(find_blocks()) > 4
