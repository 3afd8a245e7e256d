"""Ranks that share a host never take more of its memory together than there is.

`host_ranks_worker.py` says what each rank does. `torchrun` starts two of them, and a program that
forks starts four, so that nothing but their process group tells how many there are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed"),
    pytest.mark.skipif(sys.platform != "linux", reason="the ranks share a mapped file"),
]
if dist.is_available():
    from host_ranks_worker import BUDGET_BYTES, MIB, RAM_BYTES

HERE = Path(__file__).parent
CHECKS = {
    2: ("activations", "weights", "gradients", "tiered", "host"),
    4: ("activations", "tiered"),
}
Seen = list[dict[str, Any]]


class Runs(dict[int, list[dict[str, Any]]]):
    """What each rank saw, by the number of ranks. They are started when first asked about."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __missing__(self, world: int) -> list[dict[str, Any]]:
        directory, files = self.directory / str(world), self.directory / f"files{world}"
        directory.mkdir()
        files.mkdir()
        (directory / "machine").write_bytes(bytes(4096))
        shared = set(Path("/dev/shm").iterdir())
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        command = [HERE / "host_ranks_worker.py", directory, world, *CHECKS[world]]
        done = subprocess.run(
            [sys.executable, *(launch if world == 2 else []), *map(str, command)],
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(files)}
            | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
            capture_output=True,
            text=True,
            timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        left = {path for path in Path("/dev/shm").iterdir() if path not in shared}
        # torch's own, and semaphores of tests that run at the same time.
        others = ("torch", "sem.")
        assert not [p for p in [*left, *files.iterdir()] if not p.name.startswith(others)]
        ranks = [directory / f"rank{rank}.json" for rank in range(world)]
        self[world] = [json.loads(file.read_text()) for file in ranks]
        return self[world]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("ranks"))


def peak_bytes(seen: Seen) -> int:
    """The most that all ranks had together: whoever took last saw it."""
    return max(rank["peak_bytes"] for rank in seen)


@pytest.mark.parametrize(
    ("world", "check"), [(2, "activations"), (2, "weights"), (2, "gradients"), (4, "activations")]
)
def test_free_ram_is_not_taken_twice(world: int, check: str, runs: Runs) -> None:
    """Each rank alone would take all of it: slabs of 5 MiB and less, blocks of 9 or of 3 MiB.

    Without a budget each has an equal part, so that it does not matter who is first.
    """
    seen = [rank[check] for rank in runs[world]]
    assert RAM_BYTES - world * 9 * MIB <= peak_bytes(seen) < RAM_BYTES
    for rank in seen:
        assert "of RAM to spare" in rank["reason"]
        assert rank["left_bytes"] >= 0


@pytest.mark.parametrize("world", [2, 4])
def test_a_budget_of_the_host_is_kept_and_the_rest_goes_to_disk(world: int, runs: Runs) -> None:
    """Four blocks save an input and four outputs of tanh, each 1 MiB: 5 MiB.

    Of 8 MiB, two ranks have 4 each: 1 for chunks, 3 for tensors. Four ranks have 2 each: a half for
    chunks, and in what is left is room for one tensor.
    """
    seen = [rank["tiered"] for rank in runs[world]]
    assert peak_bytes(seen) == (8 if world == 2 else 4 * 1.5) * MIB
    for rank in seen:
        assert rank["same"]
        assert rank["host_bytes"] == (3 if world == 2 else 1) * MIB
        assert rank["disk_bytes"] == 5 * MIB - rank["host_bytes"]
        assert rank["capacity_bytes"] <= BUDGET_BYTES // world


def test_without_a_disk_the_error_names_the_budget_of_the_host(runs: Runs) -> None:
    for rank in runs[2]:
        assert rank["host"]["peak_bytes"] == 0
        for part in (
            "host_budget allows 512.0 KiB of host memory",
            "raise host_budget",
            'store="tiered"',
        ):
            assert part in rank["host"]["reason"]
