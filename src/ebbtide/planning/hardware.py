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

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple, final

from ebbtide.errors import PolicyError

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


# ---- The figures of a machine that a plan needs, from presets or as `ebbtide doctor` measured them

FORMAT: Final = "ebbtide-hardware"
VERSION: Final = 1

_NAMES: Final = {
    "float64": "matmul_fp64_flops",
    "complex128": "matmul_fp64_flops",
    "float32": "matmul_fp32_flops",
    "complex64": "matmul_fp32_flops",
    "bfloat16": "matmul_bf16_flops",
    "float16": "matmul_fp16_flops",
    "complex32": "matmul_fp16_flops",
}


class Kind(Enum):
    """How a figure is known."""

    DATA_SHEET = "data sheet"  # the vendor's peak, which no program reaches
    PUBLISHED = "published"  # somebody has measured it on such a machine
    ASSUMED = "assumed"
    MEASURED = "measured"  # on this machine, by ebbtide doctor


class Source(NamedTuple):
    """Where one figure of a `Hardware` comes from.

    Attributes:
        figure: the field of `Hardware`.
        kind: how the figure is known.
        text: the data sheet, the publication or the measurement.
    """

    figure: str
    kind: Kind
    text: str


@final
@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device, its link to the tier below, and that tier.

    Rates count decimal bytes: 25e9 is 25 GB/s. A data sheet's figures are peaks that no program
    reaches; `sources` says of each figure whether it is one.

    On a CPU the device's memory is RAM, and the link is the way to files: what the store's files
    take and give, through the page cache. The page cache has an end; after it the link is as slow
    as the disk.

    Args:
        name: the machine's name for people.
        computes_on_host: whether the device is the CPU.
        device_memory_bytes: memory of the device.
        device_memory_bytes_per_s: bytes that kernels read and write in that memory in a second. A
            copy within the memory counts twice.
        matmul_fp64_flops: FLOP/s of large matrix products; None: the device does not compute this
            type.
        matmul_fp32_flops: the same for float32, without TF32.
        matmul_tf32_flops: the same for float32 in TF32; None: no faster than float32.
        matmul_bf16_flops: the same for bfloat16; None: no faster than float32.
        matmul_fp16_flops: the same for float16; None: no faster than float32.
        fft_flops: FLOP/s of batched 2D FFTs of real float32, counted as 2.5 n log2 n; None: not
            measured.
        h2d_bytes_per_s: bandwidth of reloads.
        d2h_bytes_per_s: bandwidth of offloads.
        duplex_bytes_per_s: bandwidth of both ways at once, the sum of the two directions.
        link_latency_s: what a copy costs beside its bytes.
        host_memory_bytes: RAM of the host, or this device's share of it.
        pinned_limit_bytes: the most memory that can be page-locked.
        disk_write_bytes_per_s: what the disk takes for as long as one likes; None: not known.
        disk_read_bytes_per_s: what the disk gives, not from the page cache; None: not known.
        copy_cost_s_per_byte: seconds of computing that each byte costs that is copied in one of the
            directions, where copies need the processor and the memory that compute; None: none, as
            an accelerator has engines for copies.
        sources: one source for each figure that is not None.

    Raises:
        PolicyError: a figure is not a positive number or has no source, or both ways at once are
            faster than their sum.
    """

    name: str
    computes_on_host: bool = False
    device_memory_bytes: int
    device_memory_bytes_per_s: float
    matmul_fp64_flops: float | None = None
    matmul_fp32_flops: float
    matmul_tf32_flops: float | None = None
    matmul_bf16_flops: float | None = None
    matmul_fp16_flops: float | None = None
    fft_flops: float | None = None
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    duplex_bytes_per_s: float
    link_latency_s: float
    host_memory_bytes: int
    pinned_limit_bytes: int
    disk_write_bytes_per_s: float | None = None
    disk_read_bytes_per_s: float | None = None
    copy_cost_s_per_byte: float | None = None
    sources: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise PolicyError(f"name must be text, got {self.name!r}")
        if not isinstance(self.computes_on_host, bool):
            raise PolicyError(
                f"computes_on_host must be True or False, not {self.computes_on_host!r}"
            )
        for figure in FIGURES:
            _check_figure(figure, getattr(self, figure))
        total = self.h2d_bytes_per_s + self.d2h_bytes_per_s
        if self.duplex_bytes_per_s > total * (1 + 1e-9):
            raise PolicyError(
                f"duplex_bytes_per_s is {self.duplex_bytes_per_s:g}, more than both directions "
                f"have alone ({total:g}); give the sum of what both get when they run at once"
            )
        self._check_sources()

    def _check_sources(self) -> None:
        sourced = [source.figure for source in self.sources]
        for figure in FIGURES:
            wanted = 0 if getattr(self, figure) is None else 1
            if sourced.count(figure) != wanted:
                raise PolicyError(
                    f"{figure} needs {wanted} source{'' if wanted == 1 else 's'}, got "
                    f"{sourced.count(figure)}; give Source({figure!r}, Kind.ASSUMED, 'why')"
                )
        unknown = sorted(set(sourced) - set(FIGURES))
        if unknown:
            raise PolicyError(f"sources has figures that Hardware has not: {', '.join(unknown)}")

    @classmethod
    def named(cls, name: str, *, achievable: bool = False) -> Hardware:
        """Return a preset.

        Args:
            name: such as ``"h100"``; `Hardware.names` lists all.
            achievable: take what programs were measured to get, or an estimate of it, instead of
                the data sheet's peaks. See [Note: achievable figures] in `planning.presets`.

        Raises:
            PolicyError: there is no preset of this name.
        """
        key = re.sub(r"[\s_-]+", "-", name.strip().lower()) if isinstance(name, str) else ""
        preset = PRESETS.get(ALIASES.get(key, key))
        if preset is None:
            raise PolicyError(
                f"there is no hardware named {name!r}; the names are "
                f"{', '.join(cls.names())}. For this machine, run `ebbtide doctor`"
            )
        return _build(preset, achievable)

    @staticmethod
    def names() -> tuple[str, ...]:
        """The names of the presets."""
        return tuple(PRESETS)

    def source_of(self, figure: str) -> Source:
        """Return the source of one figure, such as ``"h2d_bytes_per_s"``.

        Raises:
            PolicyError: there is no such figure, or it is None.
        """
        for source in self.sources:
            if source.figure == figure:
                return source
        raise PolicyError(f"{self.name} has no figure {figure!r}; see Hardware's fields")

    def matmul_flops(self, dtype: object, *, tf32: bool = False) -> float:
        """Return the FLOP/s of large matrix products.

        Args:
            dtype: a torch dtype or its name. Products of complex numbers are made of products of
                their real type, four each, so they have its rate.
            tf32: whether float32 may be computed in TF32.

        Raises:
            PolicyError: there is no figure for the type.
        """
        name = str(dtype).removeprefix("torch.")
        field = _NAMES.get(name)
        if field is None:
            raise PolicyError(
                f"no figure for products of {name}; there is one for {', '.join(_NAMES)}"
            )
        flops: float | None = getattr(self, field)
        if tf32 and field == "matmul_fp32_flops" and self.matmul_tf32_flops is not None:
            flops = self.matmul_tf32_flops
        if flops is None and field == "matmul_fp64_flops":
            raise PolicyError(f"{self.name} has no figure for products of {name}")
        return self.matmul_fp32_flops if flops is None else flops

    def offload_s(self, size_bytes: float) -> float:
        """Return how long one copy from the device to the tier below takes."""
        return self.link_latency_s + size_bytes / self.d2h_bytes_per_s

    def reload_s(self, size_bytes: float) -> float:
        """Return how long one copy back to the device takes."""
        return self.link_latency_s + size_bytes / self.h2d_bytes_per_s

    def to_json(self, figures: Mapping[str, Any] | None = None) -> str:
        """Return the hardware as text that `from_json` reads.

        Args:
            figures: raw figures to write beside it, for people; `from_json` skips them.
        """
        return json.dumps(document(self, figures), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Hardware:
        """Read what `to_json` or ``ebbtide doctor --json`` wrote.

        Raises:
            PolicyError: the text is something else, has keys that are missing or not known, or a
                figure is wrong.
        """
        entry = _read_document(text)
        sources = entry.pop("sources", {})
        if not isinstance(sources, dict):
            raise PolicyError(f'"sources" must map figures to [kind, text], got {sources!r}')
        fields = {field.name: field for field in dataclasses.fields(cls)}
        fields.pop("sources")
        _refuse_unknown("hardware", entry, fields)
        missing = [
            name
            for name, field in fields.items()
            if field.default is dataclasses.MISSING and name not in entry
        ]
        if missing:
            raise PolicyError(f"the hardware lacks {', '.join(missing)}")
        return cls(**entry, sources=tuple(_read_source(*item) for item in sources.items()))


FIGURES: Final = tuple(
    field.name
    for field in dataclasses.fields(Hardware)
    if field.name not in ("name", "computes_on_host", "sources")
)
"""The names of all figures, in order."""

_OPTIONAL: Final = frozenset(
    field.name for field in dataclasses.fields(Hardware) if field.default is None
)
_MAY_BE_ZERO: Final = ("link_latency_s", "pinned_limit_bytes", "copy_cost_s_per_byte")


def document(hardware: Hardware | None, figures: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the content of a file of hardware.

    Args:
        hardware: the hardware; None if it could not be measured.
        figures: raw figures beside it.
    """
    entry = None
    if hardware is not None:
        entry = {
            field.name: getattr(hardware, field.name)
            for field in dataclasses.fields(hardware)
            if field.name != "sources"
        }
        entry["sources"] = {
            source.figure: [source.kind.value, source.text] for source in hardware.sources
        }
    content: dict[str, Any] = {"format": FORMAT, "version": VERSION, "hardware": entry}
    return content if figures is None else {**content, "figures": dict(figures)}


def _read_document(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, TypeError) as error:
        raise PolicyError(f"this is not the JSON of a Hardware: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise PolicyError(
            f'this is not the JSON of a Hardware: "format" is not {FORMAT!r}. '
            f"`ebbtide doctor --json` writes one"
        )
    version = content.get("version")
    if version != VERSION or isinstance(version, bool):
        raise PolicyError(
            f"this Hardware has version {version!r}, and this ebbtide reads version {VERSION}; "
            f"measure again with `ebbtide doctor --json`"
        )
    _refuse_unknown("file", content, ("format", "version", "hardware", "figures"))
    entry = content.get("hardware")
    if entry is None and isinstance(content.get("figures"), dict):
        problems = content["figures"].get("problems") or {}
        reasons = "; ".join(f"{what}: {why}" for what, why in problems.items())
        raise PolicyError(f"this machine could not be measured in full: {reasons}")
    if not isinstance(entry, dict):
        raise PolicyError(f'"hardware" must be an object, got {entry!r}')
    return dict(entry)


def _refuse_unknown(what: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        hint = _did_you_mean(unknown[0], known)
        raise PolicyError(f"the {what} has unknown keys: {', '.join(unknown)}{hint}")


def _read_source(figure: str, entry: Any) -> Source:
    try:
        kind, text = entry
        return Source(figure, Kind(kind), str(text))
    except (TypeError, ValueError):
        kinds = ", ".join(repr(kind.value) for kind in Kind)
        raise PolicyError(
            f"the source of {figure} must be [kind, text] with a kind of {kinds}; got {entry!r}"
        ) from None


def _check_figure(figure: str, value: Any) -> None:
    if value is None and figure in _OPTIONAL:
        return
    whole = figure.endswith("_bytes")
    kind = "a whole number" if whole else "a number"
    least = "0 or more" if figure in _MAY_BE_ZERO else "more than 0"
    right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if right:
        right = math.isfinite(value) and (value > 0 or (value == 0 and figure in _MAY_BE_ZERO))
    if not right:
        raise PolicyError(f"{figure} must be {kind}, {least}; got {value!r}")


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _build(preset: Preset, achievable: bool) -> Hardware:
    entries = {
        **{name: (Kind.DATA_SHEET, *entry) for name, entry in preset.data_sheet.items()},
        **{name: (Kind.ASSUMED, *entry) for name, entry in preset.assumed.items()},
    }
    if achievable:
        entries = {
            name: _achievable(preset, name, kind, (value, text))
            for name, (kind, value, text) in entries.items()
        }
    values: dict[str, Any] = {name: value for name, (_, value, _) in entries.items()}
    # An estimate of both ways at once is no less than one way alone, and no more than both.
    one_way = values["h2d_bytes_per_s"], values["d2h_bytes_per_s"]
    values["duplex_bytes_per_s"] = min(sum(one_way), max(*one_way, values["duplex_bytes_per_s"]))
    order = [name for name in FIGURES if name in entries]
    return Hardware(
        name=preset.title,
        computes_on_host=preset.computes_on_host,
        sources=tuple(Source(name, entries[name][0], entries[name][2]) for name in order),
        **values,
    )


def _achievable(preset: Preset, figure: str, kind: Kind, entry: Sourced) -> tuple[Kind, float, str]:
    """Return what a program gets of one figure. See [Note: achievable figures]."""
    if figure in preset.achieved:
        value, text = preset.achieved[figure]
        return Kind.PUBLISHED, value, text
    value, text = entry
    share, why = SHARES.get(figure), ""
    if figure.startswith("matmul"):
        share, why = _matmul_share(preset)
    if share is None:
        return kind, value, text
    return Kind.ASSUMED, value * share, f"{share:.2g} of {text}{why}"


def _matmul_share(preset: Preset) -> tuple[float, str]:
    for figure in ("matmul_bf16_flops", "matmul_fp16_flops"):
        if figure in preset.achieved:
            share = preset.achieved[figure][0] / preset.data_sheet[figure][0]
            return share, f", as published for {figure.split('_')[1]}"
    return SHARES["matmul"], ""
