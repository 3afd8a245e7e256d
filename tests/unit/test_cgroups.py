"""Limits of control groups, read from directories that look like a container's or a batch job's."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ebbtide.stores import host_memory

GIB = 2**30

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has control groups")


def fabricate(root: Path, groups: str, files: dict[str, object]) -> Path:
    host_memory._directories.cache_clear()
    limits = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in {"proc/self/cgroup": groups, **limits}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return root


def stat(**pages: int) -> str:
    return "".join(f"{name} {size}\n" for name, size in pages.items())


def test_a_container_of_version_2(tmp_path: Path) -> None:
    """Its own group is the root of what it sees. The page cache is free for the asking."""
    files = {
        "memory.max": 8 * GIB,
        "memory.high": "max",
        "memory.current": 5 * GIB,
        "memory.stat": stat(anon=3 * GIB, inactive_file=GIB, active_file=GIB, shmem=0),
    }
    root = fabricate(tmp_path, "0::/\n", files)
    assert host_memory.memory_limit(root) == (8 * GIB, 5 * GIB)


def test_the_tightest_group_above_counts(tmp_path: Path) -> None:
    files = {
        "slurm/job/step/memory.max": "max",
        "slurm/job/step/memory.high": "max",
        "slurm/job/memory.max": 4 * GIB,
        "slurm/job/memory.current": GIB,
        "slurm/job/memory.stat": "",
        "slurm/memory.max": 64 * GIB,
        "slurm/memory.current": 62 * GIB,  # by other jobs, so 2 GiB are left for this one
        "slurm/memory.stat": stat(inactive_file=0),
    }
    root = fabricate(tmp_path, "0::/slurm/job/step\n", files)
    assert host_memory.memory_limit(root) == (64 * GIB, 2 * GIB)


def test_docker_with_version_1(tmp_path: Path) -> None:
    """Without a namespace of its own, a container sees its path, and the mount begins there."""
    files = {
        "memory/memory.limit_in_bytes": 2 * GIB,
        "memory/memory.usage_in_bytes": GIB,
        "memory/memory.stat": stat(total_inactive_file=GIB // 4, total_active_file=GIB // 4),
    }
    root = fabricate(tmp_path, "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n", files)
    assert host_memory.memory_limit(root) == (2 * GIB, 2 * GIB - GIB // 2)


def test_a_group_below_that_of_a_container(tmp_path: Path) -> None:
    """The mount begins at the container's group, so the path to it is not there."""
    files = {"memory.max": 8 * GIB, "memory.current": GIB, "job/memory.max": 2 * GIB}
    files |= {"job/memory.current": GIB}
    root = fabricate(tmp_path, "0::/docker/abc/job\n", files)
    assert host_memory.memory_limit(root) == (2 * GIB, GIB)


@pytest.mark.parametrize("groups", ["", "0::/\n", "0::/gone\n", "rubbish\n"])
def test_what_cannot_be_read_is_no_limit(tmp_path: Path, groups: str) -> None:
    root = fabricate(tmp_path, groups, {"memory.max": "?"})
    assert host_memory.memory_limit(root) is None


@pytest.mark.parametrize(
    ("limit", "free_bytes"),
    [
        (None, 10 * GIB),
        ((8 * GIB, 4 * GIB), 4 * GIB),
        ((99 * GIB, 99 * GIB), 10 * GIB),
    ],
)
def test_free_ram_ends_at_the_limit(
    monkeypatch: pytest.MonkeyPatch, limit: tuple[int, int] | None, free_bytes: int
) -> None:
    """The host store asks this before it grows: past the limit the kernel kills the program."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * GIB))
    monkeypatch.setattr(host_memory, "memory_limit", lambda: limit)
    expected = int(free_bytes * 0.95)
    assert host_memory.free_ram_bytes() == expected - expected % 4096
