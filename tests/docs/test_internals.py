"""What the page on the engine says of the way of a saved tensor is what happens."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

import ebbtide
from ebbtide.runtime.handles import Saved, restore

PACKAGE = Path(ebbtide.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "internals" / "engine.md"

HELPERS = {"runtime/torch_internals.py", "devices/process.py"}
"""Files that only give torch's and Python's own functions other names."""


def files_of(act: Callable[[], object]) -> set[str]:
    """The files of the package whose functions are called, below the package."""
    found = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found.add(path.relative_to(PACKAGE).as_posix())

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return found


def test_a_saved_tensor_passes_the_files_that_the_page_names() -> None:
    text = (
        PAGE.read_text().partition("A saved tensor passes eight files")[2].partition("A weight")[0]
    )
    named, _, asked = text.partition("Two more are asked")
    way = set(re.findall(r"`(runtime/\w+\.py)`", named))
    assert len(way) == 6, "and a file of `stores/` and one of `devices/`"
    others = set(re.findall(r"`(runtime/\w+\.py)`", asked)) | HELPERS

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    offload = ebbtide.offload(model, activations=ebbtide.ActivationPolicy(min_bytes=1))
    hooks = offload._engine.hooks()
    saved: list[Saved] = []
    tensor = torch.ones(8, 8, requires_grad=True).sin()
    with offload:
        assert hooks.begin()
        down = files_of(lambda: saved.append(hooks.pack(tensor)))
        hooks.end()
        with offload._engine.transfers.gate:  # else the source may still be there to be read
            offload._engine.transfers.offloads.hold_to(0)
        back = files_of(lambda: restore(saved[0]))
        assert torch.equal(restore(saved[0]), tensor)
    for found in (down, back):
        folders = {file.partition("/")[0] for file in found if "/" in file}
        assert folders == {"stores", "devices", "runtime"}
        assert {file for file in found if file.startswith("runtime/")} - others <= way
    assert way <= down | back
