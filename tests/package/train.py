"""Trains with an installed package, as a user would after `pip install`; see `make dist`.

It is run in an empty directory by the Python of a fresh environment, into which only the wheel and
what the wheel asks for were installed.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib import metadata, resources
from pathlib import Path

import torch
from torch import nn

import ebbtide


def train(*, offloaded: bool) -> tuple[list[torch.Tensor], int]:
    """Train for three steps. Returns the trained parameters and the bytes offloaded in a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    handle = ebbtide.offload(model) if offloaded else None
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2048, 256)).square().mean().backward()
        optimizer.step()
    offloaded_bytes = 0
    if handle is not None:
        offloaded_bytes = handle.stats.offloaded_bytes
        handle.detach()
    return [parameter.detach() for parameter in model.parameters()], offloaded_bytes


def main() -> None:
    """Check what was installed, and train with it."""
    site = Path(sysconfig.get_path("purelib"))
    assert Path(ebbtide.__file__).is_relative_to(site), f"not the installed one: {ebbtide.__file__}"
    assert metadata.version("ebbtide") == ebbtide.__version__
    assert resources.files("ebbtide").joinpath("py.typed").is_file(), "type checkers find no types"
    command = Path(sys.executable).with_name("ebbtide")
    subprocess.run([command, "--help"], check=True, stdout=subprocess.DEVNULL)
    plain, _ = train(offloaded=False)
    trained, offloaded_bytes = train(offloaded=True)
    assert offloaded_bytes > 0, "nothing was offloaded"
    assert all(map(torch.equal, plain, trained)), "the parameters differ"
    print(f"ebbtide {ebbtide.__version__} is installed and trains: same bits")


if __name__ == "__main__":
    main()
