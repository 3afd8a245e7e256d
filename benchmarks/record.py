"""Write result files, which hold every sample and the machine, versions and date it belongs to."""

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
    """Return what matters for a timing: the date, the machine and the versions of software."""
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
    """Write ``DATE_DEVICE_CASE.json`` and, beside it, a Markdown file with the table.

    Args:
        case: one word for what was measured.
        configuration: the arguments that the figures depend on.
        results: figures and samples, with units in the keys.
        table: the Markdown table.
        directory: directory to write to.

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
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # only Linux has it
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


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
    if "EBBTIDE_COMMIT" in os.environ:  # set for a copy of the tree without its git history
        return os.environ["EBBTIDE_COMMIT"]
    git = ["git", "-C", str(RESULTS.parent)]
    describe = [*git, "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        head = subprocess.run(describe, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return head.stdout.strip() or "unknown"
