"""Advice on what slows ebbtide on a machine. Each piece names the evidence that it rests on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ebbtide.doctor.examination import Examination
from ebbtide.doctor.machine_facts import another_disk
from ebbtide.interface.display import count
from ebbtide.memory import freed_memory
from ebbtide.units import format_size

GIB: Final = 2**30
_NEARLY_FULL = 0.85  # of a control group's memory
_FEW_CORES = 4
_SLOW_LINK = 0.55  # of the slower direction; both at once below this are no faster than in turn
_FAULTS = 2.0  # fresh memory this much slower than touched memory is worth a word
_IDLE = 0.75  # of the cores that this process may use
_SLOW_HALF = 0.5  # of float32
_SLOW_PIN_S_PER_GIB = 1.0


def advise(
    found: Examination, other_disk: Callable[[Path], Path | None] = another_disk
) -> list[str]:
    """Return advice in plain sentences, what prevents offloading first.

    Args:
        found: the examination.
        other_disk: finds a directory on another disk than the given one.
    """
    return [
        *_on_the_store(found, other_disk),
        *_on_the_device(found),
        *_on_pinning(found),
        *_on_the_link(found),
        *_on_memory(found),
        *_on_cores(found),
        *_on_types(found),
        *_on_other_programs(found),
    ]


def _on_the_store(found: Examination, other_disk: Callable[[Path], Path | None]) -> Iterator[str]:
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
        other = other_disk(store.path)
        better = f'store="disk:{other}"' if other else 'store="disk:/a/directory/on/a/disk"'
        yield (
            f"{store.path} is a {store.filesystem}: its files are kept in RAM, so offloading there "
            f"frees no RAM{used_for}. Use {better}."
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


def _on_the_link(found: Examination) -> Iterator[str]:
    accelerator = found.facts.accelerator
    if accelerator is not None and accelerator.lanes is not None:
        now, most = accelerator.lanes
        if now < most:
            yield (
                f"The device uses {now} of its {most} PCIe lanes, so copies have {now / most:.0%} "
                f"of the bandwidth that it could have. Move it to a slot with {most} lanes, or "
                f"take out the card that shares them."
            )
    down, up, both = found.down_bytes_per_s, found.up_bytes_per_s, found.both_bytes_per_s
    if down is None or up is None or both is None or found.on_cpu:
        return
    if both < _SLOW_LINK * (down + up):
        yield (
            f"Both ways at once the link moves {both / 1e9:.1f} GB/s, of {(down + up) / 1e9:.1f} "
            f"that its directions have alone. Steps that offload and reload at the same time (a "
            f"pipeline's) wait longer than the one-way figures say."
        )


def _on_memory(found: Examination) -> Iterator[str]:
    facts = found.facts
    if facts.group is not None and facts.group.used_bytes > _NEARLY_FULL * facts.group.limit_bytes:
        yield (
            f"The control group of this process (a container or a batch job) uses "
            f"{format_size(facts.group.used_bytes)} of {format_size(facts.group.limit_bytes)}. "
            f"Past the limit the kernel kills the program. Ask for more memory, or set host_budget."
        )
    used_bytes, total_bytes = facts.swap_bytes
    if total_bytes and used_bytes > max(total_bytes // 20, 256 * 2**20):
        yield (
            f"{format_size(used_bytes)} of memory are in swap. Pages that come back from there "
            f"stop a step for as long as the disk takes. End other programs, or use less memory."
        )
    if not found.on_cpu:
        return
    yield from _on_page_faults(found)
    if found.facts.system.startswith("Linux") and not freed_memory.FreedMemory().is_returned:
        yield freed_memory.describe()


def _on_page_faults(found: Examination) -> Iterator[str]:
    facts = found.facts
    if found.fresh is None or not found.fresh[1].durations_s:
        return
    first, again = (entry.best_per_s for entry in found.fresh)
    if again < _FAULTS * first or facts.torch_huge_pages or facts.huge_pages is None:
        return
    cost = f"New memory is written at {first / 1e9:.1f} GB/s and used memory at {again / 1e9:.1f}"
    if facts.huge_pages == "madvise":
        yield (
            f"{cost}: the difference is page faults, which every large tensor pays. Set "
            f"THP_MEM_ALLOC_ENABLE=1 before Python starts, and torch asks for huge pages."
        )
    elif facts.huge_pages == "never":
        yield (
            f"{cost}: the difference is page faults. Transparent huge pages are off here; an "
            f"administrator can allow them: echo madvise > "
            f"/sys/kernel/mm/transparent_hugepage/enabled. Then set THP_MEM_ALLOC_ENABLE=1."
        )


def _on_cores(found: Examination) -> Iterator[str]:
    facts, accelerator = found.facts, found.facts.accelerator
    cores = float(facts.cores)
    if facts.quota_cores is not None and facts.quota_cores < cores:
        cores = facts.quota_cores
        if facts.torch_threads > cores:
            yield (
                f"The control group allows the time of {cores:.3g} cores, and torch runs "
                f"{facts.torch_threads} threads, which then wait for each other. Set "
                f"OMP_NUM_THREADS={max(1, int(cores))}."
            )
    if found.on_cpu and facts.torch_threads <= cores / 2:
        yield (
            f"torch runs {facts.torch_threads} threads on {cores:.3g} cores (OMP_NUM_THREADS?), so "
            f"the figures above are those of {facts.torch_threads}."
        )
    elif found.on_cpu and cores < _FEW_CORES:
        yield (
            f"With {cores:.3g} cores, the threads that write and read files take time from the "
            f"model's own kernels; offload what matters most (ActivationPolicy(num_layers=...))."
        )
    if accelerator is not None and accelerator.near_cores == 0:
        yield (
            f"The device is on NUMA node {accelerator.numa_node}, and this process may use none of "
            f"that node's cores, so its memory traffic crosses between sockets. Start it with "
            f"numactl --cpunodebind={accelerator.numa_node}."
        )


def _on_types(found: Examination) -> Iterator[str]:
    full = found.matmul.get("fp32")
    if full is None or _is_busy(found):  # another program may have held up just one of the types
        return
    for name, word in (("fp16", "float16"), ("bf16", "bfloat16")):
        half = found.matmul.get(name)
        if half is not None and half.best_per_s < _SLOW_HALF * full.best_per_s:
            share = half.best_per_s / full.best_per_s
            yield (
                f"Products of {word} run at {share:.0%} of the speed of float32 here. Mixed "
                f"precision with {word} saves memory and costs time."
            )


def _on_other_programs(found: Examination) -> Iterator[str]:
    if not _is_busy(found) or found.others_cores is None:
        return
    cores = os.cpu_count() or 1
    yield (
        f"Other programs kept {found.others_cores:.1f} of {count(cores, 'core')} busy meanwhile, "
        f"so this machine can do more than the figures above say. Measure again when it is idle."
    )


def _is_busy(found: Examination) -> bool:
    """Whether other programs left too few cores for this one."""
    if found.others_cores is None:
        return False
    return (os.cpu_count() or 1) - found.others_cores <= _IDLE * found.facts.cores
