"""Profiles a training step from the record of one that has run.

[Note: recorded profile] While a program trains, nothing of it runs for the sake of a plan: the
profile is the record of its first step. What autograd saved is on record with sizes, who shares
what, what can leave, and what rebuilt it; so are the inputs of each layer's call, which it saves if
it is recomputed. The record has no seconds and no working memory: these are measured. Work between
layers belongs behind the last layer that had saved something.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from ebbtide.errors import PolicyError
from ebbtide.planning.hardware import Hardware
from ebbtide.planning.step_profile import LayerProfile, SavedStorage, StepProfile, StorageId

_EngineName = tuple[int | None, int]
"""Number of the layer's call, None outside layers, and of the storage in it."""


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
    def rebuilt_from(self) -> tuple[_EngineName, ...]: ...

    @property
    def shared_by(self) -> tuple[int | None, ...]: ...


class RecordedCall(NamedTuple):
    """What is on record of one call of a layer.

    Attributes:
        name: name of its module.
        input_bytes: size of its input tensors, without what the loop holds and parameters.
        source: the saved storage that is its only input, by the engine's name; None if there are
            several inputs, or nothing has saved it.
        changes_input: whether it changes an input in place, so that it cannot run again.
    """

    name: str
    input_bytes: int = 0
    source: _EngineName | None = None
    changes_input: bool = False


class _Part(NamedTuple):
    """One call of a layer, or the work after it. Call -1 is what comes before the first one."""

    call: int
    inside: bool


def profile_recorded_step(
    records: Iterable[RecordedStorage],
    calls: Sequence[RecordedCall],
    hardware: Hardware,
    *,
    min_bytes: int,
    keeps_all: bool = False,
) -> StepProfile:
    """Return the profile of a step that has run. See [Note: recorded profile].

    Args:
        records: what autograd saved, in the order in which it did so. What could leave did, or was
            rebuilt.
        calls: the calls of layers in the forward.
        hardware: the machine, for estimates of how long rebuilding takes.
        min_bytes: what is smaller is not on record.
        keeps_all: whether what could leave stayed instead.

    Returns:
        The profile, without seconds and working memory.

    Raises:
        PolicyError: no layer ran.
    """
    if not calls:
        raise PolicyError("the model called none of its layers; name modules that it calls")
    placed = _with_parts(each for each in records if not each.microbatch)
    used = {part for _, part in placed}
    every = [_Part(call, inside) for call in range(-1, len(calls)) for inside in (True, False)]
    parts = [each for each in every if each in used or (each.inside and each.call >= 0)]
    indices = {part: index for index, part in enumerate(parts)}
    storages: list[list[SavedStorage]] = [[] for _ in parts]
    names: dict[_EngineName, StorageId] = {}
    again: list[tuple[int, StorageId]] = []
    for record, part in placed:
        engine_name, index = (record.layer, record.number), indices[part]
        known = names.get(engine_name)
        if known is not None:  # another view of the same storage
            storages[index][known.number] = _with_more(storages[index][known.number], record)
        else:
            known = names[engine_name] = StorageId(index, len(storages[index]))
            sources = tuple(names[each] for each in record.rebuilt_from if each in names)
            may_leave = keeps_all or record.decision != "keep"
            storages[index].append(
                _saved(record, known.number, sources, hardware, may_leave=may_leave)
            )
        sharing = (indices[_Part(call, True)] for call in record.shared_by if call is not None)
        again += ((other, known) for other in sharing if other > index)
    for index, first in dict.fromkeys(again):
        size_bytes = storages[first.layer][first.number].size_bytes
        shared = SavedStorage(number=len(storages[index]), size_bytes=size_bytes, same_as=first)
        storages[index].append(shared)
    layers = (
        _layer(part, index, calls, tuple(saved), names, storages)
        for index, (part, saved) in enumerate(zip(parts, storages, strict=True))
    )
    return StepProfile(layers=tuple(layers), min_bytes=min_bytes)


def _saved(
    record: RecordedStorage,
    number: int,
    sources: tuple[StorageId, ...],
    hardware: Hardware,
    *,
    may_leave: bool,
) -> SavedStorage:
    """Return a storage at its first save."""
    rebuild_s = None
    if sources:  # it is read and written about once for each of them
        traffic_bytes = (1 + len(sources)) * record.size_bytes
        rebuild_s = traffic_bytes / hardware.device_memory_bytes_per_s
    return SavedStorage(
        number=number,
        size_bytes=record.size_bytes,
        may_leave=may_leave,
        sources=sources,
        rebuild_s=rebuild_s,
    )


def _with_more(storage: SavedStorage, record: RecordedStorage) -> SavedStorage:
    size_bytes = storage.size_bytes + record.size_bytes
    may_leave = storage.may_leave and record.decision != "keep"
    return SavedStorage(number=storage.number, size_bytes=size_bytes, may_leave=may_leave)


def _layer(
    part: _Part,
    index: int,
    calls: Sequence[RecordedCall],
    saved: tuple[SavedStorage, ...],
    names: dict[_EngineName, StorageId],
    storages: Sequence[Sequence[SavedStorage]],
) -> LayerProfile:
    if not part.inside:
        name = f"after {calls[part.call].name}" if part.call >= 0 else "before layers"
        return LayerProfile(
            name=name,
            between=True,
            forward_s=0.0,
            backward_s=0.0,
            storages=saved,
            may_recompute=False,
        )
    call = calls[part.call]
    source = None if call.source is None else names.get(call.source)
    if source is not None:
        is_whole = storages[source.layer][source.number].size_bytes == call.input_bytes
        source = source if source.layer <= index and is_whole else None
    return LayerProfile(
        name=call.name,
        forward_s=0.0,
        backward_s=0.0,
        input_bytes=call.input_bytes,
        input_same_as=source,
        storages=saved,
        may_recompute=not call.changes_input,
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
