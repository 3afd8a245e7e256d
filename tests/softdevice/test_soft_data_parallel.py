"""Data parallel training of two ranks on the software accelerator, with gloo through the host."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_parallel_worker import BUDGET_BYTES, ROWS, STEPS, WIDTH, WORLD

HERE = Path(__file__).parent
LIMIT_S = 200


def run_ranks(*commands: list[str]) -> list[str]:
    """Run Python at once with the arguments of each rank. Returns the last line of each."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    lines = []
    try:
        for rank in ranks:
            output, errors = rank.communicate(timeout=LIMIT_S)
            assert rank.returncode == 0, errors[-3000:]
            lines.append(output.splitlines()[-1])
    finally:
        for rank in ranks:
            rank.kill()
    return lines


@pytest.mark.parametrize("order", ["threads", "compute-first"])
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["ddp", "ddp-tiered", "fsdp2", "fsdp2-cpu"])
def test_offloaded_training_is_the_plain_one(kind: str, order: str, tmp_path: Path) -> None:
    script, rendezvous = str(HERE / "data_parallel_worker.py"), str(tmp_path / "rendezvous")
    ranks = ([script, kind, str(rank), rendezvous, order] for rank in range(WORLD))
    answers = [json.loads(output) for output in run_ranks(*ranks)]
    for answer in answers:
        assert len(set(answer["plain"])) == STEPS
        assert answer["offloaded"] == answer["plain"]
        # Of four layers, each saves its input and, for its GELU, the linear map's result.
        assert answer["bytes"] >= 4 * ROWS * WIDTH * 4
    if kind == "ddp-tiered":
        # 16 times as many rows are 512 KiB or more on each rank, which may take 256 KiB.
        assert all(answer["disk_bytes"] > 0 for answer in answers)
        host_bytes = [answer["host_bytes"] for answer in answers]
        assert min(host_bytes) > 0
        assert sum(host_bytes) <= BUDGET_BYTES
    # Each rank has rows of its own, and the weights of both.
    assert answers[0]["plain"] != answers[1]["plain"]
