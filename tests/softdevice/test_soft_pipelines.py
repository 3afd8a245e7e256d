"""Pipelines of two ranks, and of two stages in one process, on the software accelerator."""

import json
from pathlib import Path

import pytest

from soft_pipeline_worker import COUNT, ROWS, STEPS, WIDTH
from test_soft_data_parallel import run_ranks

HERE = Path(__file__).parent


@pytest.mark.timeout(600)
@pytest.mark.parametrize("order", ["threads", "compute-first"])
@pytest.mark.parametrize(
    ("kind", "world"), [("gpipe", 2), ("1f1b", 2), ("interleaved", 2), ("interleaved", 1)]
)
def test_an_offloaded_pipeline_is_the_plain_one(
    kind: str, world: int, order: str, tmp_path: Path
) -> None:
    script, rendezvous = str(HERE / "soft_pipeline_worker.py"), str(tmp_path / "rendezvous")
    ranks = ([script, kind, str(rank), str(world), rendezvous, order] for rank in range(world))
    answers = [json.loads(output) for output in run_ranks(*ranks)]
    for answer in answers:
        assert answer["activations"] == answer["plain"]
        assert answer["weights"] == answer["plain"]
    # At least one microbatch of one stage left the device: the second of two layers saves its
    # input, and each saves its linear map's result for its GELU. (The last rank of 1F1B has no two
    # microbatches at once.)
    assert sum(answer["bytes"] for answer in answers) >= 3 * ROWS * WIDTH * 4
    losses = answers[-1]["plain"][: STEPS * COUNT]
    assert len(set(losses)) == STEPS * COUNT
