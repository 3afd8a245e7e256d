"""A test process that dies ends the whole run as a failure, whatever the others are doing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
LONG_S = 300
LONGEST_S = 60  # for the run to start, and to end the other process

DIES = {
    "in a test": "import os\ndef test_dies():\n    os.abort()\n",
    "in the other thread": """
import os, threading
def test_dies():
    threading.Timer(0.2, os.abort).start()
    threading.Event().wait(300)
""",
}


def _flags() -> list[str]:
    """Those of `make test` for several processes."""
    makefile = (TESTS.parent / "Makefile").read_text()
    (flags,) = re.findall(r"^IN_PARALLEL = (.*)$", makefile, re.MULTILINE)
    return flags.replace("$(TEST_PROCESSES)", "2").split()


@pytest.mark.parametrize("dies", DIES.values(), ids=DIES)
def test_the_run_ends_when_a_process_dies(dies: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_dies.py").write_text(dies)
    late = f"import threading\ndef test_late():\n    threading.Event().wait({LONG_S})\n"
    (tmp_path / "test_late.py").write_text(late)
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", *_flags(), "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
        cwd=tmp_path,
    )
    assert finished.returncode == 1, finished.stdout
    assert "FAILED test_dies.py::test_dies" in finished.stdout
    assert re.search(r"the test process gw\d has died", finished.stdout)
