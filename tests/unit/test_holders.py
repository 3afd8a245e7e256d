"""The variables that hold a tensor are found and named."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ebbtide.ownership.holders import HeldTensor, find_holders


def address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def test_local_variables_lists_and_dicts_are_named() -> None:
    alone = torch.ones(100)
    listed = [torch.ones(200), "text"]
    keyed: dict[str, Any] = {"last": torch.ones(300)}
    found = find_holders({address(alone), address(listed[0]), address(keyed["last"])})
    place = "in test_local_variables_lists_and_dicts_are_named() (test_holders.py)"
    assert found == [
        HeldTensor(f"the variable keyed['last'] {place}", (300,), 1200),
        HeldTensor(f"the variable listed[0] {place}", (200,), 800),
        HeldTensor(f"the variable alone {place}", (100,), 400),
    ]


kept_for_later = torch.ones(10)


def test_global_variables_are_named() -> None:
    (found,) = find_holders({address(kept_for_later)})
    assert found.holder.startswith("the variable kept_for_later in ")


def test_attributes_are_named() -> None:
    module = nn.Linear(2, 2)
    module.cache = torch.ones(4)
    (found,) = find_holders({address(module.cache)})
    assert found.holder == "the attribute cache of a Linear"
    assert found.shape == (4,)


def test_what_is_deep_inside_is_said_to_be_in_a_container() -> None:
    deep = {"a": [[torch.ones(3)]]}
    (found,) = find_holders({address(deep["a"][0][0])})
    assert found.holder == "a list of 1"


def test_a_view_holds_the_whole_storage() -> None:
    part = torch.ones(1000)[:2]
    (found,) = find_holders({address(part)})
    assert (found.shape, found.size_bytes) == ((2,), 4000)


def test_nothing_is_found_for_a_storage_that_is_gone() -> None:
    address = torch.ones(5).untyped_storage()._cdata + 1
    assert find_holders({address}) == []
