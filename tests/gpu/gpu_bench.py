"""What the tests of this folder share: devices, small models, steps, and a look at what is left."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide import ActivationPolicy
from ebbtide.runtime.transfers import Transfers
from zoo import Snapshot, assert_bitwise_equal, gradients

KIB, MIB = 2**10, 2**20
WAIT_S = 10.0  # far more than anything here takes; reached only when a test fails
SIZE_BYTES = 512 * KIB
"""Of one activation of `tower` on a `batch`: 512 rows x 256 columns x 4 bytes."""
OFFLOADED_BYTES = 12 * SIZE_BYTES
"""Of a step: six layers save their input and their linear map's result. The last one's GELU saves
nothing of its own result; the loss does, outside the model."""

INFLIGHT = 2  # activations on the way down at most, and as many on the way up
TIGHT = ActivationPolicy(min_bytes=1, max_inflight_bytes=INFLIGHT * SIZE_BYTES, rebuild=False)
"""Everything moves, and all but the last two activations come back. Those may be on their way down
still when backward, on a host that runs ahead of the device, asks for them: they have not left."""

Forward = Callable[[Tensor], Tensor]

needs_accelerator = pytest.mark.usefixtures("needs_accelerator")
needs_sleep = pytest.mark.usefixtures("needs_sleep")
needs_registration = pytest.mark.usefixtures("needs_registration")

# ---- devices ------------------------------------------------------------------------------------


def _dry_run() -> bool:
    asked_for = os.environ.get("EBBTIDE_GPU_TESTS_ON", "")
    if asked_for not in ("", "cpu"):
        raise pytest.UsageError(f"EBBTIDE_GPU_TESTS_ON={asked_for} is not cpu")
    return asked_for == "cpu"


DRY_RUN = _dry_run()
STORES = ("disk",) if DRY_RUN else ("host", "tiered", "disk")


def find_device() -> torch.device | None:
    """The current accelerator, or the CPU in a dry run; None if there is neither."""
    if DRY_RUN:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def finish_device(device: torch.device) -> None:
    """Wait for all that is queued, on whatever stream."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# ---- what a device can do -----------------------------------------------------------------------


def can_sleep(device: torch.device) -> bool:
    """Whether a kernel can be queued that does nothing, for long."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "_sleep")


def can_register(device: torch.device) -> bool:
    """Whether the device can page-lock memory of the host where it is."""
    return device.type == "cuda" or hasattr(torch.get_device_module(device), "host_register")


def unregister(address: int, device: torch.device) -> bool:
    """Whether the device had the memory at an address page-locked; if so, it has it no more."""
    if device.type != "cuda":
        with contextlib.suppress(OSError):
            torch.get_device_module(device).host_unregister(address)
            return True
        return False
    status = int(torch.cuda.cudart().cudaHostUnregister(address))
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)  # takes back the error, which the next kernel would report
    return status == 0


def fft_takes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device transforms numbers of this type under autocast to it."""
    try:
        with torch.autocast(device.type, dtype):
            torch.fft.rfft(torch.ones(4, dtype=dtype, device=device))
    except RuntimeError:
        return False
    return True


def orders(device: torch.device) -> Iterator[str]:
    """Run the body of a loop in every order of execution that the device has.

    A GPU has the one that it has. The software accelerator has several, none of which shows every
    race.
    """
    module = torch.get_device_module(device)
    if not hasattr(module, "choose_order"):
        yield "the only one"
        return
    for order in module.ORDERS_TO_TRY:
        module.choose_order(order)
        yield order


@contextlib.contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Queue on a stream within the block; None changes nothing.

    Not ``with stream``: a stream object remembers what to go back to for one block at a time
    (https://github.com/pytorch/pytorch/issues/176560), and the engine may be in such a block.
    """
    if stream is None:
        yield
        return
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def side_stream(device: torch.device) -> torch.Stream | None:
    """A stream beside the current one, behind all that is queued there; None on a CPU."""
    if device.type == "cpu":
        return None
    stream = torch.Stream(device=device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    return stream


def join(stream: torch.Stream | None) -> None:
    """Let the current stream wait for all that is queued on another."""
    if stream is not None:
        torch.accelerator.current_stream(stream.device).wait_stream(stream)


# ---- models and steps ---------------------------------------------------------------------------


def tower(
    device: torch.device,
    num_layers: int = 6,
    width: int = 256,
    activation: Callable[[], nn.Module] = nn.GELU,
) -> nn.Sequential:
    """Equal layers. A layer saves its input and, if it is a GELU's, the linear map's result."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(width, width), activation()) for _ in range(num_layers))
    return nn.Sequential(*layers).to(device)


def batch(device: torch.device, rows: int = 512, width: int = 256, seed: int = 0) -> Tensor:
    """Drawn on the CPU: every device starts from the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator).to(device)


def mean_square(output: Tensor) -> Tensor:
    real = torch.view_as_real(output) if output.is_complex() else output
    return real.square().mean()


def take_step(model: nn.Module, x: Tensor, forward: Forward | None = None) -> Snapshot:
    """The output of one forward, and every gradient of its backward."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    output = (forward or model)(x)
    mean_square(output).backward()
    return {"output": output.detach().clone()} | gradients(model, {"x": x})


def assert_parity(
    model: nn.Module, x: Tensor, forward: Forward | None = None, **arguments: object
) -> ebbtide.StepStats:
    """Three offloaded steps are bit for bit the plain one.

    Args:
        model: keeps no state from step to step.
        x: its input.
        forward: calls the model; None: the model itself.
        arguments: of `ebbtide.offload`; the policy is `TIGHT` unless it is among them.

    Returns:
        The last step's statistics.
    """
    expected = take_step(model, x, forward)
    with ebbtide.offload(model, **({"activations": TIGHT} | arguments)) as handle:
        for _ in range(3):
            assert_bitwise_equal(take_step(model, x, forward), expected)
        stats = handle.stats
        assert_at_rest(handle)
    return stats


# ---- what is left -------------------------------------------------------------------------------


def transfers_of(handle: ebbtide.OffloadHandle) -> Transfers:
    return handle._engine.transfers


def settle(handle: ebbtide.OffloadHandle) -> None:
    """Finish the copies under way, and let go of what they had needed."""
    finish_device(transfers_of(handle).device.torch_device)
    _wait_for(handle, lambda now: not (now.offload_bytes or now.abandoned_buffers))


def assert_at_rest(handle: ebbtide.OffloadHandle) -> None:
    """Nothing is left of the steps so far: no record, no copy, no byte in the store.

    What an error has left of a graph is freed by autograd's thread, as soon as it runs.
    """
    finish_device(transfers_of(handle).device.torch_device)
    _wait_for(handle, lambda now: now.is_idle)
    assert transfers_of(handle).store.used_bytes == 0


def _wait_for(handle: ebbtide.OffloadHandle, is_so: Callable[[Any], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_so(now := handle.inspect().in_flight):
        assert time.monotonic() < deadline_s, f"something is left: {now}"
        time.sleep(0.001)


def fail(action: Callable[[], object], error: type[BaseException], device: torch.device) -> str:
    """Run what must raise, and let go of all that the error holds.

    Returns:
        What the error says.
    """
    try:
        action()
    except error as caught:
        message = str(caught)
    else:
        pytest.fail(f"{error.__name__} was not raised")
    # After a backward that raised, torch's queue holds parts of the graph until the next backward.
    torch.ones(1, device=device, requires_grad=True).sum().backward()
    gc.collect()
    return message
