"""Advice on what slows ebbtide on a machine, and the report of an examination.

Each piece of advice names the evidence that it rests on.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import RenderableType

from ebbtide.stores import measured_memory as freed_memory
from ebbtide.tools.examination import Examination
from ebbtide.tools.layout import columns, digits, indented, labelled, render, scaled
from ebbtide.tools.machine import Sample
from ebbtide.units import count, format_seconds, format_size

_SLOW_PIN_S_PER_GIB = 1.0


def advise(found: Examination) -> list[str]:
    """Return advice in plain sentences, what prevents offloading first."""
    return [
        *_on_the_store(found),
        *_on_the_device(found),
        *_on_pinning(found),
        *_on_the_host(found),
    ]


def _on_the_store(found: Examination) -> Iterator[str]:
    store = found.facts.store
    used_for = "" if found.on_cpu else ', which only store="disk" and "tiered" use'
    failure = found.problems.get("links" if found.on_cpu else "disk")
    if failure is not None:
        reason = failure.partition(";")[0]
        yield (
            f"Nothing can be offloaded to {store.path}{used_for}: {reason}. Name "
            f'a directory that can be written to, with store="disk:/some/dir" or TMPDIR.'
        )
        return
    if store.in_ram:
        yield (
            f"{store.path} is a {store.filesystem}: its files are kept in RAM, so offloading there "
            f'frees no RAM{used_for}. Use store="disk:/a/directory/on/a/disk".'
        )
    elif store.on_network:
        rate = ""
        if found.disk is not None:
            rate = f" It took {found.disk.write_bytes_per_s / 1e9:.2g} GB/s."
        yield (
            f"{store.path} is on another machine ({store.filesystem}).{rate} A local disk is "
            f'usually faster, and disturbs no other users: store="disk:/local/dir".'
        )
    free_bytes = store.free_bytes
    small = free_bytes is not None and free_bytes < found.facts.total_ram_bytes
    if free_bytes is not None and small and found.on_cpu and not store.in_ram:
        yield (
            f"{store.path} has {format_size(free_bytes)} free, less than the RAM of "
            f"{format_size(found.facts.total_ram_bytes)}. A step that offloads more than that "
            f"stops with StoreFullError."
        )


def _on_the_device(found: Examination) -> Iterator[str]:
    if found.facts.idle_gpus:
        vendors = " and ".join(found.facts.idle_gpus)
        yield (
            f"This machine has a GPU by {vendors} that torch {found.facts.torch_version} does not "
            f"see. Install the build of torch for it (pytorch.org/get-started), and its driver."
        )
    accelerator = found.facts.accelerator
    if accelerator is not None and accelerator.free_bytes < accelerator.total_bytes // 2:
        used_bytes = accelerator.total_bytes - accelerator.free_bytes
        yield (
            f"Other programs use {format_size(used_bytes)} of the device's "
            f"{format_size(accelerator.total_bytes)}, and may have slowed the figures above."
        )


def _on_pinning(found: Examination) -> Iterator[str]:
    pinning, memlock = found.pinning, found.facts.memlock_bytes
    if pinning is None:
        return
    if pinning.refusal is not None:
        limit = ""
        if memlock is not None and memlock < pinning.size_bytes:
            limit = f" The limit on locked memory is {format_size(memlock)}; raise it (ulimit -l)."
        yield (
            f"The system refused to page-lock {format_size(pinning.size_bytes)} "
            f"({pinning.refusal}). Copies from pageable memory are slower and do not overlap with "
            f"compute.{limit}"
        )
    elif pinning.seconds_per_gib > _SLOW_PIN_S_PER_GIB:
        yield (
            f"Page-locking takes {pinning.seconds_per_gib:.1f} s for each GiB. ebbtide does it in "
            f"the first step only, so that step is slow."
        )


def _on_the_host(found: Examination) -> Iterator[str]:
    facts = found.facts
    if found.on_cpu and sys.platform == "linux" and not freed_memory.FreedMemory().is_returned:
        yield freed_memory.describe()
    if facts.quota_cores is not None and facts.torch_threads > facts.quota_cores:
        yield (
            f"The control group allows the time of {facts.quota_cores:.3g} cores, and torch runs "
            f"{count(facts.torch_threads, 'thread')}, which then wait for each other. Set "
            f"OMP_NUM_THREADS={max(1, int(facts.quota_cores))}."
        )


# ---- The report of an examination ----

_LABEL_WIDTH: Final = 15
_TABLE_WIDTHS: Final = (31, 14, 14)  # of what is measured, and of its rates
_GIB: Final = 2**30
_WORDS: Final = {
    "fp64": "float64",
    "fp32": "float32",
    "tf32": "float32 in TF32",
    "bf16": "bfloat16",
    "fp16": "float16",
}


def build_report(found: Examination, advice: Sequence[str]) -> str:
    """Return the report.

    Args:
        found: the examination.
        advice: what `advise` says about it.
    """
    parts: list[RenderableType] = ["This machine", labelled(_machine(found), _LABEL_WIDTH), ""]
    parts.append(_table("Compute", "best", "median", _compute(found)))
    parts += [*_links(found), *_disk(found)]
    if found.problems:
        problems = (f"{name}: {why}" for name, why in found.problems.items())
        parts += ["", "Not measured", *map(indented, problems)]
    numbered = [(f"{number}.", text) for number, text in enumerate(advice, 1)]
    parts += ["", "Advice"]
    parts.append(
        labelled(numbered, 2) if advice else "  Nothing was found that slows ebbtide here."
    )
    parts += ["", "What ebbtide can do here", *map(indented, summarize(found))]
    return render(*parts)


def summarize(found: Examination) -> Iterator[str]:
    """Yield what the figures mean for a model, in sentences."""
    if found.rates is None:
        yield "Nothing can be offloaded as the machine is; see the advice."
        return
    down, up, both = found.rates
    yield (
        f"1 GiB of activations leaves in {format_seconds(_GIB / down)} and comes back in "
        f"{format_seconds(_GIB / up)}; 1 GiB each way at once takes "
        f"{format_seconds(2 * _GIB / both)}."
    )
    if found.on_cpu and found.disk is not None and not found.facts.store.in_ram:
        known = "" if found.disk.cache_was_emptied else ", or less fast"
        yield (
            f"That is so while the page cache has room. Beyond it the disk decides: 1 GiB then "
            f"leaves in {format_seconds(_GIB / found.disk.write_bytes_per_s)} and comes back in "
            f"{format_seconds(_GIB / found.disk.read_bytes_per_s)}{known}."
        )
    meanwhile = [
        f"{digits(entry.best_per_s / down)} FLOP of {_WORDS[name]}"
        for name, entry in found.matmul.items()
        if name in ("fp32", "bf16")
    ]
    if meanwhile:
        yield (
            f"While one byte leaves, the device computes {' or '.join(meanwhile)} matrix "
            f"products. A layer that computes less for each byte that it saves waits for the link, "
            f"and one that computes for 100 ms hides {format_size(int(down / 10))}."
        )
    yield "`ebbtide doctor --json` prints these figures for a plan to read."


def _machine(found: Examination) -> Iterator[tuple[str, str]]:
    facts, accelerator, store = found.facts, found.facts.accelerator, found.facts.store
    cores = count(facts.cores, "core")
    if facts.quota_cores is not None:
        cores += f", {facts.quota_cores:.3g} by the control group"
    yield "processor", f"{facts.cpu}, {cores}"
    yield "torch", f"{facts.torch_version}, {count(facts.torch_threads, 'thread')}"
    if accelerator is None:
        yield "device", "the CPU"
    else:
        yield "device", f"{accelerator.name}, 1 of {accelerator.count}"
        total, free = format_size(accelerator.total_bytes), format_size(accelerator.free_bytes)
        yield "device memory", f"{total}, {free} free"
    total, free = format_size(facts.total_ram_bytes), format_size(facts.free_ram_bytes)
    by_group = " (limited by the control group)" if facts.limited_by_group else ""
    yield "RAM", f"{total}, {free} free{by_group}"
    yield "locked memory", _locked(found)
    free = "" if store.free_bytes is None else f", {format_size(store.free_bytes)} free"
    kind = f"{store.filesystem or 'unknown file system'}{', in RAM' if store.in_ram else ''}"
    yield "store's files", f"{store.path} ({kind}){free}"


def _locked(found: Examination) -> str:
    memlock = found.facts.memlock_bytes
    words = "no limit" if memlock is None else f"limit {format_size(memlock)}"
    if found.pinning is not None:
        took = f"locked, {format_seconds(found.pinning.seconds_per_gib)} for each GiB"
        done = took if found.pinning.refusal is None else "refused"
        words += f"; {format_size(found.pinning.size_bytes)} were {done}"
    return words


Row = tuple[str, ...]


def _table(title: str, first: str, second: str, rows: Iterator[Row]) -> RenderableType:
    indented_rows = (("  " + label, *cells) for label, *cells in rows)
    heads = (title, first, second, "")
    return columns(heads, indented_rows, widths=_TABLE_WIDTHS, indent=0)


def _compute(found: Examination) -> Iterator[Row]:
    for name, entry in found.matmul.items():
        yield _rates(f"matmul {_WORDS[name]}", entry, "FLOP/s")
    if found.fft is not None:
        yield _rates("FFT in 2D, float32", found.fft, "FLOP/s")
    if found.copy is not None:
        yield _rates("copy, read + written", found.copy, "B/s")


def _links(found: Examination) -> Iterator[RenderableType]:
    links, rates = found.links, found.rates
    if links is None or rates is None:
        return
    # On a CPU a reload only maps pages, which are read at the speed of memory.
    bound = found.copy.best_per_s if found.on_cpu and found.copy is not None else math.inf
    rows: list[Row] = []
    for size, down in links.down.items():
        up = min(links.up[size].median_per_s, bound)
        rates_of_size = scaled(down.median_per_s, "B/s"), scaled(up, "B/s")
        rows.append((f"copies of {format_size(size)}", *rates_of_size))
    rows += [
        ("both at once, in sum", scaled(rates[2], "B/s")),
        ("each copy besides", format_seconds(links.latency_s)),
    ]
    where = "files in the page cache" if found.on_cpu else "host memory"
    yield ""
    yield _table(f"Link to {where}", "offload", "reload", iter(rows))


def _disk(found: Examination) -> Iterator[RenderableType]:
    disk = found.disk
    if disk is None:
        return
    rates = [scaled(rate, "B/s") for rate in (disk.write_bytes_per_s, disk.read_bytes_per_s)]
    row = (f"{format_size(disk.size_bytes)}, not cached", *rates)
    yield ""
    yield _table("Disk", "write", "read", iter([row]))
    if found.facts.store.in_ram:
        yield "  These are rates of RAM: the file system keeps its files there."
    elif not disk.cache_was_emptied:
        yield "  The page cache could not be emptied, so the disk may read more slowly."


def _rates(label: str, entry: Sample, unit: str) -> Row:
    return label, scaled(entry.best_per_s, unit), scaled(entry.median_per_s, unit), entry.note
