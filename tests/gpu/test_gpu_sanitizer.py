"""A short case under NVIDIA's compute-sanitizer, where it is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASE = Path(__file__).with_name("sanitizer_case.py")
TIMEOUT_S = 540  # every kernel of the step is loaded and instrumented
FOUND = 9


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("store", ["host", "disk"])
def test_compute_sanitizer_finds_nothing(store: str, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("compute-sanitizer reads CUDA's kernels only")
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("compute-sanitizer is not on PATH")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        # Freed memory goes back to the driver at once: whoever still uses it is found.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    # Calls that fail and are handled, such as a query of an event that is not ready, are no find.
    options = ["--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", str(FOUND)]
    finished = subprocess.run(
        [tool, *options, sys.executable, str(CASE), store],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    printed = finished.stdout + finished.stderr
    if "Device not supported" in printed:
        pytest.skip("compute-sanitizer does not support this device")
    assert finished.returncode == 0, printed[-4000:]
    assert "same bits" in printed
    assert "ERROR SUMMARY: 0 errors" in printed
