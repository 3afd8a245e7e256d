"""Result files: every sample, with what was measured, on what and when."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import ebbtide

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """The machine and the versions, as far as they matter for a timing."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": _device_name(),
        "driver": _driver(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "ebbtide": ebbtide.__version__,
        "commit": _commit(),
        "system": f"{platform.system()} {platform.release()}",
    }


def save(
    case: str,
    configuration: dict[str, Any],
    results: dict[str, Any],
    table: str,
    directory: Path = RESULTS,
) -> Path:
    """Write ``DATE_DEVICE_CASE.json`` and the same as a Markdown table beside it.

    Args:
        case: what was measured, in one word.
        configuration: the arguments that the figures depend on.
        results: figures and samples; units are in the keys.
        table: Markdown for people.
        directory: where to write.

    Returns:
        The path of the JSON file.
    """
    facts = environment()
    name = f"{facts['date']}_{facts['device'].replace(' ', '-')}_{case}"
    path = directory / f"{name}.json"
    document = {
        "case": case,
        "environment": facts,
        "configuration": configuration,
        "results": results,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    where = ", ".join(f"{key} {value}" for key, value in facts.items())
    path.with_suffix(".md").write_text(f"# {case}\n\n{table}\n\n{where}\n")
    return path


def _device_name() -> str:
    if torch.accelerator.is_available() and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _driver() -> str:
    if not torch.cuda.is_available():
        return "none"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return answer.splitlines()[0].strip()


def _commit() -> str:
    if "EBBTIDE_COMMIT" in os.environ:  # for a copy of the tree without its history
        return os.environ["EBBTIDE_COMMIT"]
    git = ["git", "-C", str(RESULTS.parent)]
    describe = [*git, "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        head = subprocess.run(describe, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return head.stdout.strip() or "unknown"
