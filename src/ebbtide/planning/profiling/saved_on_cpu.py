"""What `torch.autograd.graph.save_on_cpu` would copy and need, found with fake tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from ebbtide.planning.hardware import Hardware
from ebbtide.planning.profiling.fake_copies import FakeCopies
from ebbtide.planning.profiling.fake_profile import (
    Loss,
    compute_loss,
    device_of,
    explained,
    run_backward,
)
from ebbtide.planning.profiling.layer_calls import LayerCalls
from ebbtide.planning.profiling.operator_costs import OperatorCosts
from ebbtide.planning.profiling.operator_watch import OperatorWatch
from ebbtide.planning.profiling.storage_ledger import StorageLedger


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
    batch: Sequence[Any] | Mapping[str, Any] | Tensor,
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
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = device_of(model)
    copies = FakeCopies(mode, device)
    fake, arguments = copies.model(model), copies.batch(batch)
    ledger = StorageLedger()
    parameters = list(fake.parameters())
    for tensor in (*parameters, *fake.buffers()):
        ledger.key_of(tensor)
    sizes_bytes: list[int] = []

    def pack(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
        sizes_bytes.append(tensor.nbytes)
        return tensor.shape, tensor.dtype

    def unpack(packed: tuple[torch.Size, torch.dtype]) -> Tensor:
        return torch.empty(packed[0], dtype=packed[1], device=device)

    calls = LayerCalls(ledger, lambda _: None)
    watch = OperatorWatch(ledger, calls, OperatorCosts(hardware), set())
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
    with torch.enable_grad(), explained(model), mode, watch:
        with hooks:
            value, _output = compute_loss(fake, arguments, loss)
        calls.close()
        run_backward(value)
    gradients = [each.grad for each in parameters if each.grad is not None]
    gradient_bytes = sum(each.nbytes for each in gradients)
    peaks = ledger.peaks({ledger.key_of(each) for each in gradients})
    state_bytes = gradient_bytes * optimizer_states
    update_bytes = 3 * gradient_bytes + 2 * state_bytes
    compute_s = sum(watch.seconds.values())
    compute_s += update_bytes / hardware.device_memory_bytes_per_s
    copied_bytes = sum(sizes_bytes)
    copies_s = sum(hardware.offload_s(each) + hardware.reload_s(each) for each in sizes_bytes)
    return SavedOnCpu(
        step_s=compute_s + copies_s,
        compute_s=compute_s,
        copied_bytes=copied_bytes,
        num_copies=len(sizes_bytes),
        peak_bytes=max(peaks.values()) + gradient_bytes + state_bytes,
    )
