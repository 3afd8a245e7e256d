"""The variables that hold a tensor are found and named."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ebbtide.observe.owners import HeldTensor, find_holders

pytestmark = pytest.mark.slow


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


class Plain:
    """An object whose attributes Python keeps without a dict."""


class Slotted:
    __slots__ = ("kept",)


def in_a_plain_object(tensor: torch.Tensor) -> Any:
    holder = Plain()
    holder.kept = tensor  # type: ignore[attr-defined]
    return holder


def in_a_module(tensor: torch.Tensor) -> Any:
    holder = nn.Linear(2, 2)
    holder.kept = tensor
    return holder


def in_a_buffer(tensor: torch.Tensor) -> Any:
    holder = nn.Linear(2, 2)
    holder.register_buffer("kept", tensor)
    return holder


def in_a_list_of_an_object(tensor: torch.Tensor) -> Any:
    holder = Plain()
    holder.kept = [None, tensor]  # type: ignore[attr-defined]
    return holder


def in_a_dict_of_an_object(tensor: torch.Tensor) -> Any:
    holder = Plain()
    holder.kept = {"last": tensor}  # type: ignore[attr-defined]
    return holder


def in_slots(tensor: torch.Tensor) -> Any:
    holder = Slotted()
    holder.kept = tensor
    return holder


def in_a_closure(tensor: torch.Tensor) -> Any:
    return lambda: tensor


WAYS: list[tuple[Callable[[torch.Tensor], Any], str]] = [
    (in_a_plain_object, "the attribute kept of a Plain"),
    (in_a_module, "the attribute kept of a Linear"),
    (in_a_buffer, "the attribute _buffers['kept'] of a Linear"),
    (in_a_list_of_an_object, "the attribute kept[1] of a Plain"),
    (in_a_dict_of_an_object, "the attribute kept['last'] of a Plain"),
    (in_slots, "an object of the type Slotted"),
    (in_a_closure, "a variable that an inner function uses"),
    (lambda tensor: {"a": [[tensor]]}, "a list of 1"),
    (lambda tensor: [{"a": tensor}], "a dict under 'a'"),
    (lambda tensor: deque([tensor]), "an object of the type deque"),
]


def hold_a_tensor(hold: Callable[[torch.Tensor], Any]) -> tuple[list[Any], int]:
    """Return what holds a tensor, inside a list, and the address of the tensor's storage."""
    tensor = torch.ones(4)
    return [hold(tensor)], address(tensor)


@pytest.mark.parametrize("collected", [False, True], ids=["young", "collected"])
@pytest.mark.parametrize(("hold", "name"), WAYS, ids=[name for _, name in WAYS])
def test_who_holds_a_tensor_is_named(
    hold: Callable[[torch.Tensor], Any], name: str, collected: bool
) -> None:
    """A collection changes the order in which Python lists what refers to a tensor."""
    holder, wanted = hold_a_tensor(hold)
    if collected:
        gc.collect()
    (found,) = find_holders({wanted})
    assert (found.holder, found.shape) == (name, (4,))
    del holder
    assert find_holders({wanted}) == []


def test_a_view_holds_the_whole_storage() -> None:
    part = torch.ones(1000)[:2]
    (found,) = find_holders({address(part)})
    assert (found.shape, found.size_bytes) == ((2,), 4000)


def test_nothing_is_found_for_a_storage_that_is_gone() -> None:
    address = torch.ones(5).untyped_storage()._cdata + 1
    assert find_holders({address}) == []


@pytest.mark.timeout(60)
def test_of_thousands_of_tensors_the_largest_are_named() -> None:
    """Asking Python once for each of them took minutes."""

    class Keeper:
        def __init__(self) -> None:
            self.kept = [torch.ones(i + 1) for i in range(3000)]
            self.by_number = {i: torch.ones(i + 1) for i in range(3000)}
            self.owners = [in_a_plain_object(torch.ones(i + 1)) for i in range(3000)]

    def keep() -> list[Keeper]:
        return [Keeper()]

    (keeper,) = held = keep()
    wanted = [*keeper.kept, *keeper.by_number.values(), *(each.kept for each in keeper.owners)]
    addresses = {address(each) for each in wanted}
    del keeper, wanted
    found = find_holders(addresses)
    assert {each.holder for each in found if each.shape == (3000,)} == {
        "the attribute kept[2999] of a Keeper",
        "the attribute by_number[2999] of a Keeper",
        "the attribute kept of a Plain",
    }
    del held


@pytest.mark.parametrize("first", ["whole", "part"])
def test_a_storage_is_named_once_by_its_variable_or_its_first_place(first: str) -> None:
    whole = torch.ones(100)
    kept = {"whole": whole, "part": whole[:10]}
    holder = in_a_module(kept[first])
    (found,) = find_holders({address(whole)})
    assert found.holder.startswith("the variable ")
    wanted = address(whole)
    twice = [in_a_list_of_an_object(kept[first])]
    twice[0].kept += [kept[first], whole.view(10, 10)]
    del whole, holder
    kept.clear()
    (found,) = find_holders({wanted})
    assert found.holder in ("the attribute kept[1] of a Plain", "the attribute kept[3] of a Plain")
    assert found.size_bytes == 400
