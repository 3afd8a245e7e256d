"""macOS and Windows, as far as they can be faked on Linux."""

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import gpu, record, trial
from torch import nn

import ebbtide
from ebbtide import PolicyError, StoreFullError
from ebbtide.policy import ActivationPolicy
from ebbtide.runtime.engine import Engine
from ebbtide.stores import Extent, measured_memory
from ebbtide.stores.disk_file import DiskFile, OpenFile

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fakes other systems on Linux")


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_everything_imports_and_trains(platform: str, tmp_path: Path) -> None:
    paths = [str(Path(ebbtide.__file__).parents[1]), str(HERE.parent / "simulation")]
    done = subprocess.run(
        [sys.executable, HERE / "fake_platform.py", platform, tmp_path],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert "left over other\n" in done.stdout  # what another program wrote; none of our files
    pages_left = int(done.stdout.partition("unlocked ")[2].split()[0])
    assert (pages_left > 0) == (platform == "win32")  # weights' pages leave RAM there, too


# ---- files ---------------------------------------------------------------------------------------


def test_space_is_reserved_by_zeros(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    file = OpenFile(tmp_path)
    file.reserve(Extent(8192, 3 * 2**20 + 5))
    status = os.fstat(file.fd)
    assert status.st_size == 8192 + 3 * 2**20 + 5
    assert status.st_blocks * 512 >= 3 * 2**20  # on the disk, too, and not only in the size


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_reservation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    file = OpenFile(tmp_path)
    file.reserve(Extent(0, 2**20))
    assert os.fstat(file.fd).st_blocks * 512 >= 2**20


def test_a_full_disk_without_reservation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Zeros are written until there is no room; what they took is given back."""
    write = os.pwrite

    def full_at_2_mib(fd: int, view: memoryview, offset: int) -> int:
        if offset >= 2**21:
            raise OSError(errno.ENOSPC, "full")
        return write(fd, view, offset)

    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr(os, "pwrite", full_at_2_mib)
    file = DiskFile(tmp_path, growth_bytes=2**24)
    file.allocate(2**20)
    with pytest.raises(StoreFullError, match="no room for"):
        file.allocate(2**22)
    assert os.fstat(file.open.fd).st_size == file.capacity_bytes == 2**20


def test_reads_and_writes_at_an_offset_without_the_calls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("pwrite", "preadv", "posix_fadvise"):
        monkeypatch.delattr(os, name)
    file = OpenFile(tmp_path)
    file.write(memoryview(bytes(range(256)) * 16), 1000)
    found = bytearray(300)
    file.read(memoryview(found), 1000 + 256)
    assert found == (bytes(range(256)) * 2)[:300]
    file.read_ahead(Extent(0, 10**6))  # beyond the end, too
    with pytest.raises(OSError, match="ended early"):
        file.read(memoryview(found), 1000 + 16 * 256)


def test_no_call_moves_2_gib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """MacOS refuses such a call (EINVAL), where Linux moves a part."""
    sizes = []

    def pwrite(_: int, view: memoryview, offset: int) -> int:  # noqa: ARG001
        sizes.append(len(view))
        return len(view)

    def preadv(_: int, views: list[memoryview], offset: int) -> int:
        return pwrite(0, views[0], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "preadv", preadv)
    memory = torch.empty(2**31, dtype=torch.uint8).numpy().data  # never touched, so not in RAM
    file = OpenFile(tmp_path)
    file.write(memory, 0)
    file.read(memory, 0)
    assert sizes == [2**30] * 4


def test_windows_removes_the_file_when_it_is_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", tempfile.NamedTemporaryFile)  # as it is there
    file = OpenFile(tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("ebbtide-")
    monkeypatch.undo()
    del file
    assert not list(tmp_path.iterdir())


# ---- devices -------------------------------------------------------------------------------------


def test_a_device_with_one_stream_is_refused() -> None:
    """Apple's GPU. There is no such device here, so the engine is given its name."""
    with pytest.raises(PolicyError, match=r"on mps:0, .* only one stream.* move the model to the"):
        Engine([], ActivationPolicy(), "auto", torch.device("mps:0"))


def test_without_parameters_the_cpu_is_chosen_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("mps"))
    forward = ebbtide.wrap_forward_with_offload(nn.functional.gelu)
    x = torch.randn(2**20, requires_grad=True)
    forward(x).sum().backward()
    expected = torch.autograd.grad(nn.functional.gelu(x).sum(), x)[0]
    assert torch.equal(x.grad, expected)


# ---- measuring -----------------------------------------------------------------------------------


def without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: Any) -> str:
        raise FileNotFoundError(errno.ENOENT, "No such file", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(Path, "write_text", refuse)


@pytest.mark.parametrize(
    ("platform", "peak_bytes"), [("darwin", 5000), ("win32", 7000), ("freebsd13", 5000 * 1024)]
)
def test_peaks_without_proc(
    monkeypatch: pytest.MonkeyPatch, platform: str, peak_bytes: int
) -> None:
    usage = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda _: SimpleNamespace(ru_maxrss=5000))
    monkeypatch.setitem(sys.modules, "resource", None if platform == "win32" else usage)
    info = SimpleNamespace(rss=1, peak_wset=7000)
    process = SimpleNamespace(memory_info=lambda: info)
    monkeypatch.setattr("psutil.Process", lambda: process)
    monkeypatch.setattr(sys, "platform", platform)
    without_proc(monkeypatch)
    measured = measured_memory.ProcessMemory()
    assert measured.peak_bytes() == peak_bytes
    assert not measured.can_reset
    assert trial._peak_rss_bytes() == peak_bytes


def test_the_name_of_the_machine_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    without_proc(monkeypatch)
    assert record._device_name()
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert record._device_name() == "arm64"


def test_a_run_over_its_limit_is_ended_without_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "killpg")
    code = "import subprocess; subprocess.run(['sleep', '60'])"
    _, status = gpu._run([sys.executable, "-c", code], 2.0, {})
    assert status is None
