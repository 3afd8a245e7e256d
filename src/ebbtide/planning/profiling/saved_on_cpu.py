"""What `torch.autograd.graph.save_on_cpu` would copy and need, found with fake tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ebbtide.planning.hardware import Hardware
from ebbtide.planning.profiling.fake_step import Batch, FakeStep, Loss


class SavedOnCpu(NamedTuple):
    """A step in which autograd saves everything on the CPU.

    Attributes:
        step_s: seconds of the step: of all operators, of the copies, and of Adam's update.
        compute_s: that without the copies.
        copied_bytes: bytes that are copied down, and again up.
        num_copies: copies down.
        peak_bytes: peak of device memory, gradients and the optimizer's state included throughout.
    """

    step_s: float
    compute_s: float
    copied_bytes: int
    num_copies: int
    peak_bytes: int


def profile_saved_on_cpu(
    model: nn.Module,
    batch: Batch,
    hardware: Hardware,
    *,
    loss: Loss | None = None,
    optimizer_states: int = 2,
) -> SavedOnCpu:
    """Predict a training step under ``save_on_cpu(pin_memory=True)``.

    It copies every saved tensor when autograd saves it, as often as it is saved and parameters too,
    and copies it back when backward asks for it. The copies run on the compute stream, so compute
    waits for each of them. Memory is page-locked in the first step only, and does not count here.

    Args:
        model: the model; it may be on the meta device.
        batch: what the model is called with.
        hardware: the machine.
        loss: computes the loss from what the model returns.
        optimizer_states: tensors of the weights' size that the optimizer keeps.

    Not modelled: copies that make a tensor contiguous on the device before it is copied down.
    """
    step = FakeStep(model, batch, hardware)
    sizes_bytes: list[int] = []

    def pack(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
        sizes_bytes.append(tensor.nbytes)
        return tensor.shape, tensor.dtype

    def unpack(packed: tuple[torch.Size, torch.dtype]) -> Tensor:
        return torch.empty(packed[0], dtype=packed[1], device=step.device)

    step.run(loss, pack, unpack)
    sizes = step.ledger.sizes
    gradient_bytes = sum(sizes[gradient] for _, gradient in step.gradients)
    state_bytes = gradient_bytes * optimizer_states
    update_bytes = 3 * gradient_bytes + 2 * state_bytes
    compute_s = sum(step.watch.seconds.values())
    compute_s += update_bytes / hardware.device_memory_bytes_per_s
    copied_bytes = sum(sizes_bytes)
    copies_s = sum(hardware.offload_s(each) + hardware.reload_s(each) for each in sizes_bytes)
    return SavedOnCpu(
        step_s=compute_s + copies_s,
        compute_s=compute_s,
        copied_bytes=copied_bytes,
        num_copies=len(sizes_bytes),
        peak_bytes=max(step.peaks().values()) + gradient_bytes + state_bytes,
    )
