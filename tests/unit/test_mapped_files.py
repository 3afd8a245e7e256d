"""Files of weights, gradients and optimizer state: few, reused exactly, gone with their owners."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.devices import SimulatedDevice
from ebbtide.devices.process import OPTIMIZER_WATCHES
from ebbtide.stores import StagedDiskStore, mapped_memory
from open_files import DESCRIPTORS, taken_bytes
from waiting import wait_until

pytestmark = pytest.mark.skipif(
    not DESCRIPTORS.exists(), reason="only Linux tells in /proc which files are open"
)

WIDTH = 128
LAYERS = 4
STATE_BYTES = LAYERS * (WIDTH * WIDTH + 1024) * 4  # a bias has a page of its own: 1,024 numbers


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, WIDTH)).square().mean().backward()
    optimizer.step()


def num_mapped(directory: Path) -> int:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum(f" {directory}/" in line for line in maps)


FEW_DESCRIPTORS = """
import os, resource, sys
import torch
from torch import nn
import ebbtide

model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8)) for _ in range(300)])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
ebbtide.offload(model, weights=ebbtide.WeightPolicy(min_bytes=0))
optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
before = len(os.listdir("/proc/self/fd"))
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
print(before, len(os.listdir("/proc/self/fd")))
"""


@pytest.mark.slow
def test_six_hundred_parameters_need_few_descriptors() -> None:
    """300 layers have 300 groups of weights and of gradients, and 1,800 tensors of state."""
    run = subprocess.run([sys.executable, "-c", FEW_DESCRIPTORS], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    before, after = map(int, run.stdout.split())
    assert before < 20
    assert after <= before + 2


SMALL_FILES = """
import resource
from test_mapped_files import make, step
import ebbtide, torch

resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
model = make()
ebbtide.offload(model, weights=ebbtide.WeightPolicy(min_bytes=0))
step(model, torch.optim.AdamW(model.parameters()))
"""


def test_files_that_may_not_be_large_are_small() -> None:
    folder = Path(__file__).parent
    subprocess.run([sys.executable, "-c", SMALL_FILES], check=True, cwd=folder)


class OutOfPlace(torch.optim.Optimizer):
    """Momentum that is a new tensor after every step."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["momentum"] = p.grad + 0.9 * state.get("momentum", 0)
                p.sub_(state["momentum"], alpha=0.1)


def test_state_that_is_replaced_in_every_step_takes_its_room_once(tmp_path: Path) -> None:
    model = make()
    with ebbtide.offload(model, weights=ebbtide.WeightPolicy(), store=f"disk:{tmp_path}"):
        optimizer = OutOfPlace(model.parameters())
        step(model, optimizer)
        step(model, optimizer)
        before = taken_bytes(tmp_path)
        for _ in range(5):
            step(model, optimizer)
        assert taken_bytes(tmp_path) == before
        gc.collect()
        assert taken_bytes(tmp_path) == before


def load_again(optimizer: torch.optim.Optimizer, _: nn.Module) -> torch.optim.Optimizer:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return optimizer


def make_anew(_: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("replace", [load_again, make_anew])
def test_state_that_is_replaced_gives_its_room_back(
    replace: Callable[..., torch.optim.Optimizer], tmp_path: Path
) -> None:
    model = make()
    with ebbtide.offload(model, weights=ebbtide.WeightPolicy(), store=f"disk:{tmp_path}"):
        optimizer = torch.optim.AdamW(model.parameters())
        before = taken_bytes(tmp_path)
        step(model, optimizer)
        grown = taken_bytes(tmp_path)
        assert grown >= before + 2 * STATE_BYTES
        for _ in range(3):
            optimizer = replace(optimizer, model)
            step(model, optimizer)
        gc.collect()
        wait_until(lambda: taken_bytes(tmp_path) == grown, "the room was not given back")
        del optimizer
        gc.collect()
        # The gradients have a file, too.
        assert before <= taken_bytes(tmp_path) <= grown - 2 * STATE_BYTES


@pytest.mark.parametrize("detached", [True, False])
def test_nothing_is_left_of_a_model_that_is_dropped(detached: bool, tmp_path: Path) -> None:
    before = len(OPTIMIZER_WATCHES)
    model = make()
    handle = ebbtide.offload(model, weights=ebbtide.WeightPolicy(), store=f"disk:{tmp_path}")
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    assert num_mapped(tmp_path)
    if detached:
        handle.detach()
    else:
        del handle
    del model, optimizer
    gc.collect()
    wait_until(lambda: not num_mapped(tmp_path), "the files are still mapped")
    assert not taken_bytes(tmp_path)
    assert len(OPTIMIZER_WATCHES) == before


def test_one_tensor_that_is_kept_keeps_only_its_own_room(tmp_path: Path) -> None:
    model = make()
    handle = ebbtide.offload(model, weights=ebbtide.WeightPolicy(), store=f"disk:{tmp_path}")
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    kept = optimizer.state[model[1][0].weight]["exp_avg"]
    values = kept.clone()
    handle.detach()
    del model, handle, optimizer
    gc.collect()
    # The file system itself needs a page or two to say where the rest is not.
    assert WIDTH * WIDTH * 4 <= taken_bytes(tmp_path) <= WIDTH * WIDTH * 4 + 2 * 4096
    assert torch.equal(kept, values)


def test_room_that_is_used_again_is_filled_with_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for removes in (True, False):
        if not removes:  # as on systems that cannot punch holes into files
            monkeypatch.setattr(mapped_memory, "advise", lambda *_: False)
        files = mapped_memory.MappedFiles(tmp_path)
        slots = [files.allocate(10_000) for _ in range(3)]
        addresses = [slot.tensor.data_ptr() for slot in slots]
        for slot in slots:
            assert not slot.tensor.any()
            slot.tensor.fill_(7)
        view: Tensor = slots[1].tensor[5:10]
        for slot in slots:
            slot.memory.give_back()
        again = [files.allocate(10_000) for _ in range(3)]
        assert addresses[1] not in {slot.tensor.data_ptr() for slot in again}
        assert {addresses[0], addresses[2]} < {slot.tensor.data_ptr() for slot in again}
        assert not any(slot.tensor.any() for slot in again)
        assert view.tolist() == [7] * 5


def test_what_is_written_through_the_file_is_in_the_slot(tmp_path: Path) -> None:
    files = mapped_memory.MappedFiles(tmp_path)
    slots = [files.allocate(4096 * (1 + n)) for n in range(3)]
    for n, slot in enumerate(slots):
        slot.file.write(memoryview(bytes([n + 1]) * 100), slot.extent.offset_bytes + 50)
    for n, slot in enumerate(slots):
        assert slot.tensor[50:150].eq(n + 1).all()
        assert not slot.tensor[:50].any()
        assert not slot.tensor[150:].any()
        got = bytearray(102)
        slot.file.read(memoryview(got), slot.extent.offset_bytes + 49)
        assert got == b"\0" + bytes([n + 1]) * 100 + b"\0"


def test_a_write_that_is_still_to_come_keeps_its_room(tmp_path: Path) -> None:
    """A worker may write after the slot was dropped: never into the slot that comes next."""
    device = SimulatedDevice(0, eagerness=0.0)  # jobs run when somebody waits for them
    store = StagedDiskStore(device, tmp_path)
    slot = store.allocate_resting(4096)
    source = torch.ones(4096, dtype=torch.uint8)
    store.write(slot, 0, source, device.compute_stream().record())
    store.drop(slot)
    del slot
    following = store.allocate_resting(4096)
    device.finish_jobs()
    assert not following.tensor.any()
    store.close()
