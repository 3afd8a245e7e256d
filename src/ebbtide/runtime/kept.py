"""Counting what stays on the device, at a price that a small tensor can bear."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from torch import Tensor

from ebbtide.runtime.account import Account

if TYPE_CHECKING:
    from ebbtide.runtime.session import Session


@final
class KeptStorages:
    """The large storages that stay on the device. Its session calls it with the lock held.

    Args:
        account: told of the bytes that they hold.

    Attributes:
        holders: by the address of a storage, how many saved tensors hold it, and the bytes counted.
        size_bytes: that are held, those of small tensors among them.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self.holders: dict[int, tuple[int, int]] = {}
        self.size_bytes = 0

    def add(self, address: int, size_bytes: int) -> None:
        """One more saved tensor holds a storage; it counts once."""
        holders, counted_bytes = self.holders.get(address, (0, size_bytes))
        if not holders:
            self.count(counted_bytes)
        self.holders[address] = (holders + 1, counted_bytes)

    def forget(self, address: int) -> None:
        """One saved tensor less holds it."""
        holders, counted_bytes = self.holders.pop(address)
        if holders > 1:
            self.holders[address] = (holders - 1, counted_bytes)
        else:
            self.discount(counted_bytes)

    def count(self, size_bytes: int) -> None:
        """So many bytes stay on the device."""
        self.size_bytes += size_bytes
        self._account.meter.kept_bytes += size_bytes
        self._account.take(size_bytes)

    def discount(self, size_bytes: int) -> None:
        """So many bytes are held no longer."""
        self.size_bytes -= size_bytes
        self._account.give(size_bytes)


@final
class SmallKept:
    """The small tensors that one forward left on the device.

    They are thousands, so none of them announces its own end: every handle refers to this object,
    and when the last of them has died, so does it, and the session hears of it once. Until then all
    of them count as held.

    Attributes:
        pointers: to the memory counted, all of which handles keep alive.
        size_bytes: what they hold together.
    """

    __slots__ = ("_session", "pointers", "size_bytes")

    def __init__(self, session: Session) -> None:
        self._session = session
        self.pointers: set[int] = set()
        self.size_bytes = 0

    def __del__(self) -> None:
        if self.pointers:
            self._session.forget_small(self.size_bytes)


@final
class LargeKept:
    """One large tensor that stays on the device; its end is announced.

    Args:
        session: that counts it.
        tensor: itself, detached.
        version: at which it was saved.
        address: of its storage.
        size_bytes: of the storage.
    """

    __slots__ = ("__weakref__", "_address", "_log", "_session", "tensor", "version")

    def __init__(
        self, session: Session, tensor: Tensor, version: int, address: int, size_bytes: int
    ) -> None:
        self.tensor = tensor
        self.version = version
        self._log = session.keep(address, size_bytes)
        self._address = address
        self._session = session

    def note_use(self) -> None:
        """Backward is at work on what was kept: time to bring back what left before it."""
        self._session.note_backward(self._log)

    def __del__(self) -> None:
        self._session.forget(None, self._address)
