"""Accelerators, a CPU and simulated devices: streams, events and copies; a machine's figures."""

from ebbtide.devices.accelerator import AcceleratorDevice
from ebbtide.devices.cpu import CpuDevice
from ebbtide.devices.device import (
    AbstractDevice,
    AbstractEvent,
    AbstractLane,
    AbstractStream,
    Layer,
    Origin,
    Span,
)
from ebbtide.devices.lanes import LaneEvent, WorkLane
from ebbtide.devices.simulated import SimulatedDevice

__all__ = [
    "AbstractDevice",
    "AbstractEvent",
    "AbstractLane",
    "AbstractStream",
    "AcceleratorDevice",
    "CpuDevice",
    "LaneEvent",
    "Layer",
    "Origin",
    "SimulatedDevice",
    "Span",
    "WorkLane",
]
