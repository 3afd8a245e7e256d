"""The parent's side of the worker processes: start them, give them turns, notice when one dies."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from types import TracebackType
from typing import Any, TypeVar, final

from ebbtide.demo import worker
from ebbtide.demo.config import DemoConfig, Mode, UsageError

Result = TypeVar("Result")

_GRACE_S = 5.0

# [Note: a fair baseline] On a CPU, two costs would hide those of offloading. Torch takes the memory
# of every large tensor fresh from the kernel, and in pages of 4 KiB that took two thirds of a plain
# step. Threads that spin while they wait for one another become several times slower when another
# program runs. These variables avoid both costs; settings of the user take precedence.
ENVIRONMENT = {"THP_MEM_ALLOC_ENABLE": "1", "OMP_WAIT_POLICY": "passive"}


class WorkerError(Exception):
    """A mode's process failed or died.

    Attributes:
        trace: the traceback of the process, empty if it left none.
    """

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


@final
class Team:
    """One worker process per mode. All live at the same time and work in turns."""

    def __init__(self, config: DemoConfig) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)  # workers inherit the environment
        # A forked child would inherit the parent's memory, and a state of torch in which the
        # parent's threads seem to run but do not exist.
        context = multiprocessing.get_context("spawn")
        self._members = {}
        for mode in config.modes:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=worker.run, args=(theirs, config, mode), name=mode.value, daemon=True
            )
            process.start()
            theirs.close()  # an open copy here would hide that the worker has closed its end
            self._members[mode] = (process, ours)

    def tell(self, mode: Mode, message: Any = None) -> None:
        """Give a mode its turn. If that fails, `hear` raises the error."""
        with contextlib.suppress(OSError):
            self._members[mode][1].send(message)

    def hear(self, mode: Mode, kind: type[Result]) -> Result:
        """Wait for the result of a mode's turn.

        Raises:
            UsageError: the mode cannot do what the user asked for.
            WorkerError: the mode failed, or its process has ended.
        """
        process, connection = self._members[mode]
        try:
            answer = connection.recv()
        except (EOFError, OSError):
            process.join(_GRACE_S)
            raise WorkerError(_obituary(mode, process.exitcode)) from None
        if isinstance(answer, worker.Failure):
            if answer.by_user:
                raise UsageError(answer.message)
            raise WorkerError(f"mode {mode.title} failed: {answer.message}", answer.trace)
        assert isinstance(answer, kind)
        return answer

    def ask(self, mode: Mode, kind: type[Result], message: Any = None) -> Result:
        """Give a mode its turn and wait for the result."""
        self.tell(mode, message)
        return self.hear(mode, kind)

    def pid(self, mode: Mode) -> int | None:
        return self._members[mode][0].pid

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process, connection in self._members.values():
            connection.close()  # ends a worker that waits for its turn
            if error is not None:
                process.kill()
        for process, _ in self._members.values():
            process.join(_GRACE_S)
            if process.exitcode is None:
                process.kill()


def _obituary(mode: Mode, exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        try:
            name = signal.Signals(-exitcode).name
        except ValueError:
            name = f"signal {-exitcode}"
        hint = ""
        if name == "SIGKILL":
            hint = "; if memory ran out, try a smaller --batch-size or --resolution"
        return f"the process of mode {mode.title} was ended by {name}{hint}"
    return f"the process of mode {mode.title} ended with exit code {exitcode} and no result"
