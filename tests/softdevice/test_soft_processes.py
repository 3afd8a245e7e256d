"""Ends of processes, forked children, and the build: each in a process of its own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from softdevice import library

HERE = Path(__file__).parent
TIMEOUT_S = 60
HOUR = 3600 * 10**6 * library.CYCLES_PER_US
"""Cycles that a stream sleeps."""

QUEUE_MUCH = """
    device = torch.device("softdevice", 0)
    side = torch.Stream(device=device)
    x = torch.ones(64, 64, device=device)
    for _ in range(200):
        x = x @ x
        with side:
            softdevice.sleep(20_000_000)
            y = x + 1
"""


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that has the device."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])} | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def _code(order: str, body: str) -> str:
    head = f"import os, sys, torch, softdevice\nsoftdevice.load({order!r})\n"
    return head + textwrap.dedent(body)


@pytest.mark.parametrize("order", ["threads", "compute-first", "random:1"])
def test_a_process_ends_with_work_queued(order: str) -> None:
    finished = _run(_code(order, textwrap.dedent(QUEUE_MUCH) + "print('end')"))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "end\n"


@pytest.mark.parametrize("order", ["threads", "compute-first", "random:1"])
def test_a_forked_child_ends_and_is_told(order: str) -> None:
    """It may drop the tensors that it has inherited, and leave; all else is refused."""
    body = (
        textwrap.dedent(QUEUE_MUCH)
        + """
child = os.fork()
if child == 0:
    try:
        x + 1
    except RuntimeError as error:
        print(error, flush=True)
    assert not torch.accelerator.is_available() or torch.get_device_module()._is_in_bad_fork()
    del x, y
    sys.exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7
print("parent", torch.ones(3, device=device).sum().item())
"""
    )
    finished = _run(_code(order, body))
    assert finished.returncode == 0, finished.stderr
    assert "This process was forked" in finished.stdout
    assert finished.stdout.endswith("parent 3.0\n")


CHANGE_ORDERS = """
    import threading

    device = torch.device("softdevice", 0)
    changing, wrong = True, []

    def compute():
        stream = torch.Stream(device=device)
        torch.accelerator.set_stream(stream)
        x, count = torch.zeros(1 << 16, device=device), 0
        while changing:
            for _ in range(5):
                x, count = x + 1, count + 1
            event = stream.record_event()
            torch.accelerator.current_stream().wait_event(event)
            (stream if count % 2 else event).synchronize()
            if x[0].item() != count:
                wrong.append((x[0].item(), count))
                return

    threads = [threading.Thread(target=compute) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(50):
        for order in ("threads", "compute-first", "copies-first", f"random:{number}"):
            softdevice.sleep(4_000_000)  # what it waits for; the threads go on meanwhile
            softdevice.choose_order(order)
    changing = False
    for thread in threads:
        thread.join()
    print(f"wrong: {wrong}")
"""


def test_threads_go_on_while_the_order_changes() -> None:
    """A thread that an earlier test left behind may queue and wait while the next one begins."""
    finished = _run(_code("random:1", CHANGE_ORDERS))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "wrong: []\n"


def test_importing_the_package_does_not_load_the_device() -> None:
    finished = _run(
        "import torch, softdevice; print(softdevice.is_loaded(), hasattr(torch, 'softdevice'))"
    )
    assert finished.stdout == "False False\n", finished.stderr


def test_no_compiler_is_said_clearly() -> None:
    finished = _run("import softdevice; softdevice.load()", CXX="no-such-compiler")
    assert finished.returncode == 1
    assert "no compiler 'no-such-compiler' on PATH: install g++" in finished.stderr


def test_a_failing_test_says_its_order(tmp_path: Path) -> None:
    (tmp_path / "test_fails.py").write_text("def test_fails():\n    assert False\n")
    arguments = ["-p", "softdevice.plugin", "--order", "random:17", str(tmp_path)]
    finished = _run(f"import pytest, sys; sys.exit(pytest.main({arguments}))")
    assert finished.returncode == 1, finished.stderr
    assert "order of execution: --order random:17" in finished.stdout


def test_a_test_that_waits_for_the_device_too_long_is_ended(tmp_path: Path) -> None:
    (tmp_path / "test_waits.py").write_text(
        "import torch, softdevice\n"
        "def test_waits():\n"
        f"    softdevice.sleep({HOUR})\n"
        "    torch.accelerator.synchronize()\n"
    )
    arguments = ["-p", "softdevice.plugin", "--timeout", "1", str(tmp_path)]
    finished = _run(f"import pytest, sys; sys.exit(pytest.main({arguments}))")
    assert finished.returncode == 1, finished.stderr
    assert "Timeout" in finished.stdout + finished.stderr
    assert "in test_waits" in finished.stdout + finished.stderr
