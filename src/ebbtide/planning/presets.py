"""Figures of machines that are well known, each with its source. `Hardware.named` reads them.

Every preset is about one accelerator and its share of the host, or about a CPU. Data sheets count
gigabytes of 10^9 bytes here, so a card of "80 GB" reports up to 7% more than its preset. FLOP/s are
those of dense matrices; data sheets of NVIDIA print twice as much, for sparse ones.

[Note: achievable figures] A data sheet says what a part can do at most. Where somebody has measured
and published what a program gets, `achieved` has that figure. Everything else is estimated as a
share of the data sheet's figure (`SHARES`), or as the share that bfloat16 matrices reach on the
same device. The source of each figure says which it is. `ebbtide doctor` measures all of them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

Sourced = tuple[float, str]


class Preset(NamedTuple):
    """One machine.

    Attributes:
        title: its name for people.
        data_sheet: figures of a vendor's data sheet, by field of `Hardware`.
        assumed: figures that no data sheet of the accelerator has.
        achieved: figures that somebody has measured and published.
        computes_on_host: whether the machine is a CPU.
    """

    title: str
    data_sheet: dict[str, Sourced]
    assumed: dict[str, Sourced]
    achieved: dict[str, Sourced]
    computes_on_host: bool = False


SHARES: Final = {
    "matmul": 0.8,
    "device_memory_bytes_per_s": 0.85,
    "h2d_bytes_per_s": 0.85,
    "d2h_bytes_per_s": 0.85,
    "duplex_bytes_per_s": 0.6,
    "disk_write_bytes_per_s": 0.5,
    "disk_read_bytes_per_s": 0.5,
}
"""Shares of the data sheets' figures that are assumed to be achievable. Both ways at once an A100
gets 36 of 63 GB/s (nvbandwidth#11); one worker thread does not use the whole of an NVMe drive."""

_GB, _T = 10**9, 10**12

_PCIE = "PCI Express {} Base Specification: 16 lanes of {} GT/s, 128/130 encoding"
_MAMF = "S. Bekman, Machine Learning Engineering, 'Maximum Achievable Matmul FLOPS', {}"
_STREAM = "no data sheet has it; about what a copy on a stream costs beside its bytes"
_CPU_COPIES = (
    "with all offloaded, steps of `benchmarks.rss` took longer by 0.1 to 0.6 ns for each copied "
    "byte; the more freed memory is returned, the longer"
)
_PINNED = "CUDA and ROCm page-lock as much as the host has"


def _compute(
    source: str,
    *,
    fp64: float,
    fp32: float,
    half: float,
    memory_gb: float,
    memory_gb_per_s: float,
    tf32: float | None = None,
) -> dict[str, Sourced]:
    """Figures of a GPU, in TFLOP/s, GB and GB/s."""
    figures: dict[str, Sourced] = {
        "device_memory_bytes": (round(memory_gb * _GB), source),
        "device_memory_bytes_per_s": (memory_gb_per_s * _GB, source),
        "matmul_fp64_flops": (fp64 * _T, source),
        "matmul_fp32_flops": (fp32 * _T, source),
        "matmul_bf16_flops": (half * _T, source),
        "matmul_fp16_flops": (half * _T, source),
    }
    if tf32 is not None:
        figures["matmul_tf32_flops"] = (tf32 * _T, source)
    return figures


def _link(source: str, each_way_gb_per_s: float, both_gb_per_s: float) -> dict[str, Sourced]:
    return {
        "h2d_bytes_per_s": (each_way_gb_per_s * _GB, source),
        "d2h_bytes_per_s": (each_way_gb_per_s * _GB, source),
        "duplex_bytes_per_s": (both_gb_per_s * _GB, source),
    }


def _host(
    memory_gb: float,
    source: str,
    *,
    drive: str = "one NVMe drive like the Samsung PM9A3 3.84 TB (its data sheet)",
    write_gb_per_s: float = 4.1,
    read_gb_per_s: float = 6.9,
) -> dict[str, Sourced]:
    return {
        "host_memory_bytes": (round(memory_gb * _GB), source),
        "pinned_limit_bytes": (round(memory_gb * _GB), _PINNED),
        "link_latency_s": (10e-6, _STREAM),
        "disk_write_bytes_per_s": (write_gb_per_s * _GB, drive),
        "disk_read_bytes_per_s": (read_gb_per_s * _GB, drive),
    }


_PCIE_4 = _link(_PCIE.format("4.0", 16), 31.5, 63.0)
_PCIE_5 = _link(_PCIE.format("5.0", 32), 63.0, 126.0)

_DESKTOP_DRIVE = "one NVMe drive like the Samsung 990 PRO 2 TB (its data sheet)"
_DESKTOP = _host(
    64, "a desktop computer with 64 GB", drive=_DESKTOP_DRIVE, write_gb_per_s=6.9, read_gb_per_s=7.4
)
_A100_LINK = {
    "h2d_bytes_per_s": (25e9, "NVIDIA/nvbandwidth#11, A100: 25 to 26 GB/s each way"),
    "d2h_bytes_per_s": (25e9, "NVIDIA/nvbandwidth#11, A100: 25 to 26 GB/s each way"),
    "duplex_bytes_per_s": (36e9, "NVIDIA/nvbandwidth#11, A100: 24 down and 12 up at once"),
}
_H100_LINK = {
    "h2d_bytes_per_s": (55.6e9, "NVIDIA's blog on nvbandwidth: 55.63 GB/s host to device"),
}
_A100_BF16 = {"matmul_bf16_flops": (271.2e12, _MAMF.format("A100 SXM: 271.2 of 312 TFLOP/s"))}
_H100_BF16 = {"matmul_bf16_flops": (794.5e12, _MAMF.format("H100 SXM: 794.5 of 989 TFLOP/s"))}
_DGX = "NVIDIA {} data sheet: {} of system memory for 8 GPUs"


def _a100(memory_gb: float, memory_gb_per_s: float, host_gb: float, host: str) -> Preset:
    sheet = _compute(
        "NVIDIA A100 Tensor Core GPU data sheet, A100 SXM (dense)",
        fp64=19.5,
        fp32=19.5,
        tf32=156,
        half=312,
        memory_gb=memory_gb,
        memory_gb_per_s=memory_gb_per_s,
    )
    title = f"NVIDIA A100 SXM {memory_gb:g} GB"
    return Preset(title, sheet | _PCIE_4, _host(host_gb, host), _A100_LINK | _A100_BF16)


def _hopper(
    title: str, source: str, memory_gb: float, memory_gb_per_s: float
) -> dict[str, Sourced]:
    return _compute(
        f"NVIDIA {title} data sheet ({source}dense)",
        fp64=67,
        fp32=67,
        tf32=494.5,
        half=989,
        memory_gb=memory_gb,
        memory_gb_per_s=memory_gb_per_s,
    )


_GRACE = "the memory of the Grace CPU, LPDDR5X of 480 GB"
_C2C = "NVIDIA GH200 data sheet: NVLink-C2C 450 GB/s each way, and LPDDR5X of 512 GB/s for both"
_GRACE_LINK = "G. Schieffer et al. 2024, arXiv:2407.07850: 375 GB/s up, 297 GB/s down"
_RYZEN_FLOPS = "16 cores x 4.5 GHz (base clock) x {} FLOP a cycle, AMD Ryzen 9 7950X data sheet"
_DRIVE_ONLY = f"{_DESKTOP_DRIVE}; the page cache is faster while it has room"

PRESETS: Final[dict[str, Preset]] = {
    "rtx4090": Preset(
        "NVIDIA GeForce RTX 4090",
        _compute(
            "NVIDIA Ada GPU Architecture white paper, RTX 4090 (dense, FP32 accumulate)",
            fp64=1.29,
            fp32=82.6,
            tf32=82.6,
            half=165.2,
            memory_gb=24,
            memory_gb_per_s=1008,
        )
        | _PCIE_4,
        _DESKTOP,
        {
            "matmul_fp16_flops": (158.6e12, "mli/transformers-benchmarks#4: n=8192, 158.6 TFLOP/s"),
            "device_memory_bytes_per_s": (921e9, "krrishnarraj/clpeak#106: 921 GB/s"),
            "h2d_bytes_per_s": (26.3e9, "NVIDIA/nvbandwidth#15, eight RTX 4090: 26.3 GB/s"),
            "d2h_bytes_per_s": (26.8e9, "NVIDIA/nvbandwidth#15, eight RTX 4090: 26.8 GB/s"),
        },
    ),
    "a100-40gb": _a100(40, 1555, 125, _DGX.format("DGX A100", "1 TB")),
    "a100-80gb": _a100(80, 2039, 250, _DGX.format("DGX A100", "2 TB")),
    "h100-sxm": Preset(
        "NVIDIA H100 SXM",
        _hopper("H100 Tensor Core GPU", "H100 SXM, ", 80, 3350) | _PCIE_5,
        _host(250, _DGX.format("DGX H100", "2 TB")),
        _H100_LINK | _H100_BF16,
    ),
    "h100-pcie": Preset(
        "NVIDIA H100 PCIe",
        _compute(
            "NVIDIA H100 Tensor Core GPU data sheet (H100 PCIe, dense)",
            fp64=51,
            fp32=51,
            tf32=378,
            half=756,
            memory_gb=80,
            memory_gb_per_s=2000,
        )
        | _PCIE_5,
        _host(250, "a server with 250 GB for each GPU"),
        _H100_LINK,
    ),
    "h200": Preset(
        "NVIDIA H200 SXM",
        _hopper("H200 Tensor Core GPU", "H200 SXM, ", 141, 4800) | _PCIE_5,
        _host(250, _DGX.format("DGX H200", "2 TB")),
        _H100_LINK | _H100_BF16,
    ),
    "gh200": Preset(
        "NVIDIA GH200 96 GB",
        _hopper("GH200 Grace Hopper Superchip", "HBM3, ", 96, 4000) | _link(_C2C, 450, 512),
        _host(480, _GRACE),
        {
            "matmul_bf16_flops": (828.6e12, _MAMF.format("GH200: 828.6 of 989 TFLOP/s")),
            "device_memory_bytes_per_s": (3.4e12, "arXiv:2407.07850: STREAM 3.4 TB/s"),
            "h2d_bytes_per_s": (375e9, _GRACE_LINK),
            "d2h_bytes_per_s": (297e9, _GRACE_LINK),
        },
    ),
    "gb200": Preset(
        "NVIDIA GB200, one of its two GPUs",
        _compute(
            "NVIDIA GB200 NVL72 data sheet, half of a superchip (dense)",
            fp64=40,
            fp32=80,
            tf32=1250,
            half=2500,
            memory_gb=186,
            memory_gb_per_s=8000,
        )
        | _link(
            "NVIDIA GB200 NVL72 data sheet: NVLink-C2C 900 GB/s and LPDDR5X of 512 GB/s, "
            "shared by two GPUs",
            225,
            256,
        ),
        _host(240, "half of the memory of the Grace CPU, LPDDR5X of 480 GB"),
        {},
    ),
    "mi300x": Preset(
        "AMD Instinct MI300X",
        _compute(
            "AMD Instinct MI300X data sheet (matrix, dense)",
            fp64=163.4,
            fp32=163.4,
            tf32=653.7,
            half=1307.4,
            memory_gb=192,
            memory_gb_per_s=5300,
        )
        | _PCIE_5,
        _host(250, "a server with 2 TB for 8 GPUs"),
        {"matmul_bf16_flops": (668.4e12, _MAMF.format("MI300X: 668.4 of 1307 TFLOP/s"))},
    ),
    "cpu": Preset(
        "AMD Ryzen 9 7950X with an NVMe drive",
        {
            "device_memory_bytes_per_s": (83.2e9, "AMD Ryzen 9 7950X data sheet: 2 x DDR5-5200"),
            "matmul_fp64_flops": (1.152e12, _RYZEN_FLOPS.format(16)),
            "matmul_fp32_flops": (2.304e12, _RYZEN_FLOPS.format(32)),
            "matmul_bf16_flops": (4.608e12, _RYZEN_FLOPS.format(64)),
        },
        {
            "device_memory_bytes": (64 * _GB, "a desktop computer with 64 GB"),
            "host_memory_bytes": (64 * _GB, "the same memory as the device's"),
            "pinned_limit_bytes": (0, "nothing is page-locked for a model on a CPU"),
            "link_latency_s": (50e-6, "about what one write or read of a file costs"),
            "d2h_bytes_per_s": (6.9e9, _DRIVE_ONLY),
            "h2d_bytes_per_s": (7.4e9, _DRIVE_ONLY),
            "duplex_bytes_per_s": (7.4e9, "a drive does no more both ways than one way"),
            "disk_write_bytes_per_s": (6.9e9, _DESKTOP_DRIVE),
            "disk_read_bytes_per_s": (7.4e9, _DESKTOP_DRIVE),
            "copy_cost_s_per_byte": (0.3e-9, _CPU_COPIES),
        },
        {},
        computes_on_host=True,
    ),
}

ALIASES: Final = {
    "4090": "rtx4090",
    "a100": "a100-80gb",
    "a100-40": "a100-40gb",
    "a100-80": "a100-80gb",
    "h100": "h100-sxm",
    "h200-sxm": "h200",
}
"""Shorter names. Case does not matter, and ``_`` and spaces stand for ``-``."""
