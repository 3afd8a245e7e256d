"""What SciPy's solver prints past Python."""

from __future__ import annotations

import ctypes
import sys

import pytest

from ebbtide.planning.relaxation import without_stray_lines

STRAY = b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it needs the C library of Linux")


@pytest.fixture
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def test_the_solver_s_line_is_dropped_and_others_are_not(
    libc: ctypes.CDLL, capfd: pytest.CaptureFixture[str]
) -> None:
    libc.puts(b"before")
    for number in range(2):
        with without_stray_lines():
            libc.puts(b"a first line")
            libc.puts(STRAY)
            libc.puts(STRAY)
            print("from Python", number)
            libc.puts(b"a last line, longer than the first one" if number == 0 else b"short")
    libc.puts(b"after")
    libc.fflush(None)
    lines = [each for each in capfd.readouterr().out.splitlines() if "Python" not in each]
    longer = "a last line, longer than the first one"
    assert lines == ["before", "a first line", longer, "a first line", "short", "after"]


def test_an_error_puts_standard_output_back(
    libc: ctypes.CDLL, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        with without_stray_lines():
            libc.puts(b"inside")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    libc.puts(b"outside")
    libc.fflush(None)
    assert capfd.readouterr().out == "inside\noutside\n"
