"""The order in which items are used, learned in one step to predict the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

MOST_USES = 100_000


@final
class AccessOrder:
    """A sequence of uses of numbered items.

    Args:
        items: the numbers of the items, in the order of use; an item used twice is listed twice.
        num_items: number of different items.
    """

    def __init__(self, items: Sequence[int], num_items: int) -> None:
        self.items = items
        self.num_items = num_items
        self._places: list[list[int]] = [[] for _ in range(num_items)]
        for place, item in enumerate(items):
            self._places[item].append(place)

    def __len__(self) -> int:
        return len(self.items)

    def next_use(self, item: int, begin: int) -> int:
        """Return the first place from ``begin`` on that uses the item; the length if none does."""
        if item < self.num_items:
            for place in self._places[item]:
                if place >= begin:
                    return place
        return len(self.items)


@final
class AccessLog:
    """Records the uses of items while following an expected order.

    Args:
        expected: the expected order; None if there is none yet.

    Attributes:
        expected: as given; it may be set later.
        place: place in the expected order of the next use.
        uses: the items used so far, in order; at most `MOST_USES`.
        last: the item that was used last; -1 if none was.
    """

    def __init__(self, expected: AccessOrder | None = None) -> None:
        self.expected = expected
        self.place = 0
        self.uses: list[int] = []
        self.last = -1

    def use(self, item: int, *, from_start: bool = False) -> None:
        """Record a use, and move `place` past the next expected use of the item.

        A repeat of the last use is not recorded. Uses beyond a large number are not recorded
        either: a graph that is retained can have any number of backwards. If no use of the item is
        expected, `place` stays where it is.

        Args:
            item: the item that is used now.
            from_start: whether to search from the start of the order again if no use lies ahead.
        """
        if item == self.last:
            return
        self.last = item
        if len(self.uses) < MOST_USES:
            self.uses.append(item)
        if self.expected is None:
            return
        items = self.expected.items
        end = len(items)
        if self.place < end and items[self.place] == item:  # the item is the expected one
            self.place += 1
            return
        place = self.expected.next_use(item, self.place)
        if place == end and from_start:
            place = self.expected.next_use(item, 0)
        if place < end:
            self.place = place + 1

    def learned(self, num_items: int) -> AccessOrder | None:
        """Return the order of the recorded uses; None if nothing was used.

        Args:
            num_items: number of different items now.
        """
        if not self.uses:
            return None
        known = self.expected
        if known is not None and known.num_items == num_items and known.items == self.uses:
            return known
        return AccessOrder(self.uses, num_items)
