"""The first example of each page that a newcomer sees saves memory, and prints how much."""

import ast
import functools
import re
import subprocess
import sys

import pytest

from test_docs import BLOCK, ROOT

FIRST_PAGES = [
    "README.md",
    "docs/index.md",
    pytest.param("docs/quickstart.md", marks=pytest.mark.slow),  # the same model, plainly as well
]


@functools.cache
def output_of(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", FIRST_PAGES)
def test_the_first_example_prints_a_ratio_below_0_6(page: str) -> None:
    example = BLOCK.findall((ROOT / page).read_text())[0]
    # Two pages have the same example but for its comments, and so one run.
    printed = output_of(ast.unparse(ast.parse(example)))
    before, now, ratio = re.findall(r"(\d+) MiB before, (\d+) MiB now: (\S+)", printed)[0]
    assert int(now) / int(before) == pytest.approx(float(ratio), abs=0.01)
    assert float(ratio) < 0.6
