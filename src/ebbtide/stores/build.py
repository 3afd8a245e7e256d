"""Builds the store for a device and the user's ``store`` argument."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ebbtide.devices.device import AbstractDevice
from ebbtide.errors import PolicyError
from ebbtide.interface.arguments import refuse
from ebbtide.memory.host_limit import HostLimit
from ebbtide.stores.disk import DiskStore
from ebbtide.stores.pinned import PinnedStore
from ebbtide.stores.staged import LEAST_STAGING_BYTES, STAGING_BYTES, StagedDiskStore
from ebbtide.stores.store import AbstractStore
from ebbtide.stores.tiered import TieredStore
from ebbtide.units import format_size

_LOG = logging.getLogger(__name__)

_STORES = 'one of "auto", "host", "disk", "disk:/some/dir", "tiered", "tiered:/some/dir"'
_STAGING_SHARE = 4  # a tiered store's chunks take at most 1/4 of host_budget


def build_store(
    device: AbstractDevice,
    kind: str,
    directory: Path | None,
    budget_bytes: int | None,
    budget_origin: str = "",
) -> AbstractStore:
    """Build the store for a device.

    Args:
        device: the device of the model.
        kind: ``"auto"``, ``"host"``, ``"disk"`` or ``"tiered"``.
        directory: where to create files; None: the system's directory for temporary files.
        budget_bytes: the most host memory to allocate, staging chunks for the disk included.
        budget_origin: the budget that ``budget_bytes`` is a part of, in words; see `HostLimit`.

    Raises:
        PolicyError: the store does not suit the device, the budget is too small, or the directory
            is not writable.
    """
    if device.computes_on_host:
        _check_for_cpu(kind, budget_bytes)
        store: AbstractStore = DiskStore(directory)
    else:
        limit = None if budget_bytes is None else HostLimit(budget_bytes, budget_origin)
        store = _build_for_accelerator(device, kind, directory, limit)
    _LOG.info(
        "store for a model on %s: %s, host_budget=%s, directory of its files: %s",
        device.torch_device,
        type(store).__name__,
        None if budget_bytes is None else format_size(budget_bytes),
        directory or "the system's for temporary files",
    )
    return store


def _build_for_accelerator(
    device: AbstractDevice, kind: str, directory: Path | None, limit: HostLimit | None
) -> AbstractStore:
    budget_bytes, origin = limit or (None, "")
    if kind in ("auto", "host"):
        return PinnedStore(device, budget_bytes, budget_origin=origin)
    share = 1 if kind == "disk" else _STAGING_SHARE
    least_bytes = LEAST_STAGING_BYTES * share
    if budget_bytes is not None and budget_bytes < least_bytes:
        raise PolicyError(
            f"host_budget is {limit}, and what goes to disk goes through host "
            f"memory; allow {format_size(least_bytes)} at least"
        )
    staging_bytes = STAGING_BYTES
    if budget_bytes is not None:
        staging_bytes = min(staging_bytes, budget_bytes // share)
    disk = StagedDiskStore(device, directory, staging_bytes)
    if kind == "disk":
        return disk
    rest_bytes = None if budget_bytes is None else budget_bytes - staging_bytes
    return TieredStore(PinnedStore(device, rest_bytes, budget_origin=origin), disk)


def parse_store(store: str) -> tuple[str, Path | None]:
    """Return the kind of a store and its directory, whose ``~`` is replaced.

    Raises:
        PolicyError: the text cannot be read.
    """
    if not isinstance(store, str):
        advice = f'write store="disk:{store}"' if isinstance(store, os.PathLike) else _STORES
        refuse("store", "text", store, advice)
    kind, colon, directory = store.partition(":")
    if colon and not directory.strip():
        raise PolicyError(f'store={store!r} names no directory; write "{kind}" or "{kind}:/dir"')
    if kind not in ("auto", "host", "disk", "tiered") or (colon and kind not in ("disk", "tiered")):
        raise PolicyError(f"store={store!r} is not {_STORES}")
    try:
        return kind, Path(directory).expanduser() if colon else None
    except RuntimeError:
        raise PolicyError(f"store={store!r}: there is no such home directory") from None


def _check_for_cpu(kind: str, host_budget_bytes: int | None) -> None:
    if kind in ("host", "tiered"):
        raise PolicyError(
            f'store="{kind}" would copy RAM to RAM: the model computes on the CPU, so host memory '
            f'is where its activations are already. Use store="disk" or "auto"'
        )
    if host_budget_bytes is not None:
        raise PolicyError(
            "host_budget bounds the host memory that holds activations of an accelerator; this "
            "model is on the CPU and its activations go to disk. Leave host_budget out"
        )
