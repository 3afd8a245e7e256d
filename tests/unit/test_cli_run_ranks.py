"""`torchrun -m ebbtide run`: several ranks train as they do without it, and fail as they do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from test_cli_run import TRAIN, environment, script

pytestmark = pytest.mark.slow

PARALLEL = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
whole, model = model, DistributedDataParallel(model)
if len(sys.argv) > 1 and rank == 1:
    model(torch.randn(8, 16)).sum()
    raise RuntimeError("rank 1 is ill")
losses = []
for _ in range(2):
    optimizer.zero_grad()
    loss = model(torch.randn(2**14, 16)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
model = whole
with open(f"rank{rank}.txt", "w") as file:  # what two ranks print is mixed
    print(losses, hash_weights(), file=file)
dist.destroy_process_group()
"""


def launch(at: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         *arguments],
        cwd=at, env=environment(**env), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def test_two_ranks_train_the_same_and_one_reports(tmp_path: Path) -> None:
    name = script(tmp_path, TRAIN + PARALLEL)
    plain = launch(tmp_path, name)
    files = [tmp_path / "rank0.txt", tmp_path / "rank1.txt"]
    expected = [file.read_text() for file in files]
    found = launch(tmp_path, "-m", "ebbtide", "run", "--json", "figures.json", name)
    assert found.returncode == plain.returncode == 0, found.stderr
    assert [file.read_text() for file in files] == expected
    assert found.stdout == plain.stdout == ""
    assert found.stderr.count("1 model trained") == 1
    for file in ("figures.json", "figures.rank1.json"):
        (model,) = json.loads((tmp_path / file).read_text())["models"]
        assert model["model"] == "Sequential" and model["steps"] == 2
        # 6 blocks save their input (1 MiB) and the output of tanh (4 MiB).
        assert model["last_step"]["offloaded_bytes"] == 6 * 5 * 2**20


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    name = script(tmp_path, TRAIN + PARALLEL)
    before = set(Path("/dev/shm").iterdir())
    found = launch(tmp_path, "-m", "ebbtide", "run", name, "ill", TMPDIR=str(tmp_path / "files"))
    assert found.returncode == 1 and "rank 1 is ill" in found.stderr
    left = {file for file in Path("/dev/shm").iterdir() if file not in before}
    left |= set((tmp_path / "files").iterdir())
    assert not [file for file in left if "torch" not in file.name], left
    over = launch(tmp_path, "-m", "ebbtide", "run", "--budget", "50MiB", name)
    assert over.returncode == 1 and "exitcode  : 78" in over.stderr
    assert "BudgetError: budget=50.0 MiB is too small" in over.stderr
