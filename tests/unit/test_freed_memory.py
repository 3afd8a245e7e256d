"""Memory that offloading frees returns to the system, so RSS falls with default settings."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.devices import SimulatedDevice
from ebbtide.stores import DiskStore, build_store
from ebbtide.stores import measured_memory as freed_memory
from waiting import await_copies

MIB = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="RSS is read from /proc")
returned = pytest.mark.skipif(
    not freed_memory.FreedMemory().is_returned, reason="the allocator is not glibc's"
)


@pytest.fixture(autouse=True)
def _forget_what_was_found() -> None:
    freed_memory._refusal.cache_clear()
    yield
    freed_memory._refusal.cache_clear()


@pytest.fixture
def trims(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The calls of `malloc_trim`."""
    calls: list[int] = []

    def trim(pad: int) -> int:
        calls.append(pad)
        return 1

    monkeypatch.setattr(freed_memory, "_malloc_trim", lambda: trim)
    return calls


@pytest.fixture(autouse=True)
def _no_settings_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*freed_memory._SETTINGS, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)


# ---- RSS ----------------------------------------------------------------------------------------

# 10 layers save 2 tensors of 4 MiB each (the rectifier's output is rebuilt, or shared with the
# next layer): 80 MiB and more, of which at most 8 MiB wait to be written and 8 MiB are read ahead.
# Blocks of 4 MiB come from glibc's heap once it has freed one block of that size.
PROGRAM = """
import json, sys, torch
from torch import nn
import ebbtide
from ebbtide.stores import ProcessMemory

torch.set_num_threads(1)
torch.manual_seed(0)
memory = ProcessMemory()
layer = lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
model = nn.Sequential(*(layer() for _ in range(10)))
x = torch.randn(16384, 64)

def step():
    loss = model(x).square().mean()
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return loss.item().hex(), sum(g.double().sum().item() for g in gradients)

def peak():
    idle = memory.now_bytes()
    memory.reset_peak()
    results = [step() for _ in range(2)]
    return memory.peak_bytes(), results

torch._C._set_deterministic_algorithms(True)
start = memory.now_bytes()
step()
plain, expected = peak()
policy = ebbtide.ActivationPolicy(max_inflight_bytes="8MiB")
handle = ebbtide.offload(model, activations=policy)
step()
offloaded, got = peak()
print(json.dumps({
    "plain": plain - start, "offloaded": offloaded - start, "same": got == expected,
    "left": handle.stats.offloaded_bytes, "notes": handle.notes,
}))
"""


def run(program: str, **variables: str) -> dict:
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"} | variables
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@linux
@returned
def test_rss_falls_with_the_default_allocator_even_after_a_plain_step() -> None:
    figures = run(PROGRAM)
    assert figures["same"]
    assert figures["left"] >= 75 * MIB
    # In flight both ways, freed since the last return, and the operands of one operation.
    assert figures["offloaded"] <= 0.7 * figures["plain"], figures
    assert "malloc_trim" in figures["notes"][0]


@pytest.mark.slow
@linux
def test_a_setting_of_the_user_is_respected() -> None:
    figures = run(PROGRAM.replace("range(10)", "range(2)"), MALLOC_TRIM_THRESHOLD_="67108864")
    assert figures["same"] and figures["left"] >= 12 * MIB
    assert "MALLOC_TRIM_THRESHOLD_" in figures["notes"][0]


# ---- when ---------------------------------------------------------------------------------------


def test_freed_memory_is_returned_after_so_many_bytes() -> None:
    freed = freed_memory.FreedMemory()
    freed.is_returned = True
    # 6 + 6 + 6 MiB are the first 16; then counting begins again.
    assert [freed.is_due(6 * MIB, 0) for _ in range(6)] == [False, False, True] * 2
    # 1/16 of the 512 MiB in the store are 32 MiB.
    assert [freed.is_due(6 * MIB, 512 * MIB) for _ in range(6)] == [False] * 5 + [True]


def tower() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(4)))


def test_a_step_returns_memory_in_forward_and_in_backward(trims: list[int]) -> None:
    model = tower()
    with ebbtide.offload(model) as handle:
        loss = model(torch.randn(4096, 512)).square().mean()
        await_copies(handle)  # what has not left yet when backward asks for it does not return
        loss.backward()
        # 4 tanh outputs and the input, 8 MiB each: 40 MiB leave and return.
        assert handle.stats.offloaded_bytes == handle.stats.reloaded_bytes == 40 * MIB
        handle.inspect()
        during = len(trims)
    # 80 MiB at 16 MiB a time; the close returns the rest.
    assert 80 // 16 - 1 <= during <= 80 // 16
    assert len(trims) > during


def test_an_offload_to_another_tier_never_returns_memory(trims: list[int]) -> None:
    """An accelerator's activations do not come from the C library."""
    device = SimulatedDevice(seed=0)
    for kind in ("auto", "disk", "tiered"):
        store = build_store(device, kind, None, None)
        assert not isinstance(store, DiskStore)
        store.close()
    assert not trims


# ---- where it is not done -----------------------------------------------------------------------


def test_what_was_kept_is_returned_when_backward_has_freed_it(trims: list[int]) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)])
    policy = ebbtide.ActivationPolicy(num_layers=0, rebuild=False)
    with ebbtide.offload(model, activations=policy) as handle:
        loss = model(torch.randn(4096, 256)).sum()
        before = len(trims)
        loss.backward()
        assert handle.stats.kept_bytes == 36 * MIB
        handle._engine.transfers.store._reader.submit(lambda: None).synchronize()
        # 8 results of 4 MiB each and the input were kept: 36 MiB, and one return for each 16.
        assert len(trims) - before == 36 * MIB // freed_memory.LEAST_BYTES


# ---- blocks of their own, under a budget ---------------------------------------------------------

BLOCKS = """
import ctypes, json, psutil, torch
from ebbtide.stores import ProcessMemory
from ebbtide.stores.measured_memory import are_large_blocks_mapped, return_freed_memory
process, found, mapped = psutil.Process(), [], []
first, second = ProcessMemory(), ProcessMemory()
def resident():
    return process.memory_info().rss / 2**20
def left():
    before = resident()
    tensors = [torch.ones(8 * 2**18) for _ in range(6)]
    del tensors
    return round(resident() - before)
torch.ones(8 * 2**18)
# As long as no large block was freed, glibc trims the heap's end from 128 KiB on, so that blocks
# that are taken from it when no budget is left would be new pages each time.
ctypes.CDLL(None).mallopt(-1, 128 * 2**10)
holes = [torch.empty(8 * 2**18) for _ in range(64)]  # what was freed before is reused first
for memory, tight in ((first, True), (second, True), (first, False), (second, False)):
    memory.keep_tight(tight)
    mapped.append(are_large_blocks_mapped())
    return_freed_memory()  # the heap has no end any more that blocks could come from,
    small = [bytes(1000) for _ in range(3000)]  # and grows by what small blocks need
    found.append(left())
print(json.dumps({"left": found, "mapped": mapped}))
"""


@linux
@returned
def test_large_blocks_return_when_they_are_freed_as_long_as_one_budget_wants_it() -> None:
    found = run(BLOCKS)
    assert found["mapped"] == [True, True, True, False]
    *at_once, left = found["left"]
    assert max(at_once) < 8
    assert left > 32


@pytest.mark.slow
@linux
def test_blocks_are_left_alone_where_the_user_decides() -> None:
    found = run(BLOCKS, MALLOC_TRIM_THRESHOLD_="67108864")
    assert found["mapped"] == [False] * 4
