"""Real pipelines of several processes train to the same bits, with what their schedules promise.

Each number of processes is started once, by torchrun; `pipeline_worker.py` says what it runs.
"""

import itertools
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ebbtide.schedule import Schedule

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed"),
]
if dist.is_available():
    from pipeline_worker import CASES, STEPS, TENSOR_BYTES, UNIT_BYTES

    NAMES = [(world, name) for world, cases in CASES.items() for name in cases]
else:
    NAMES = []

Seen = dict[str, dict[str, Any]]
WORKER = Path(__file__).parent / "pipeline_worker.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Seen]]:
    """What each rank saw, by the number of processes."""
    found = {}
    for world in CASES:
        directory = tmp_path_factory.mktemp(f"world{world}")
        launch = [sys.executable, "-m", "torch.distributed.run"]
        # The launcher looks for a free port itself.
        launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        done = subprocess.run(
            [*launch, "--nproc-per-node", str(world), WORKER, directory],
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        found[world] = [
            json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(world)
        ]
    return found


@pytest.mark.parametrize(("world", "name"), NAMES)
def test_same_bits(world: int, name: str, runs: dict[int, list[Seen]]) -> None:
    _, _, _, stages_a_rank, share = CASES[world][name]
    for rank in runs[world]:
        seen = rank[name]
        assert seen["same"] == {"losses": True, "gradients": True, "parameters": True}
        assert seen["moved"]  # there are gradients to compare
        # An MLP has 4 parameters, a transformer's stage 12 and more.
        assert seen["counts"]["parameters"] >= 4 * stages_a_rank
        assert seen["counts"]["gradients"] == STEPS * seen["counts"]["parameters"]
    # One rank has the last stage: there each step gives the losses of all microbatches.
    assert sum(rank[name]["counts"]["losses"] for rank in runs[world]) == STEPS * share * world


@pytest.mark.parametrize(("world", "name"), [each for each in NAMES if "former" not in each[1]])
def test_no_more_is_resident_than_promised(
    world: int, name: str, runs: dict[int, list[Seen]]
) -> None:
    for rank in runs[world]:
        seen = rank[name]
        plan = Schedule.parse(seen["schedule"])
        everything = Schedule(plan.order).peak_resident
        # All units are of one size, and the most of them are there at the end of a forward.
        assert seen["peak_device_bytes"] == plan.peak_resident * UNIT_BYTES
        assert seen["kept_peak_bytes"] == everything * UNIT_BYTES
        # Counted by the modules themselves, of what is in memory in whatever hands: a unit saves
        # two tensors that its forward made, and what was released is gone.
        assert UNIT_BYTES == 2 * TENSOR_BYTES
        assert seen["alive"] == 2 * plan.peak_resident
        assert seen["plain_alive"] == 2 * everything
        assert seen["offloaded_bytes"] == len(plan.offloaded) * UNIT_BYTES
        assert seen["reloaded_bytes"] == len(plan.offloaded) * UNIT_BYTES
        # With more than one unit in flight there is one that can leave; 1F1B's last rank has one.
        assert bool(plan.offloaded) == (everything > 1)
        assert plan.peak_resident < everything or everything == 1


@pytest.mark.parametrize(("world", "name"), [each for each in NAMES if "former" in each[1]])
def test_transformers_leave_too(world: int, name: str, runs: dict[int, list[Seen]]) -> None:
    for rank in runs[world]:
        seen = rank[name]
        plan = Schedule.parse(seen["schedule"])
        everything = Schedule(plan.order).peak_resident
        # Here units differ a little, the last stage's has the head in it; and while a backward
        # runs, its GELU's output is there once more: 8 x 16 x 256 x 4 B of some 620 KiB.
        share = plan.peak_resident / everything
        assert seen["peak_device_bytes"] <= 1.15 * share * seen["kept_peak_bytes"]
        assert bool(seen["offloaded_bytes"]) == bool(plan.offloaded) == (everything > 1)


@pytest.mark.parametrize(("world", "name"), NAMES)
def test_moves_are_made_at_their_anchors(
    world: int, name: str, runs: dict[int, list[Seen]]
) -> None:
    for rank in runs[world]:
        check_order(Schedule.parse(rank[name]["schedule"]), rank[name]["events"])


def check_order(plan: Schedule, events: list[tuple[str, str, float, float]]) -> None:
    """Every release and reload began after the pass before its anchor; a release before its own."""
    passes: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for what, label, begin_s, end_s in events:
        if what in ("forward", "backward"):
            passes[label].append((begin_s, end_s))
    spans = []  # of the passes in their order; both parts of a backward are called B
    for each in plan.order:
        label = str(each) if each.is_forward else f"B{each.unit}"
        spans.append(passes[label].pop(0))
    assert not any(passes.values())
    assert all(end_s <= begin_s for (_, end_s), (begin_s, _) in itertools.pairwise(spans))
    anchors = {str(action): anchor for anchor, actions in plan.lines for action in actions}
    moved = set()
    for what, label, begin_s, _ in events:
        if what not in ("release", "reload"):
            continue
        place = plan.order.index(anchors[label])
        assert begin_s >= spans[place - 1][1], label
        if what == "release":  # it is queued with compute, between the two passes
            assert begin_s <= spans[place][0], label
        moved.add(label)
    assert moved == {label for label in anchors if not label.startswith("offload")}
