"""Examinations that were never made, for tests of what the doctor says about them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ebbtide.tools.examination import DiskFigures, Examination, LinkFigures, Pinning
from ebbtide.tools.machine import Accelerator, Directory, MachineFacts, Sample

MIB, GIB = 2**20, 2**30

HEALTHY_STORE = Directory(Path("/scratch"), "ext4", 900 * GIB, 800 * GIB)
HEALTHY = MachineFacts(
    system="Linux 6.1 x86_64",
    cpu="Test CPU",
    cores=16,
    quota_cores=None,
    torch_threads=16,
    torch_version="2.13.0",
    total_ram_bytes=128 * GIB,
    free_ram_bytes=100 * GIB,
    group=None,
    swap_bytes=(0, 0),
    memlock_bytes=None,
    huge_pages="always",
    torch_huge_pages=False,
    numa_nodes=1,
    idle_gpus=(),
    store=HEALTHY_STORE,
)
GPU = Accelerator("Test GPU", 1, 80 * GIB, 79 * GIB, (16, 16), 0, 16)


def rate(per_s: float, amount: float = GIB) -> Sample:
    return Sample(amount, (amount / per_s,))


def on_cpu(found: dict[str, Any] | None = None, **facts: Any) -> Examination:
    """A healthy CPU, with changed facts and changed findings."""
    entries: dict[str, Any] = {
        "matmul": {"fp32": rate(1e12), "bf16": rate(2e12), "fp64": rate(5e11)},
        "copy": rate(40e9),
        "fft": rate(50e9),
        "fresh": (rate(20e9), rate(25e9)),
        "links": links(down=8e9, up=500e9, both=20e9),
        "disk": DiskFigures(GIB, GIB / 2e9, GIB / 8e9, GIB / 4e9, 0.0),
        "others_cores": 0.0,
    }
    return Examination(dataclasses.replace(HEALTHY, **facts), **(entries | (found or {})))


def on_gpu(found: dict[str, Any] | None = None, **facts: Any) -> Examination:
    """A healthy accelerator, with changed facts and changed findings."""
    entries = {
        "matmul": {"fp32": rate(5e13), "bf16": rate(8e14)},
        "copy": rate(3e12),
        "fresh": None,
        "pinning": Pinning(256 * MIB, 0.05, None),  # 0.2 s for each GiB
        "links": links(down=25e9, up=25e9, both=45e9),
    }
    return on_cpu(entries | (found or {}), **({"accelerator": GPU} | facts))


def links(down: float, up: float, both: float) -> LinkFigures:
    """Copies of 64 MiB at these rates; each copy of 64 KiB costs 10 us besides its bytes."""
    small = 64 * 2**10
    ways = [
        {small: Sample(small, (small / way + 10e-6,)), 64 * MIB: rate(way, 64 * MIB)}
        for way in (down, up)
    ]
    return LinkFigures(*ways, rate(both))
