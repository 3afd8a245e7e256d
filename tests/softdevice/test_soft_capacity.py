"""A device that is too small: where the step breaks off, nothing is left, and training goes on."""

import gc

import pytest
import torch
from torch import Tensor, nn

import ebbtide
import softdevice
from gpu_bench import (
    KIB,
    SIZE_BYTES,
    TIGHT,
    assert_at_rest,
    batch,
    settle,
    take_step,
    tower,
)
from soft_bench import on_the_host
from zoo import assert_bitwise_equal

ENOUGH_BYTES = 2**33
STEP_BYTES = 1000 * KIB  # from one capacity to the next
REBUILD = ebbtide.ActivationPolicy(min_bytes=1, max_inflight_bytes=2 * SIZE_BYTES)


def _drop_what_the_error_holds(device: torch.device) -> None:
    # After a backward that raised, torch's queue holds parts of the graph until the next backward.
    torch.ones(1, device=device, requires_grad=True).sum().backward()
    gc.collect()


def _step_within(capacity_bytes: int, model: nn.Module, x: Tensor) -> dict[str, Tensor] | None:
    """A step with so much more memory than is allocated now; None if it does not fit."""
    model.zero_grad()
    torch.accelerator.empty_cache()
    softdevice.set_capacity(torch.accelerator.memory_reserved() + capacity_bytes)
    try:
        return on_the_host(take_step(model, x))
    except torch.OutOfMemoryError:
        return None
    finally:
        softdevice.set_capacity(ENOUGH_BYTES)


@pytest.mark.parametrize(
    "arguments",
    [
        {"activations": TIGHT},
        {"activations": TIGHT, "store": "tiered", "host_budget": "4MiB"},
        {"activations": TIGHT, "weights": ebbtide.WeightPolicy()},
        {"activations": REBUILD},
    ],
    ids=["host", "tiered", "weights", "rebuilt"],
)
@pytest.mark.parametrize("order", ["threads", "compute-first", "random:5"])
def test_training_goes_on_after_an_error_anywhere(
    order: str, arguments: dict[str, object], device: torch.device
) -> None:
    """The capacity grows from step to step, so the error moves from forward into backward."""
    softdevice.choose_order(order)
    model, x = tower(device), batch(device)
    expected = on_the_host(take_step(model, x))
    fits: list[bool] = []
    left_bytes: set[int] = set()
    with ebbtide.offload(model, **arguments) as handle:
        while not (fits and fits[-1]):
            assert len(fits) < 30, "the step never fits"
            got = _step_within(len(fits) * STEP_BYTES, model, x)
            _drop_what_the_error_holds(device)
            fits.append(got is not None)
            for step in (got, on_the_host(take_step(model, x))):
                if step is not None:
                    assert_bitwise_equal(step, expected)
            # Not before: torch tells nobody of a backward that raises; the next forward ends it.
            assert_at_rest(handle)
            model.zero_grad()
            settle(handle)
            gc.collect()
            left_bytes.add(torch.accelerator.memory_allocated())
    assert fits.count(False) >= 3
    assert len(left_bytes) == 1, "memory is left over after an error"


def test_an_offloaded_step_fits_where_a_plain_one_does_not(device: torch.device) -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(12)))
    model, x = layers.to(device), batch(device, rows=4096)
    policy = ebbtide.ActivationPolicy(min_bytes=1, max_inflight_bytes=2 * x.nbytes, rebuild=False)
    softdevice.choose_order("threads")
    expected = on_the_host(take_step(model, x))
    # Plain: 13 activations (the input's copy, and the results of 12 layers), and what the loss
    # takes. Offloaded: two on their way, what the running layer takes, and the gradients, which are
    # 12 x 257 KiB, less than one activation of 4 MiB. Ten lies between the two.
    capacity_bytes = 10 * x.nbytes
    assert _step_within(capacity_bytes, model, x) is None
    _drop_what_the_error_holds(device)
    with ebbtide.offload(model, activations=policy) as handle:
        got = _step_within(capacity_bytes, model, x)
        assert got is not None
        assert_bitwise_equal(got, expected)
        assert_at_rest(handle)
