"""What reads the stacks of threads keeps nothing alive that is in them."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ebbtide.observe.owners import find_holders


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def search_for_holders(address: int) -> None:
    (found,) = find_holders({address})
    assert found.holder == "the variable kept in delete_after() (test_frames.py)"


def test_what_a_function_deletes_after_a_search_is_freed() -> None:
    def delete_after() -> bool:
        kept: Any = torch.ones(3)
        reference = weakref.ref(kept)
        search_for_holders(kept.untyped_storage()._cdata)
        del kept
        return reference() is None

    with no_collection():
        assert delete_after()


def test_what_a_function_held_that_searched_is_freed_when_it_returns() -> None:
    def delete_after() -> Callable[[], object]:
        kept = torch.ones(3)
        search_for_holders(kept.untyped_storage()._cdata)
        return weakref.ref(kept)

    with no_collection():
        assert delete_after()() is None
