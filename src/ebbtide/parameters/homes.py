"""Finds the device that parameters are computed with on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ebbtide.errors import PolicyError


def find_device(modules: Sequence[nn.Module]) -> torch.device | None:
    """Return the one device of all parameters, or None if there are no parameters.

    Raises:
        PolicyError: the parameters are on several devices, or on `meta`.
    """
    homes: dict[torch.device, str] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            homes.setdefault(home_of(parameter), name)
    if len(homes) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in homes.items())
        raise PolicyError(
            f"the model is on {len(homes)} devices ({places}); move it to one with "
            f"model.to(device), or offload the parts on each device separately"
        )
    device = next(iter(homes), None)
    if device is not None and device.type == "meta":
        raise PolicyError(
            "the model's parameters are on the meta device and hold no values; materialise them "
            "first, for example with model.to_empty(device=...) and by loading a state_dict"
        )
    return device


def home_of(parameter: nn.Parameter) -> torch.device:
    """Return the device that a parameter is computed with on.

    FSDP2's `CPUOffloadPolicy` keeps shards on the host, and gathers them on the mesh's device.
    """
    device = parameter.device
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or device.type in (mesh.device_type, "meta"):
        return device
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
