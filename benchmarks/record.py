"""Write result files, which hold every sample and the machine, versions and date it belongs to."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
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
        "in_software": is_software(torch.accelerator.current_accelerator(check_available=True)),
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
        directory: directory to write to; it is made if there is none.

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
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    where = ", ".join(f"{key} {value}" for key, value in facts.items())
    text = f"# {case}\n\n{warning_of(facts)}{table}\n\n{where}\n"
    path.with_suffix(".md").write_text(text)
    return path


# ---- accelerators in software -------------------------------------------------------------------


def is_software(device: torch.device | None) -> bool:
    """Return whether a device is an accelerator in software, as its module says."""
    if device is None or device.type == "cpu":
        return False
    return bool(getattr(torch.get_device_module(device), "IN_SOFTWARE", False))


def refuse_to_commit(device: torch.device, directory: Path) -> None:
    """Exit with 2 if results of an accelerator in software would join those of this project."""
    if is_software(device) and directory.resolve() == RESULTS:
        print(
            f"{device} is an accelerator in software: its results do not belong in {RESULTS}.\n"
            "Name another directory: --out DIR",
            file=sys.stderr,
        )
        sys.exit(2)


def warning_of(facts: dict[str, Any]) -> str:
    """Return what stands above each table from an accelerator in software, otherwise "".

    Args:
        facts: the environment of a result file.
    """
    return _IN_SOFTWARE if facts.get("in_software") else ""


_IN_SOFTWARE = """\
**These are not figures of a GPU.** An accelerator in software ran this on the CPU. It shows that
the code runs and computes the same; its times, bandwidths and capacities mean nothing.

"""


def _device_name() -> str:
    if torch.accelerator.is_available() and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        name = getattr(torch.get_device_module(accelerator), "get_device_name", None)
        return accelerator.type if name is None else str(name())
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
