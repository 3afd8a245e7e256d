"""Profiles a training step from the record of one that ran with everything offloaded.

[Note: recorded profile] Some models cannot run with fake tensors: their code looks at values, they
are sharded, or they cannot be copied. What autograd saved in a step is on record anyway: sizes, who
shares what, and what could leave. The record does not tell how much memory the passes need beside
that, which `ebbtide.budgeting` measures, nor what the input of a layer is; so no plan for such a
profile recomputes. Work between layers belongs behind the last layer that had saved something.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from ebbtide.errors import PolicyError
from ebbtide.planning.step_profile import LayerProfile, SavedStorage, StepProfile, StorageId
from ebbtide.tracing.trace import Trace


class RecordedStorage(Protocol):
    """What is on record of a storage; `ebbtide.reports.inspection` documents the attributes."""

    @property
    def layer(self) -> int | None: ...

    @property
    def number(self) -> int: ...

    @property
    def microbatch(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def decision(self) -> str: ...

    @property
    def shared_by(self) -> tuple[int | None, ...]: ...


class _Part(NamedTuple):
    """One call of a layer, or the work after it. Call -1 is what comes before the first one."""

    call: int
    inside: bool


def profile_recorded_step(records: Iterable[RecordedStorage], trace: Trace) -> StepProfile:
    """Profile a step that ran with everything offloaded. See [Note: recorded profile].

    Args:
        records: what autograd saved, in the order in which it did so.
        trace: which layers ran.

    Returns:
        The profile, without seconds and working memory.

    Raises:
        PolicyError: no layer ran.
    """
    names = {
        event.layer: event.name
        for event in trace.events
        if event.what == "forward" and event.layer is not None and not event.microbatch
    }
    placed = _with_parts(each for each in records if not each.microbatch)
    if not names or sorted(names) != list(range(len(names))):
        raise PolicyError("the model called none of its layers; name modules that it calls")
    used = {part for _, part in placed}
    every = [_Part(call, inside) for call in range(-1, len(names)) for inside in (True, False)]
    parts = [each for each in every if each in used or (each.inside and each.call >= 0)]
    indices = {part: index for index, part in enumerate(parts)}
    storages: list[list[SavedStorage]] = [[] for _ in parts]
    again: list[tuple[int, int, StorageId]] = []
    for record, part in placed:
        index, number = indices[part], len(storages[indices[part]])
        storages[index].append(
            SavedStorage(
                number=number, size_bytes=record.size_bytes, may_leave=record.decision != "keep"
            )
        )
        name, size_bytes = StorageId(index, number), record.size_bytes
        sharing = (indices[_Part(call, True)] for call in record.shared_by if call is not None)
        again += ((other, size_bytes, name) for other in sharing if other > index)
    for index, size_bytes, first in again:
        number = len(storages[index])
        storages[index].append(SavedStorage(number=number, size_bytes=size_bytes, same_as=first))
    return StepProfile(
        layers=tuple(
            LayerProfile(
                name=_name(part, names),
                between=not part.inside,
                forward_s=0.0,
                backward_s=0.0,
                storages=tuple(saved),
                may_recompute=False,
            )
            for part, saved in zip(parts, storages, strict=True)
        )
    )


def _with_parts(records: Iterable[RecordedStorage]) -> list[tuple[RecordedStorage, _Part]]:
    """Return each record with the part of the forward that saved it first."""
    found = []
    latest = -1
    for record in records:
        if record.layer is None:
            found.append((record, _Part(latest, inside=False)))
        else:
            latest = max(latest, record.layer)
            found.append((record, _Part(record.layer, inside=True)))
    return found


def _name(part: _Part, names: Mapping[int, str]) -> str:
    if part.call < 0:
        return "before layers"
    return names[part.call] if part.inside else f"after {names[part.call]}"
