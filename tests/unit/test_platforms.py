"""macOS and Windows, as far as they can be faked on Linux."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide import PolicyError

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fakes other systems on Linux")


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_everything_imports_and_an_offload_says_what_is_missing(
    platform: str, tmp_path: Path
) -> None:
    paths = [str(Path(ebbtide.__file__).parents[1]), str(HERE.parent / "simulation")]
    done = subprocess.run(
        [sys.executable, HERE / "fake_platform.py", platform, tmp_path],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("store", ["disk", "auto"])
def test_other_systems_are_refused(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    model = nn.Linear(4, 4)
    with pytest.raises(PolicyError, match="win32"):
        ebbtide.offload(model, store=store)
    assert model(torch.zeros(1, 4)).shape == (1, 4)
    assert "forward" not in vars(model)


# ---- devices -------------------------------------------------------------------------------------


def test_a_device_with_one_stream_is_refused() -> None:
    """Apple's GPU. There is none here, and a function is offloaded where it says it computes."""
    with pytest.raises(PolicyError, match="mps"):
        ebbtide.wrap_forward_with_offload(nn.functional.gelu, device="mps")


def test_without_parameters_the_cpu_is_chosen_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("mps"))
    forward = ebbtide.wrap_forward_with_offload(nn.functional.gelu)
    x = torch.randn(2**20, requires_grad=True)
    forward(x).sum().backward()
    expected = torch.autograd.grad(nn.functional.gelu(x).sum(), x)[0]
    assert torch.equal(x.grad, expected)
