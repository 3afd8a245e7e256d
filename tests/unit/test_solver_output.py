"""What SciPy's solver prints past Python."""

from __future__ import annotations

import ctypes
import sys
import threading

import pytest

from ebbtide.planning import relaxation as solver
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


def test_what_python_prints_appears_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with without_stray_lines():
        print("at once", flush=True)
        assert capfd.readouterr().out == "at once\n"


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


def test_several_threads_search_at_once(
    libc: ctypes.CDLL, capfd: pytest.CaptureFixture[str]
) -> None:
    def search() -> None:
        for _ in range(50):
            with without_stray_lines():
                libc.puts(STRAY)
                libc.puts(b"kept")

    threads = [threading.Thread(target=search) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    libc.fflush(None)
    assert capfd.readouterr().out == "kept\n" * 200


def test_the_solver_is_called_there(
    monkeypatch: pytest.MonkeyPatch, libc: ctypes.CDLL, capfd: pytest.CaptureFixture[str]
) -> None:
    import scipy.optimize

    milp = scipy.optimize.milp

    def printing(*args, **options):
        libc.puts(STRAY)
        return milp(*args, **options)

    monkeypatch.setattr(scipy.optimize, "milp", printing)
    # Twice x is at least 1, and x is whole.
    assert solver.minimize([1.0], [1.0], [{0: -2.0, solver.ONE: 1.0}], [0]) == (1.0, [1.0])
    libc.fflush(None)
    assert capfd.readouterr().out == ""
