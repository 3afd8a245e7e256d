"""Other libraries' offloading beside ebbtide's: the same numbers as without, in every order."""

import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import nn

import ebbtide
import softdevice
from gpu_bench import TIGHT, batch, take_step, tower
from soft_bench import PORTFOLIO, on_the_host
from zoo import assert_bitwise_equal

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import overhead_peers
from benchmarks.copies import CountingCopies

STEPS = 3
Context = Callable[[], AbstractContextManager[object]]


def _save_on_cpu(_: nn.Module) -> Context:
    return lambda: torch.autograd.graph.save_on_cpu(pin_memory=True)


def _trl(model: nn.Module) -> Context:
    trl = pytest.importorskip("trl.models.activation_offloading")
    # A warning about a missing head would need accelerate's state, which TRL's trainers create.
    manager = trl.get_act_offloading_ctx_manager(model, warn_if_no_head=False)
    return lambda: manager


def _ebbtide(model: nn.Module) -> Context:
    return lambda: ebbtide.offload(model, activations=TIGHT)


@pytest.mark.parametrize("attach", [_save_on_cpu, _trl, _ebbtide])
def test_offloaded_steps_are_the_plain_ones(
    attach: Callable[[nn.Module], Context], device: torch.device
) -> None:
    model, x = tower(device), batch(device)
    expected = on_the_host(take_step(model, x))
    for order in PORTFOLIO[:5]:
        softdevice.choose_order(order)
        context = attach(model)
        with CountingCopies(device.type) as copies:
            for _ in range(STEPS):
                # ebbtide stays attached until backward has ended; for the others it is the same.
                with context():
                    got = take_step(model, x)
                assert_bitwise_equal(on_the_host(got), expected)
        read_bytes = sum(value.nbytes for value in expected.values() if value is not None)
        assert copies.up_bytes >= STEPS * 5 * x.nbytes, f"{order}: little was offloaded"
        assert copies.down_bytes - STEPS * read_bytes >= STEPS * 5 * x.nbytes, order


@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="trl is not installed: pip install trl"
)
def test_host_times_are_measured_beside_each_other(device: torch.device) -> None:
    """Every tensor moves in every mode: without that the times could not be compared."""
    steps, size = 20, 512
    modes, missing = overhead_peers.make_modes(device, steps, size)
    assert {"save_on_cpu", "trl", "ebbtide"} <= set(modes)
    assert set(missing) <= {"torchtune"}
    for name, (model, context) in modes.items():
        with CountingCopies(device.type) as copies:
            overhead_peers.measure({name: (model, context)}, device, size, rounds=1)
        moves = name not in ("none", "identity hooks")
        # Two steps; a mode may keep the last few tensors, which backward wants at once.
        least_bytes = 2 * (steps - 8) * size * 4 if moves else 0
        assert copies.down_bytes >= least_bytes, name
        assert (copies.down_bytes > 0) == moves, name
