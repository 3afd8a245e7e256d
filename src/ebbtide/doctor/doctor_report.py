"""The report of an examination, as text of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

from ebbtide.doctor.examination import Examination
from ebbtide.doctor.sampling import Sample
from ebbtide.interface.display import count
from ebbtide.units import format_size

WIDTH: Final = 80
_LABEL = 18
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
    lines = ["This machine", *_machine(found), "", *_compute(found)]
    for section in (_links(found), _disk(found), _problems(found)):
        part = list(section)
        lines += ["", *part] if part else []
    lines += ["", "Advice"]
    if advice:
        for number, text in enumerate(advice, 1):
            lines += _fill(text, f"  {number}. ", "     ")
    else:
        lines.append("  Nothing was found that slows ebbtide here.")
    lines += ["", "What ebbtide can do here"]
    for text in summarize(found):
        lines += _fill(text, "  ", "  ")
    return "\n".join(lines)


def summarize(found: Examination) -> Iterator[str]:
    """Yield what the figures mean for a model, in sentences."""
    down, up, both = found.down_bytes_per_s, found.up_bytes_per_s, found.both_bytes_per_s
    if down is None or up is None or both is None:
        yield "Nothing can be offloaded as the machine is; see the advice."
        return
    yield (
        f"1 GiB of activations leaves in {_seconds(_GIB / down)} and comes back in "
        f"{_seconds(_GIB / up)}; 1 GiB each way at once takes {_seconds(2 * _GIB / both)}."
    )
    if found.on_cpu and found.disk is not None and not found.facts.store.in_ram:
        known = "" if found.disk.read_from_disk else ", or less fast"
        yield (
            f"That is so while the page cache has room. Beyond it the disk decides: 1 GiB then "
            f"leaves in {_seconds(_GIB / found.disk.write_bytes_per_s)} and comes back in "
            f"{_seconds(_GIB / found.disk.read_bytes_per_s)}{known}."
        )
    meanwhile = [
        f"{_number(entry.best_per_s / down)} FLOP of {_WORDS[name]}"
        for name, entry in found.matmul.items()
        if name in ("fp32", "bf16")
    ]
    if meanwhile:
        yield (
            f"While one byte leaves, the device computes {' or '.join(meanwhile)} matrix "
            f"products. A layer that computes less for each byte that it saves waits for the link, "
            f"and one that computes for 100 ms hides {format_size(int(down / 10))}."
        )
    yield _capacity(found)
    yield "`ebbtide doctor --json` prints these figures for a plan to read."


def _capacity(found: Examination) -> str:
    facts = found.facts
    if found.on_cpu:
        if facts.store.free_bytes is None:
            return f"Offloaded bytes go to {facts.store.path}."
        return (
            f"Up to {format_size(facts.store.free_bytes)} can be offloaded to {facts.store.path}."
        )
    room = f"Up to {format_size(facts.free_ram_bytes)} of host memory can hold what is offloaded"
    if found.pinning is None or found.pinning.refusal is not None:
        return f"{room}, in pageable memory."
    seconds = _seconds(found.pinning.seconds_per_gib)
    return f"{room}. The first step page-locks it, at {seconds} for each GiB."


def _machine(found: Examination) -> Iterator[str]:
    facts, accelerator = found.facts, found.facts.accelerator
    cores = count(facts.cores, "core")
    if facts.quota_cores is not None:
        cores += f", {facts.quota_cores:.3g} by the control group"
    yield from _row("processor", f"{facts.cpu}, {cores}")
    yield from _row("torch", f"{facts.torch_version}, {count(facts.torch_threads, 'thread')}")
    if accelerator is None:
        yield from _row("device", "the CPU")
    else:
        lanes = f", {accelerator.lanes[0]} PCIe lanes" if accelerator.lanes else ""
        yield from _row("device", f"{accelerator.name}, 1 of {accelerator.count}{lanes}")
        total, free = (
            format_size(size) for size in (accelerator.total_bytes, accelerator.free_bytes)
        )
        yield from _row("device memory", f"{total}, {free} free")
    total, free = format_size(facts.total_ram_bytes), format_size(facts.free_ram_bytes)
    by_group = "" if facts.group is None else " (limited by the control group)"
    yield from _row("RAM", f"{total}, {free} free{by_group}")
    used, swap = facts.swap_bytes
    yield from _row(
        "swap", f"{format_size(used)} of {format_size(swap)} in use" if swap else "none"
    )
    nodes = f", {count(facts.numa_nodes, 'NUMA node')}" if facts.numa_nodes else ""
    yield from _row("huge pages", f"{facts.huge_pages or 'not known'}{nodes}")
    yield from _row("locked memory", _locked(found))
    store = facts.store
    free = "" if store.free_bytes is None else f", {format_size(store.free_bytes)} free"
    kind = store.filesystem or "unknown file system"
    yield from _row(
        "store's files", f"{store.path} ({kind}{', in RAM' if store.in_ram else ''}){free}"
    )


def _locked(found: Examination) -> str:
    memlock = found.facts.memlock_bytes
    limit = "no limit" if memlock is None else f"limit {format_size(memlock)}"
    if found.pinning is None:
        return f"{limit}; a model on a CPU needs none" if found.on_cpu else limit
    size = format_size(found.pinning.size_bytes)
    if found.pinning.refusal is not None:
        return f"{limit}; {size} were refused"
    seconds = _seconds(found.pinning.seconds_per_gib)
    over = ""
    if memlock is not None and memlock < found.pinning.size_bytes:
        over = ", so the driver is not bound by it"
    return f"{limit}; {size} were locked{over}, {seconds} for each GiB"


def _compute(found: Examination) -> Iterator[str]:
    yield f"{'Compute':<{_LABEL + 10}}{'best':>15}{'median':>15}"
    for name, entry in found.matmul.items():
        yield _rates(f"matmul {_WORDS[name]}", entry, "FLOP/s")
    if found.fft is not None:
        yield _rates("FFT in 2D, float32", found.fft, "FLOP/s")
    if found.copy is not None:
        yield _rates("copy, read + written", found.copy, "B/s")
    if found.fresh is not None:
        yield _rates("write new memory", found.fresh[0], "B/s")
        if found.fresh[1].durations_s:
            yield _rates("write it again", found.fresh[1], "B/s")


def _links(found: Examination) -> Iterator[str]:
    links, both = found.links, found.both_bytes_per_s
    if links is None or both is None:
        return
    where = "files in the page cache" if found.on_cpu else "host memory"
    yield f"{'Link to ' + where:<{_LABEL + 10}}{'offload':>15}{'reload':>15}"
    memory = found.copy.best_per_s if found.on_cpu and found.copy is not None else None
    mapped = False
    for size in links.down:
        up = links.up[size].median_per_s
        text = _rate(up, "B/s")
        if memory is not None and up > memory:
            text, mapped = "mapped", True
        down = _rate(links.down[size].median_per_s, "B/s")
        yield f"  {'copies of ' + format_size(size):<{_LABEL + 8}}{down:>15}{text:>15}"
    yield f"  {'both at once, in sum':<{_LABEL + 8}}{_rate(both, 'B/s'):>15}"
    yield f"  {'each copy besides':<{_LABEL + 8}}{_seconds(links.latency_s):>15}"
    if mapped:
        yield from _fill(
            "Mapped: the reload only maps pages of the file, and the bytes are read where they "
            "are, at the speed of memory.",
            "  ",
            "  ",
        )


def _disk(found: Examination) -> Iterator[str]:
    disk = found.disk
    if disk is None:
        return
    yield f"{'Disk':<{_LABEL + 10}}{'write':>15}{'read':>15}"
    rates = [_rate(rate, "B/s") for rate in (disk.write_bytes_per_s, disk.read_bytes_per_s)]
    label = f"{format_size(disk.size_bytes)}, not cached"
    yield f"  {label:<{_LABEL + 8}}{rates[0]:>15}{rates[1]:>15}"
    if found.facts.store.in_ram:
        yield "  These are rates of RAM: the file system keeps its files there."
    elif not disk.read_from_disk:
        yield "  The page cache could not be emptied, so the disk may read more slowly."


def _problems(found: Examination) -> Iterator[str]:
    if found.problems:
        yield "Not measured"
    for name, why in found.problems.items():
        yield from _fill(f"{name}: {why}", "  ", "    ")


def _row(label: str, text: str) -> Iterator[str]:
    yield from _fill(text, f"  {label:<{_LABEL - 2}}", " " * _LABEL)


def _rates(label: str, entry: Sample, unit: str) -> str:
    best, median = _rate(entry.best_per_s, unit), _rate(entry.median_per_s, unit)
    return f"  {label:<{_LABEL + 8}}{best:>15}{median:>15}  {entry.note}".rstrip()


def _fill(text: str, first: str, later: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False
    )


def _rate(per_s: float, unit: str) -> str:
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if per_s >= size:
            return f"{_number(per_s / size)} {prefix}{unit}"
    return f"{per_s:.3g} {unit}"


def _seconds(duration_s: float) -> str:
    if duration_s >= 0.1:
        return f"{_number(duration_s)} s"
    if duration_s >= 1e-3:
        return f"{_number(duration_s * 1e3)} ms"
    return f"{duration_s * 1e6:.0f} us"


def _number(value: float) -> str:
    """Format a number with three digits, or all of them before the point."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
