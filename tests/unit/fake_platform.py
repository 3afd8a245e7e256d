"""Train in a Linux process that looks like macOS or Windows to ebbtide. Run by test_platforms.py.

python fake_platform.py win32 DIRECTORY

Libraries are loaded before anything is faked, because theirs were built for Linux. What the other
system does not have is taken away, and what it refuses is refused.

Source: the pages of Python's documentation for `os`, `mmap`, `tempfile` and `ctypes`, which say
where a call exists.
"""

import builtins
import copy
import ctypes
import importlib
import io
import mmap
import os
import pkgutil
import signal
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
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
    madvise = ctypes.CDLL(None).madvise
    _remove(os, *NOT_ON_WINDOWS)
    _remove(signal, "SIGKILL", "SIGHUP")
    for name in ("fcntl", "resource", "termios", "pwd", "grp"):
        sys.modules[name] = None  # type: ignore[assignment]
    _remove(mmap, *(n for n in dir(mmap) if n.startswith(("MADV_", "MAP_", "PROT_"))))
    setattr(mmap, "mmap", WindowsMapping)  # noqa: B010
    setattr(mmap, "ALLOCATIONGRANULARITY", 2**16)  # noqa: B010
    # The system removes the name of such a file when the file is closed; no code has to. Here the
    # file has no name, and there both functions are one.
    setattr(tempfile, "NamedTemporaryFile", tempfile.TemporaryFile)  # noqa: B010
    unlink = os.unlink

    def refuse_if_open(path: Any, **more: Any) -> None:
        if any(os.path.samestat(os.stat(path), os.stat(fd)) for fd in _open_files()):
            raise PermissionError(13, "another process uses the file", str(path))
        unlink(path, **more)

    setattr(os, "unlink", refuse_if_open)  # noqa: B010
    library = ctypes.CDLL

    def load(name: Any, *rest: Any, **more: Any) -> Any:
        if name is None:
            raise TypeError("argument of type 'NoneType' is not iterable")
        return library(name, *rest, **more)

    setattr(ctypes, "CDLL", load)  # noqa: B010

    def virtual_unlock(address: ctypes.c_void_p, size_bytes: ctypes.c_size_t) -> int:
        unlocked.append(size_bytes.value)
        madvise(address, size_bytes, 4)
        return 0  # and GetLastError() is ERROR_NOT_LOCKED

    kernel32 = SimpleNamespace(VirtualUnlock=virtual_unlock)
    setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel32))  # noqa: B010
    _hide_proc()


unlocked: list[int] = []


class WindowsMapping(mmap.mmap):
    """A mapping whose constructor has no flags and no protection."""

    def __new__(
        cls, fileno: int, length: int, tagname: Any = None, access: int = 0, offset: int = 0
    ) -> "WindowsMapping":
        assert tagname is None
        assert offset % 2**16 == 0, "Windows maps from multiples of 64 KiB"
        return super().__new__(cls, fileno, length, access=access, offset=offset)


def _remove(module: Any, *names: str) -> None:
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def _open_files() -> list[int]:
    files = []
    for fd in range(256):
        try:
            os.fstat(fd)
        except OSError:
            continue
        files.append(fd)
    return files


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


def losses_of(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(64, 128, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(directory: Path) -> None:
    """Activations and weights on a CPU: they rest in files."""
    import ebbtide
    from ebbtide.stores import Extent

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4)])
    plain = losses_of(copy.deepcopy(model))
    handle = ebbtide.offload(
        model,
        activations=ebbtide.ActivationPolicy(min_bytes=1024, rebuild=False),
        weights=ebbtide.WeightPolicy(min_bytes=1024),
        store=f"disk:{directory}",
    )
    assert losses_of(model) == plain
    assert handle.stats.offloaded_bytes > 0
    assert handle.inspect().parameters
    store = handle._engine.transfers.store
    slot = store.offload(torch.arange(10**5).view(torch.uint8), ebbtide.devices.device.HostMoment())
    slot.offloaded.synchronize()
    store._file.open.read_ahead(Extent(0, 800_000))
    with open(directory / "other", "wb"):  # a directory that was written to remains usable
        pass


def stage(directory: Path) -> None:
    """A device whose bytes go through page-locked chunks to a file, and one with pinned memory."""
    from ebbtide.devices import SimulatedDevice
    from ebbtide.stores import StagedDiskStore
    from ebbtide.stores.host_memory import map_exactly

    device = SimulatedDevice(0)
    device.pins_host_memory = True
    memory = map_exactly(device, 2**16)
    assert memory is not None
    assert not memory.tensor.any()
    store = StagedDiskStore(device, directory, 2**20, 2**20)
    sources = [torch.full((200_000,), number, dtype=torch.uint8) for number in range(20)]
    slots = []
    for source in sources:
        ready = device.compute_stream().record()
        slots.append(store.offload(source, ready))
    for slot, source in reversed(list(zip(slots, sources, strict=True))):
        buffer, ready = store.reload(slot)
        ready.synchronize()
        assert torch.equal(buffer, source)
    store.close()


def examine(directory: Path) -> None:
    """The doctor, whose report says what the system does not tell."""
    from ebbtide.tools.doctor import advise, build_report
    from ebbtide.tools.examination import QUICK, examine

    effort = QUICK._replace(links_s=0.1, disk_s=0.1, room_bytes=2**26, disk_bytes=2**23)
    found = examine(torch.device("cpu"), directory, effort)
    assert not found.problems, found.problems
    assert found.hardware() is not None
    assert found.facts.group is None
    assert found.facts.memlock_bytes is None
    report = build_report(found, advise(found))
    assert "What ebbtide can do here" in report


def main() -> None:
    name, directory = sys.argv[1], Path(sys.argv[2])
    {"darwin": fake_macos, "win32": fake_windows}[name]()
    print("modules", import_everything())
    train(directory)
    stage(directory)
    examine(directory)
    print("unlocked", len(unlocked))
    print("left over", *sorted(os.listdir(directory)))


if __name__ == "__main__":
    main()
