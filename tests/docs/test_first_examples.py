"""The first example of each page that a newcomer sees saves memory, and prints how much."""

import re
import subprocess
import sys

import pytest

from test_docs import BLOCK, ROOT

FIRST_PAGES = ["README.md", "docs/index.md", "docs/quickstart.md"]


@pytest.mark.parametrize("page", FIRST_PAGES)
def test_the_first_example_prints_a_ratio_below_0_6(page: str) -> None:
    example = BLOCK.findall((ROOT / page).read_text())[0]
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    before, now, ratio = re.findall(r"(\d+) MiB before, (\d+) MiB now: (\S+)", done.stdout)[0]
    assert int(now) / int(before) == pytest.approx(float(ratio), abs=0.01)
    assert float(ratio) < 0.6
