"""The examples run as they are, with fewer samples."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["neuralop_darcy.py", "neuralop_trainer.py"])
def test_example_trains_and_offloads(name: str, tmp_path: Path) -> None:
    pytest.importorskip("neuralop")
    options = ["--resolution", "64", "--batch-size", "4", "--samples", "8", "--epochs", "2"]
    # Threads that do not spin: the tests share their cores.
    environment = os.environ | {"EBBTIDE_CACHE": str(tmp_path), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *options],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    offloaded = re.search(r"offloaded_bytes +([\d.]+) MiB", done.stdout)
    # 4 samples x 32 channels x 64 x 64 nodes x 4 B = 2 MiB, about 27 of them, less 12
    # that GELUs give again: 30 MiB. A figure far below would say that most of it stayed.
    assert offloaded is not None
    assert 25 < float(offloaded[1]) < 40


def test_a_model_larger_than_memory_trains() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "larger_than_memory.py", "--limit", "224MiB", "--steps", "2"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Weights, gradients and two moments of 9 layers of 8 MiB each are 288 MiB; activations add 2.
    # What torch imports for its first optimizer, 70 to 160 MiB, must not count.
    peak = re.search(r"peak, as it is +([\d.]+) MiB", done.stdout)
    assert peak is not None
    assert 288 < float(peak[1]) < 288 + 70
    assert re.search(r"peak, as it is .* does not fit", done.stdout)
    assert re.search(r"peak, offloaded .* fits", done.stdout)
    assert "the same, to the bit" in done.stdout


def test_a_clipped_step_inside_backward_fits() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "clipped_step_in_backward.py", "--steps", "4"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # 200 MiB: 19 layers of two linear maps of 1024 x 1024 and biases, of 8 MiB each. State is twice
    # the weights, and a shadow is a weight with its state.
    assert re.search(r"optimizer state +304\.3 MiB", done.stdout)
    assert re.search(r"shadows, in files +456\.4 MiB", done.stdout)
    assert re.search(r"as it is .* does not fit", done.stdout)
    assert re.search(r"inside backward .* fits", done.stdout)
    assert re.search(r"clipped +1\n", done.stdout)
    assert re.search(r"stepped ahead +2\n", done.stdout)  # not in the first step, nor the clipped
    assert "the same, to the bit" in done.stdout


def test_pipeline_keeps_less_on_every_rank() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    # The launcher looks for a free port itself.
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [*launch, EXAMPLES / "pipeline.py", "--steps", "1", "--microbatches", "4"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    peaks = re.findall(r"backward ([\d.]+) MiB, offloaded ([\d.]+) MiB", done.stdout)
    # Five units are in flight on the first rank, three on the second; two are to stay.
    (all_0, two_0), (all_1, two_1) = [tuple(map(float, each)) for each in peaks]
    assert two_0 / all_0 == pytest.approx(2 / 5, rel=0.1)
    assert two_1 / all_1 == pytest.approx(2 / 3, rel=0.1)
