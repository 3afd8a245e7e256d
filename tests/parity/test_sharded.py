"""Sharded models train to the same bits, and their activations leave.

`sharded_worker.py` says what is run, by one, two and four processes.
"""

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
]
CASES: dict[int, dict[str, Any]] = {}
CHECKS: dict[str, Any] = {}
if dist.is_available():
    from sharded_worker import CASES, CHECKS, STEPS

NAMES = [(world, name) for world, cases in CASES.items() for name in cases]
WHOLE_BYTES = [
    (world, name) for world, name in NAMES if "tp" not in name and "bfloat16" not in name
]
TENSOR_PARALLEL = [(world, name) for world, name in NAMES if "tp" in name]
WORKER = Path(__file__).parent / "sharded_worker.py"
Seen = dict[str, dict[str, Any]]


class Runs(dict[int, list[Seen]]):
    """What each rank saw, by the number of processes. They are started when first asked about."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __missing__(self, world: int) -> list[Seen]:
        done = subprocess.run(
            [sys.executable, WORKER, self.directory, str(world)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        files = [self.directory / f"world{world}-rank{rank}.json" for rank in range(world)]
        self[world] = [json.loads(file.read_text()) for file in files]
        return self[world]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("sharded"))


def seen_by_ranks(runs: Runs, world: int, name: str) -> list[dict[str, Any]]:
    seen = [rank[name] for rank in runs[world]]
    for each in seen:
        assert "error" not in each, each["error"]
    return seen


@pytest.mark.parametrize(("world", "name"), NAMES)
def test_same_bits(world: int, name: str, runs: Runs) -> None:
    for seen in seen_by_ranks(runs, world, name):
        assert seen["same"] == {"losses": True, "gradients": True, "parameters": True}
        assert seen["moved"]  # there are gradients to compare
        assert seen["counts"]["losses"] >= STEPS


@pytest.mark.parametrize(("world", "name"), WHOLE_BYTES)
def test_as_much_leaves_as_of_a_whole_model(world: int, name: str, runs: Runs) -> None:
    """From the first step on: no gathered parameter is taken for an activation, or the reverse."""
    for seen in seen_by_ranks(runs, world, name):
        assert seen["offloaded_bytes"][0] > 0
        assert seen["offloaded_bytes"] == seen["whole_offloaded_bytes"]
        assert seen["parameter_bytes"] == seen["whole_parameter_bytes"]


def test_bfloat16_leaves(runs: Runs) -> None:
    for seen in seen_by_ranks(runs, 2, "fsdp-bfloat16"):
        # Half as many bytes, and the input of the model, which the root casts.
        whole = seen["whole_offloaded_bytes"]
        assert all(
            0.5 * b <= a < 0.6 * b for a, b in zip(seen["offloaded_bytes"], whole, strict=True)
        )
        assert [2 * a for a in seen["parameter_bytes"]] == seen["whole_parameter_bytes"]


@pytest.mark.parametrize(("world", "name"), TENSOR_PARALLEL)
def test_shards_of_activations_leave(world: int, name: str, runs: Runs) -> None:
    for seen in seen_by_ranks(runs, world, name):
        offloaded, parameters = seen["offloaded_bytes"], seen["parameter_bytes"]
        # In the first step, layers are verified before they are recomputed.
        assert offloaded[0] >= offloaded[1] == offloaded[-1] > 0
        assert 0 < parameters[0] == parameters[-1]
        if world > 1:
            assert offloaded[0] < seen["whole_offloaded_bytes"][0]
            assert parameters[0] < seen["whole_parameter_bytes"][0]


@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str, runs: Runs) -> None:
    """Each check is a function of the worker, which says what it is about."""
    for seen in seen_by_ranks(runs, 2, name):
        assert seen
        assert all(seen.values()), seen
