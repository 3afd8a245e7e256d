"""Pipelines whose stages are sharded by FSDP2 or tensor parallelism train to the same bits."""

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
if dist.is_available():
    from sharded_stages_worker import CASES
else:
    CASES = []

WORKER = Path(__file__).parent / "sharded_stages_worker.py"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, by case."""
    file = tmp_path_factory.mktemp("stages") / "found.json"
    launch = [sys.executable, "-m", "torch.distributed.run"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [*launch, "--nproc-per-node", "4", WORKER, file],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_same_bits(case: tuple[str, ...], seen: list[dict[str, Any]]) -> None:
    cases = [found["-".join(case)] for found in seen]
    assert all(each["same"] for each in cases)
    # The last stage of 1F1B has one microbatch at a time, of which all is needed at once.
    assert sum(each["spared"] > 0 for each in cases) >= 2
