"""Type checkers accept what the README and the docs tell users to write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from test_docs import ROOT, find_blocks

# torch's `backward` has no types, and `torch.distributed` does not say what it exports.
OF_TORCH = ("[no-untyped-call]", 'attribute "HashStore"  [attr-defined]')


def check_types(folder: Path, texts: dict[str, str]) -> str:
    """Run mypy with the strict settings of the project. Returns its complaints, but torch's."""
    files = []
    for name, text in texts.items():
        files.append(folder / f"{name}.py")
        files[-1].write_text(text)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", *map(str, files)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not result.stderr, result.stderr
    return "\n".join(line for line in result.stdout.splitlines() if not line.endswith(OF_TORCH))


def test_every_example_passes_mypy(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    blocks = dict(find_blocks())
    names = {name: f"block_{number}" for number, name in enumerate(blocks)}
    complaints = check_types(tmp_path, {names[name]: text for name, text in blocks.items()})
    for name, file in names.items():
        complaints = complaints.replace(f"{tmp_path / file}.py", name)
    assert not complaints, complaints


def test_mypy_sees_the_types_of_the_package(tmp_path: Path) -> None:
    """A wrong argument, a wrong attribute: were all of it `Any`, nothing above could fail."""
    pytest.importorskip("mypy")
    wrong = (
        "import torch\nimport ebbtide\n"
        "model = torch.nn.Linear(2, 2)\n"
        "ebbtide.offload(model, weights=True)\n"
        "handle = ebbtide.offload(model)\n"
        "handle.layers.append('x')\n"
        "handle.stats.saved_mib\n"
        "model.forward = ebbtide.wrap_forward_with_offload(model.forward)"
        "  # type: ignore[method-assign]\n"
        "print(model.forward.handle.stats)\n"
    )
    lines = check_types(tmp_path, {"wrong": wrong}).splitlines()
    assert [line.split(":")[1] for line in lines if ": error:" in line] == ["4", "6", "7"]
