"""The figures of a machine that a plan needs: presets, or as `ebbtide doctor` measured them.

The presets are in ``machines.json``: each is about one accelerator and its share of the host, or
about a CPU. Data sheets count gigabytes of 10^9 bytes here, so a card of "80 GB" reports up to 7%
more than its preset. FLOP/s are those of dense matrices; data sheets of NVIDIA print twice as much,
for sparse ones.

A data sheet says what a part can do at most, and a preset what a program gets. Where somebody has
measured and published that, it is the preset's figure. Everything else is estimated as a share of
the data sheet's figure: 0.8 of matrix products, or the share that bfloat16 or float16 ones reach
on the same device; 0.85 of memory and of each direction of the link, 0.6 of both at once (an A100
gets 36 of 63 GB/s, nvbandwidth#11), and half of a disk, as one worker thread does not use the whole
of an NVMe drive. The source of each figure begins with how it is known: ``data sheet``,
``published``, ``assumed`` or ``measured``. `ebbtide doctor` measures all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from ebbtide.documents import check_number, read_as, read_document
from ebbtide.errors import PolicyError

FORMAT: Final = "ebbtide-hardware"
VERSION: Final = 2

_MEASURED: Final = "measured: "  # begins the source of a figure that is

_NAMES: Final = {
    "float64": "matmul_fp64_flops",
    "complex128": "matmul_fp64_flops",
    "float32": "matmul_fp32_flops",
    "complex64": "matmul_fp32_flops",
    "bfloat16": "matmul_bf16_flops",
    "float16": "matmul_fp16_flops",
    "complex32": "matmul_fp16_flops",
}


@final
@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device, its link to the tier below, and that tier.

    Rates count decimal bytes: 25e9 is 25 GB/s.

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
        sources: how each figure is known and where it comes from, by the name of its field, such as
            ``"published: nvbandwidth#11"``.

    Raises:
        PolicyError: a figure is not a positive number, or both ways at once are faster than their
            sum.
    """

    name: str
    computes_on_host: bool = False
    device_memory_bytes: int
    device_memory_bytes_per_s: float
    matmul_fp64_flops: float | None = None
    matmul_fp32_flops: float
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
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise PolicyError(f"name must be text, got {self.name!r}")
        if not isinstance(self.computes_on_host, bool):
            raise PolicyError(
                f"computes_on_host must be True or False, not {self.computes_on_host!r}"
            )
        for figure in FIGURES:
            value = getattr(self, figure)
            if value is not None or figure not in _OPTIONAL:
                whole, may_be_zero = figure.endswith("_bytes"), figure in _MAY_BE_ZERO
                check_number(figure, value, whole=whole, may_be_zero=may_be_zero)
        total = self.h2d_bytes_per_s + self.d2h_bytes_per_s
        if self.duplex_bytes_per_s > total * (1 + 1e-9):
            raise PolicyError(
                f"duplex_bytes_per_s is {self.duplex_bytes_per_s:g}, more than both directions "
                f"have alone ({total:g}); give the sum of what both get when they run at once"
            )

    @classmethod
    def named(cls, name: str) -> Hardware:
        """Return a preset, with what programs get or an estimate of it.

        Args:
            name: such as ``"h100"``; `Hardware.names` lists all.

        Raises:
            PolicyError: there is no preset of this name.
        """
        wanted = re.sub(r"[\s_-]+", "-", name.strip().lower()) if isinstance(name, str) else ""
        for known, preset in _presets().items():
            if wanted in (known, *preset["aliases"]):
                return cls(
                    name=preset["name"],
                    computes_on_host=preset["computes_on_host"],
                    sources={each: source for each, (_, source) in preset["figures"].items()},
                    **{each: value for each, (value, _) in preset["figures"].items()},
                )
        raise PolicyError(
            f"there is no hardware named {name!r}; the names are "
            f"{', '.join(cls.names())}. For this machine, run `ebbtide doctor`"
        )

    @staticmethod
    def names() -> tuple[str, ...]:
        """The names of the presets. Case does not matter, and ``_`` and spaces stand for ``-``."""
        return tuple(_presets())

    @property
    def is_measured(self) -> bool:
        """Whether any figure was measured, as `ebbtide doctor` and training steps do."""
        return any(source.startswith(_MEASURED) for source in self.sources.values())

    def with_measured(self, figures: Mapping[str, Any], how: str) -> Hardware:
        """Return the hardware with figures that were measured.

        Args:
            figures: the figures.
            how: what measured them.
        """
        sources = {**self.sources, **dict.fromkeys(figures, _MEASURED + how)}
        return dataclasses.replace(self, sources=sources, **figures)

    def matmul_flops(self, dtype: object) -> float:
        """Return the FLOP/s of large matrix products.

        Args:
            dtype: a torch dtype or its name. Products of complex numbers are made of products of
                their real type, four each, so they have its rate.

        Raises:
            PolicyError: there is no figure for the type.
        """
        name = str(dtype).removeprefix("torch.")
        figure = _NAMES.get(name)
        if figure is None:
            raise PolicyError(
                f"no figure for products of {name}; there is one for {', '.join(_NAMES)}"
            )
        flops: float | None = getattr(self, figure)
        if flops is None and figure == "matmul_fp64_flops":
            raise PolicyError(f"{self.name} has no figure for products of {name}")
        return self.matmul_fp32_flops if flops is None else flops

    def offload_s(self, size_bytes: float) -> float:
        """Return how long one copy from the device to the tier below takes."""
        return self.link_latency_s + size_bytes / self.d2h_bytes_per_s

    def reload_s(self, size_bytes: float) -> float:
        """Return how long one copy back to the device takes."""
        return self.link_latency_s + size_bytes / self.h2d_bytes_per_s

    def to_json(self) -> str:
        """Return the hardware as text that `from_json` reads."""
        return json.dumps(document(self), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Hardware:
        """Read what `to_json` or ``ebbtide doctor --json`` wrote.

        Raises:
            PolicyError: the text is something else, has keys that are missing or not known, or a
                figure is wrong.
        """
        advice = "`ebbtide doctor --json` writes one where it can measure everything"
        return read_as(cls, read_document(text, FORMAT, VERSION, "hardware", advice))


FIGURES: Final = tuple(
    each.name
    for each in dataclasses.fields(Hardware)
    if each.name not in ("name", "computes_on_host", "sources")
)
"""The names of all figures, in order."""

_OPTIONAL: Final = frozenset(
    each.name for each in dataclasses.fields(Hardware) if each.default is None
)
_MAY_BE_ZERO: Final = ("link_latency_s", "pinned_limit_bytes", "copy_cost_s_per_byte")


def document(hardware: Hardware | None, figures: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the content of a file of hardware.

    Args:
        hardware: the hardware; None if it could not be measured.
        figures: raw figures beside it, for people; `Hardware.from_json` skips them.
    """
    entry = None if hardware is None else dataclasses.asdict(hardware)
    content: dict[str, Any] = {"format": FORMAT, "version": VERSION, "hardware": entry}
    return content if figures is None else {**content, "figures": dict(figures)}


@functools.cache
def _presets() -> dict[str, dict[str, Any]]:
    """Return the presets by name, with each figure as [value, source]."""
    found: dict[str, dict[str, Any]] = json.loads(
        Path(__file__).with_name("machines.json").read_text("utf-8")
    )
    return found
