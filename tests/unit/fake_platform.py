"""Import ebbtide in a Linux process that looks like macOS or Windows. Run by test_platforms.py.

python fake_platform.py win32 DIRECTORY

Libraries are loaded before anything is faked, because theirs were built for Linux. What the other
system does not have is taken away, and what it refuses is refused.

Source: the pages of Python's documentation for `os`, `mmap`, `tempfile` and `ctypes`, which say
where a call exists.
"""

import builtins
import ctypes
import importlib
import io
import mmap
import os
import pkgutil
import signal
import sys
from pathlib import Path
from typing import Any

import psutil  # noqa: F401
import rich.live  # noqa: F401
import scipy.fft  # noqa: F401
import torch
import torch.distributed.pipelining
import typer  # noqa: F401
from torch import nn

torch.optim.AdamW([torch.zeros(1)], foreach=False)  # this imports the rest of torch

OPTIONAL = {
    "matplotlib",
    "neuralop",
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "transformers",
}
NOT_ON_MACOS = ("posix_fallocate", "posix_fadvise", "POSIX_FADV_WILLNEED", "sched_getaffinity")
NOT_ON_WINDOWS = (
    *NOT_ON_MACOS,
    *("pread", "preadv", "pwrite", "pwritev", "fork", "register_at_fork", "killpg", "setsid"),
)


def fake_macos() -> None:
    sys.platform = "darwin"
    _remove(os, *NOT_ON_MACOS)
    _remove(mmap, *(name for name in dir(mmap) if name.startswith("MADV_")))
    _hide_proc()


def fake_windows() -> None:
    sys.platform = "win32"
    _remove(os, *NOT_ON_WINDOWS)
    _remove(signal, "SIGKILL", "SIGHUP")
    for name in ("fcntl", "resource", "termios", "pwd", "grp"):
        sys.modules[name] = None  # type: ignore[assignment]
    _remove(mmap, *(n for n in dir(mmap) if n.startswith(("MADV_", "MAP_", "PROT_"))))
    library = ctypes.CDLL

    def load(name: Any, *rest: Any, **more: Any) -> Any:
        if name is None:
            raise TypeError("argument of type 'NoneType' is not iterable")
        return library(name, *rest, **more)

    setattr(ctypes, "CDLL", load)  # noqa: B010
    _hide_proc()


def _remove(module: Any, *names: str) -> None:
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def _hide_proc() -> None:
    """Let no code but psutil's, which was built for Linux, read `/proc` and `/sys`."""
    plain = io.open

    def refuse(file: Any, *rest: Any, **more: Any) -> Any:
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if str(file).startswith(("/proc", "/sys")) and not caller.startswith("psutil"):
            raise FileNotFoundError(2, "No such file or directory", str(file))
        return plain(file, *rest, **more)

    setattr(io, "open", refuse)  # noqa: B010
    setattr(builtins, "open", refuse)  # noqa: B010


def import_everything() -> int:
    import ebbtide

    count = 0
    for module in pkgutil.walk_packages(ebbtide.__path__, "ebbtide."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            # A framework that is there may need what the faked system lacks, such as `msvcrt`.
            foreign = module.name.startswith("ebbtide.interop.")
            if str(error.name).partition(".")[0] not in OPTIONAL and not foreign:
                raise
        count += 1
    return count


def refuse(name: str) -> None:
    """An offload says that the system is not Linux, and leaves the model as it is."""
    import ebbtide

    model = nn.Linear(4, 4)
    said = []
    for offload in (ebbtide.offload, lambda m: ebbtide.wrap_forward_with_offload(m.forward)):
        try:
            offload(model)
        except ebbtide.PolicyError as error:
            said.append(str(error))
    assert len(said) == 2
    assert all(name in each for each in said)
    assert "forward" not in vars(model)


def examine(name: str, directory: Path) -> None:
    """The doctor, whose report says what cannot be measured here."""
    from ebbtide.tools.doctor import advise, build_report, examine

    found = examine(torch.device("cpu"), directory, 0.1)
    assert any(name in problem for problem in found.problems.values()), found.problems
    assert not found.facts.limited_by_group
    assert found.facts.memlock_bytes is None
    report = build_report(found, list(advise(found)))
    assert "What ebbtide can do here" in report


def main() -> None:
    name, directory = sys.argv[1], Path(sys.argv[2])
    {"darwin": fake_macos, "win32": fake_windows}[name]()
    print("modules", import_everything())
    refuse(name)
    examine(name, directory)


if __name__ == "__main__":
    main()
