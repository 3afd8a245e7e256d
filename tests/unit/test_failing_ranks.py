"""A rank that fails, dies or is interrupted: no hang, and nothing is left behind.

`failing_ranks_worker.py` says what each rank does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /dev/shm and /proc"),
]

HERE = Path(__file__).parent
SOON_S = 60.0  # less than a rank would sleep, and than gloo would wait; a case takes seconds
KINDS = ("ddp-tiered", "ddp-host", "ddp-disk", "fsdp2-disk")
FAILURES = ("kill", "forward", "backward")
CASES = [(kind, failure) for kind in KINDS for failure in FAILURES]


def start(directory: Path, *arguments: str, launch: list[str]) -> subprocess.Popen[str]:
    (directory / "files").mkdir()
    (directory / "tmp").mkdir()
    return subprocess.Popen(
        [sys.executable, *launch, str(HERE / "failing_ranks_worker.py"), str(directory),
         *arguments],
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(directory / "tmp")}
        | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )  # fmt: skip


def left_behind(directory: Path, shared: set[Path]) -> list[Path]:
    """Files that are neither torch's own nor semaphores of tests that run at the same time."""
    files = [*(directory / "files").iterdir(), *(directory / "tmp").iterdir()]
    files += [path for path in Path("/dev/shm").iterdir() if path not in shared]
    return [path for path in files if not path.name.startswith(("torch", "sem."))]


def processes_of(group: int) -> list[str]:
    """The processes that are alive in a process group, by their command lines."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, _, of_group = process.joinpath("stat").read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state != "Z":
                found.append(process.joinpath("cmdline").read_text())
        except OSError:  # it has ended meanwhile
            continue
    return found


# ---- under torchrun ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "failure"),
    [("ddp-tiered", "kill"), ("fsdp2-disk", "backward"), ("ddp-host", "interrupt")],
)
def test_a_script_under_torchrun_ends(kind: str, failure: str, tmp_path: Path) -> None:
    shared = set(Path("/dev/shm").iterdir())
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = start(tmp_path, kind, failure, launch=launch)
    try:
        deadline_s = time.monotonic() + SOON_S
        while not (tmp_path / "begun").exists() and run.poll() is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        if failure == "interrupt":
            os.killpg(run.pid, signal.SIGINT)  # as the terminal does: it goes to all processes
        _, errors = run.communicate(timeout=SOON_S)
        assert run.returncode == 1
        assert (tmp_path / "begun").exists(), errors
        expected = {"kill": "SIGKILL", "backward": "rank 1 is ill", "interrupt": "signal: 2"}
        assert expected[failure] in errors
        assert not processes_of(run.pid)
        assert not left_behind(tmp_path, shared)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()


# ---- a program that goes on ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of all cases, which one program runs one after the other."""
    directory = tmp_path_factory.mktemp("failing")
    shared = set(Path("/dev/shm").iterdir())
    run = start(directory, *(f"{kind}:{failure}" for kind, failure in CASES), launch=[])
    _, errors = run.communicate(timeout=SOON_S * 3)
    assert run.returncode == 0, errors
    assert not left_behind(directory, shared)
    return directory


def seen_by(ends: Path, kind: str, failure: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """How the ranks of a case ended, and what those saw that were not killed."""
    directory = ends / f"{kind}-{failure}"
    end = json.loads((directory / "end.json").read_text())
    ranks = range(1 if failure == "kill" else 2)
    return end, [json.loads((directory / f"rank{rank}.json").read_text()) for rank in ranks]


@pytest.mark.parametrize(("kind", "failure"), CASES)
def test_the_ranks_that_are_left_give_all_back_and_go_on(
    kind: str, failure: str, ends: Path
) -> None:
    end, ranks = seen_by(ends, kind, failure)
    assert end["codes"] == [0, -signal.SIGKILL if failure == "kill" else 0]
    assert end["seconds"] < SOON_S
    store = kind.split("-")[1]
    for number, seen in enumerate(ranks):
        # gloo says that the other rank has closed the connection, or reset it.
        assert ("rank 1 is ill" if number == 1 else "by peer") in seen["error"]
        taken_bytes, taken_files = seen["taken"]
        assert (taken_bytes > 0) == (store != "disk")
        assert (taken_files > 0) == (store != "host")
        assert seen["left"] == [0, 0]
        assert seen["trains"]
        assert seen["parameters"]
    assert not list((ends / f"{kind}-{failure}" / "files").iterdir())
