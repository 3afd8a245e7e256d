"""The figures of a machine that a plan needs: presets, or as `ebbtide doctor` measured them.

The presets are in ``machines.json``: each is about one accelerator and its share of the host, or
about a CPU. Data sheets count gigabytes of 10^9 bytes here, so a card of "80 GB" reports up to 7%
more than its preset. FLOP/s are those of dense matrices; data sheets of NVIDIA print twice as much,
for sparse ones.

[Note: achievable figures] A data sheet says what a part can do at most. Where somebody has measured
and published what a program gets, the preset has that figure, too. Everything else is estimated as
a share of the data sheet's figure (`SHARES`), or as the share that bfloat16 matrices reach on the
same device. The source of each figure says which it is. `ebbtide doctor` measures all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from ebbtide.errors import PolicyError
from ebbtide.planning.documents import check_number, read_as, read_document

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
        kind: how the figure is known.
        text: the data sheet, the publication or the measurement.
    """

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
        sources: where each figure comes from, by the name of its field.

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
    sources: Mapping[str, Source] = field(default_factory=dict, hash=False)

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
    def named(cls, name: str, *, achievable: bool = False) -> Hardware:
        """Return a preset.

        Args:
            name: such as ``"h100"``; `Hardware.names` lists all.
            achievable: take what programs were measured to get, or an estimate of it, instead of
                the data sheet's peaks. See [Note: achievable figures].

        Raises:
            PolicyError: there is no preset of this name.
        """
        wanted = re.sub(r"[\s_-]+", "-", name.strip().lower()) if isinstance(name, str) else ""
        for known, preset in _presets().items():
            if wanted in (known, *preset["aliases"]):
                return _build(preset, achievable)
        raise PolicyError(
            f"there is no hardware named {name!r}; the names are "
            f"{', '.join(cls.names())}. For this machine, run `ebbtide doctor`"
        )

    @staticmethod
    def names() -> tuple[str, ...]:
        """The names of the presets. Case does not matter, and ``_`` and spaces stand for ``-``."""
        return tuple(_presets())

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
        figure = _NAMES.get(name)
        if figure is None:
            raise PolicyError(
                f"no figure for products of {name}; there is one for {', '.join(_NAMES)}"
            )
        flops: float | None = getattr(self, figure)
        if tf32 and figure == "matmul_fp32_flops" and self.matmul_tf32_flops is not None:
            flops = self.matmul_tf32_flops
        if flops is None and figure == "matmul_fp64_flops":
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
        figures: raw figures beside it.
    """
    entry = None
    if hardware is not None:
        sources = {name: [each.kind.value, each.text] for name, each in hardware.sources.items()}
        entry = {**dataclasses.asdict(hardware), "sources": sources}
    content: dict[str, Any] = {"format": FORMAT, "version": VERSION, "hardware": entry}
    return content if figures is None else {**content, "figures": dict(figures)}


@functools.cache
def _presets() -> dict[str, dict[str, Any]]:
    """Return the presets by name: figures as [value, source] under how they are known."""
    found: dict[str, dict[str, Any]] = json.loads(
        Path(__file__).with_name("machines.json").read_text("utf-8")
    )
    return found


def _build(preset: dict[str, Any], achievable: bool) -> Hardware:
    entries: dict[str, tuple[Kind, float, str]] = {
        name: (kind, *entry)
        for kind in (Kind.DATA_SHEET, Kind.ASSUMED)
        for name, entry in preset[kind.value].items()
    }
    if achievable:
        entries = {name: _achievable(preset, name, *entry) for name, entry in entries.items()}
    values: dict[str, Any] = {name: value for name, (_, value, _) in entries.items()}
    # An estimate of both ways at once is no less than one way alone, and no more than both.
    one_way = values["h2d_bytes_per_s"], values["d2h_bytes_per_s"]
    values["duplex_bytes_per_s"] = min(sum(one_way), max(*one_way, values["duplex_bytes_per_s"]))
    return Hardware(
        name=preset["name"],
        computes_on_host=preset["computes_on_host"],
        sources={name: Source(kind, text) for name, (kind, _, text) in entries.items()},
        **values,
    )


def _achievable(
    preset: dict[str, Any], figure: str, kind: Kind, value: float, text: str
) -> tuple[Kind, float, str]:
    """Return what a program gets of one figure. See [Note: achievable figures]."""
    published = preset[Kind.PUBLISHED.value]
    if figure in published:
        return (Kind.PUBLISHED, *published[figure])
    share, why = SHARES.get(figure), ""
    if figure.startswith("matmul"):
        share = SHARES["matmul"]
        known = (each for each in ("matmul_bf16_flops", "matmul_fp16_flops") if each in published)
        if (measured := next(known, None)) is not None:
            share = published[measured][0] / preset[Kind.DATA_SHEET.value][measured][0]
            why = f", as published for {measured.split('_')[1]}"
    if share is None:
        return kind, value, text
    return Kind.ASSUMED, value * share, f"{share:.2g} of {text}{why}"
