"""What reads the stacks of threads keeps nothing alive that is in them."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ebbtide.devices.process import variables_of, visit_frames
from ebbtide.observe.owners import find_holders
from ebbtide.weights.parameters import running_modules


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def read_all_variables() -> None:
    visit_frames(lambda frame: variables_of(frame) and None)


def search_for_holders() -> None:
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    addresses = {each.untyped_storage()._cdata for each in tensors}
    del tensors
    names = [found.holder for found in find_holders(addresses)]
    assert "the variable kept in delete_after() (test_frames.py)" in names


def search_in_a_module() -> None:
    class Searching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self in running_modules()
            return x

    Searching()(torch.ones(1))


SEARCHES = [read_all_variables, search_for_holders, search_in_a_module]


@pytest.mark.parametrize("search", SEARCHES)
def test_what_a_function_deletes_after_a_search_is_freed(search: Callable[[], None]) -> None:
    def delete_after() -> bool:
        kept: Any = torch.ones(3)
        reference = weakref.ref(kept)
        search()
        del kept
        return reference() is None

    with no_collection():
        assert delete_after()


@pytest.mark.parametrize("search", SEARCHES)
def test_what_a_function_held_that_searched_is_freed_when_it_returns(
    search: Callable[[], None],
) -> None:
    def delete_after() -> Callable[[], object]:
        kept = torch.ones(3)
        search()
        return weakref.ref(kept)

    with no_collection():
        assert delete_after()() is None
