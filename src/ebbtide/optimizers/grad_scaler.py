"""Makes torch's `GradScaler` right for gradients on the host whose scale is on an accelerator.

The scaler copies its scale, and a flag for infinite gradients, to the device of the gradients, with
``non_blocking=True``, and uses the copies at once. A copy to the host comes later: the host would
multiply the gradients by whatever was there, and the flag's first value would overwrite what the
host has found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.amp import grad_scaler

_COPIES: Any = getattr(grad_scaler, "_MultiDeviceReplicator", None)
_SCALES = ("grad_scale", "found_inf")  # what a scaler gives to a fused optimizer


def wait_for_scales() -> None:
    """Let the host wait for what a scaler copies to it, from now on, in the whole process."""
    if _COPIES is not None and not hasattr(_COPIES.get, "__wrapped__"):
        _COPIES.get = _waiting(_COPIES.get)


def _waiting(get: Callable[[Any, torch.device], torch.Tensor]) -> Any:
    @functools.wraps(get)
    def waiting(copies: Any, device: torch.device) -> torch.Tensor:
        known = set(copies._per_device_tensors)
        copy = get(copies, device)
        if device not in known and copy.device.type == "cpu" != copies.master.device.type:
            copy.copy_(copies.master)  # which the host waits for
        return copy

    return waiting


def bring_scales(optimizer: torch.optim.Optimizer) -> None:
    """Copy the scales that a scaler gives to a fused optimizer to the host, and wait for them."""
    for name in _SCALES:
        scale = getattr(optimizer, name, None)
        if isinstance(scale, torch.Tensor) and scale.device.type != "cpu":
            setattr(optimizer, name, scale.cpu())
