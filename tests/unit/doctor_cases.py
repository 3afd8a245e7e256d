"""Examinations that were never made, for tests of what the doctor says about them."""

from __future__ import annotations

import dataclasses
from typing import Any

from ebbtide.tools.doctor import Examination
from ebbtide.tools.machine import MachineFacts

MIB, GIB = 2**20, 2**30

HEALTHY = MachineFacts(
    cpu="Test CPU",
    cores=16,
    torch_threads=16,
    torch_version="2.13.0",
    total_ram_bytes=128 * GIB,
    free_ram_bytes=100 * GIB,
    limited_by_group=False,
    memlock_bytes=None,
    store="/scratch",
    store_filesystem="ext4",
    store_free_bytes=800 * GIB,
)
GPU = {
    "accelerator": "Test GPU",
    "num_accelerators": 1,
    "accelerator_bytes": 80 * GIB,
    "accelerator_free_bytes": 79 * GIB,
}


def on_cpu(found: dict[str, Any] | None = None, **facts: Any) -> Examination:
    """A healthy CPU, with changed facts and changed findings."""
    entries: dict[str, Any] = {
        "matmul": {"fp32": 1e12, "bf16": 2e12, "fp64": 5e11},
        "copy": 40e9,
        "fft": 50e9,
        "links": links(down=8e9, up=500e9, both=20e9),
        "disk": {"size_bytes": GIB, "write_bytes_per_s": 2e9, "read_bytes_per_s": 4e9},
    }
    return Examination(dataclasses.replace(HEALTHY, **facts), **(entries | (found or {})))


def on_gpu(found: dict[str, Any] | None = None, **facts: Any) -> Examination:
    """A healthy accelerator, with changed facts and changed findings."""
    entries = {
        "matmul": {"fp32": 5e13, "bf16": 8e14},
        "copy": 3e12,
        "pinning": pinning(0.2),
        "links": links(down=25e9, up=25e9, both=45e9),
    }
    return on_cpu(entries | (found or {}), **(GPU | facts))


def pinning(seconds_per_gib: float, refusal: str | None = None) -> dict[str, Any]:
    return {"size_bytes": 256 * MIB, "seconds_per_gib": seconds_per_gib, "refusal": refusal}


def links(down: float, up: float, both: float) -> dict[str, float]:
    """Copies of 64 MiB at these rates; each copy costs 10 us besides its bytes."""
    return {"down": down, "up": up, "both": both, "latency_s": 1e-5, "copy_bytes": 64 * MIB}
