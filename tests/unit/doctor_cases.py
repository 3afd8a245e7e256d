"""Examinations that were never made, for tests of what the doctor says about them."""

from __future__ import annotations

import dataclasses
from typing import Any

from ebbtide.tools.examination import QUICK, DiskFigures, Examination, LinkFigures, Pinning
from ebbtide.tools.machine import Accelerator, Directory, MachineFacts, Sample

MIB, GIB = 2**20, 2**30

SHORT = QUICK._replace(
    compute_s=0.02,
    links_s=0.1,
    disk_s=0.1,
    sizes_bytes=(64 * 2**10, MIB),
    room_bytes=64 * MIB,
    disk_bytes=8 * MIB,
)
"""Measures for a moment, with little memory."""

HEALTHY_STORE = Directory("/scratch", "ext4", 800 * GIB)
HEALTHY = MachineFacts(
    cpu="Test CPU",
    cores=16,
    quota_cores=None,
    torch_threads=16,
    torch_version="2.13.0",
    total_ram_bytes=128 * GIB,
    free_ram_bytes=100 * GIB,
    limited_by_group=False,
    memlock_bytes=None,
    idle_gpus=(),
    store=HEALTHY_STORE,
)
GPU = Accelerator("Test GPU", 1, 80 * GIB, 79 * GIB)


def rate(per_s: float, amount: float = GIB) -> Sample:
    return Sample.of(amount, [amount / per_s])


def on_cpu(found: dict[str, Any] | None = None, **facts: Any) -> Examination:
    """A healthy CPU, with changed facts and changed findings."""
    entries: dict[str, Any] = {
        "matmul": {"fp32": rate(1e12), "bf16": rate(2e12), "fp64": rate(5e11)},
        "copy": rate(40e9),
        "fft": rate(50e9),
        "links": links(down=8e9, up=500e9, both=20e9),
        "disk": DiskFigures(GIB, 2e9, 4e9, cache_was_emptied=True),
    }
    return Examination(dataclasses.replace(HEALTHY, **facts), **(entries | (found or {})))


def on_gpu(found: dict[str, Any] | None = None, **facts: Any) -> Examination:
    """A healthy accelerator, with changed facts and changed findings."""
    entries = {
        "matmul": {"fp32": rate(5e13), "bf16": rate(8e14)},
        "copy": rate(3e12),
        "pinning": Pinning(256 * MIB, 0.2, None),
        "links": links(down=25e9, up=25e9, both=45e9),
    }
    return on_cpu(entries | (found or {}), **({"accelerator": GPU} | facts))


def links(down: float, up: float, both: float) -> LinkFigures:
    """Copies of 64 MiB at these rates; each copy of 64 KiB costs 10 us besides its bytes."""
    small = 64 * 2**10
    ways = [
        {small: Sample.of(small, [small / way + 10e-6]), 64 * MIB: rate(way, 64 * MIB)}
        for way in (down, up)
    ]
    return LinkFigures(*ways, rate(both))
