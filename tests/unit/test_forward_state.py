"""What a forward begins with is put back before it is repeated."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ebbtide.runtime.module_state import ForwardState


class Model(nn.Module):
    """Its forward changes all that can be put back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("drawn", torch.zeros(3))
        self.register_buffer("nothing", None)
        self.num_calls = 0
        self.average = torch.zeros(2)
        self.list: list[int] = []
        self.dict: dict[int, int] = {}
        self.set: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.average.add_(1)
        self.list.append(1)
        self.dict[1] = 2
        self.set.add(3)
        self.new = self.num_calls
        self.linear.eval()
        self.drawn = torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()])
        return self.norm(self.linear(x)) * self.drawn.sum()  # type: ignore[no-any-return]


def found(model: Model) -> list[Any]:
    names = ("num_calls", "list", "dict", "set")
    attributes = {name: copy.copy(getattr(model, name)) for name in names}
    buffers = [each.tolist() for each in (*model.buffers(), model.average)]
    return [attributes, buffers, model.linear.training, getattr(model, "new", None)]


def test_a_repeated_forward_is_the_same_one() -> None:
    model, x = Model(), torch.rand(5, 4)
    drawn, norm = model.drawn, model.norm.running_mean
    list_, before = model.list, found(model)
    state = ForwardState(model, (x,), {})
    first, after = model(x), found(model)
    assert before != after
    assert state.can_be_put_back()
    state.put_back()
    assert found(model) == before
    assert model.drawn is drawn and model.norm.running_mean is norm and model.list is list_
    assert torch.equal(model(x), first)
    assert found(model) == after


class Case(NamedTuple):
    x: Tensor
    model: Model
    more: dict[str, Any]


def change_input(case: Case) -> None:
    case.x.add_(1)


def change_parameter(case: Case) -> None:
    with torch.no_grad():
        case.model.linear.weight.add_(1)


def change_large_buffer(case: Case) -> None:
    case.model.large.add_(1)


def change_large_attribute(case: Case) -> None:
    case.model.averages[0].add_(1)


def change_container(case: Case) -> None:
    case.more["masks"].pop()


def exchange_in_container(case: Case) -> None:
    case.more["masks"][0] = torch.zeros(4)


def make_gradient(case: Case) -> None:
    case.model(case.x).sum().backward()


def add_to_gradient(case: Case) -> None:
    case.model.norm.weight.grad += 1


@pytest.mark.parametrize(
    "change",
    [
        change_input,
        change_parameter,
        change_large_buffer,
        change_large_attribute,
        change_container,
        exchange_in_container,
        make_gradient,
        add_to_gradient,
    ],
)
def test_what_cannot_be_put_back_is_seen(change: Callable[[Case], None]) -> None:
    case = Case(torch.rand(5, 4), Model(), {"masks": [torch.ones(4)]})
    case.model.register_buffer("large", torch.zeros(2**18 + 1))
    case.model.averages = [torch.zeros(2**14 + 1)]
    case.model.norm.weight.grad = torch.zeros(4)
    state = ForwardState(case.model, (case.x,), case.more)
    assert state.can_be_put_back()
    change(case)
    assert not state.can_be_put_back()


def test_a_forward_that_fills_a_cache_of_transformers_is_not_repeated() -> None:
    cache = type("Cache", (), {"__module__": "transformers.cache_utils"})()
    assert not ForwardState(Model(), (torch.rand(5, 4),), {"cache": cache}).can_be_put_back()


def test_one_of_several_processes_repeats_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    state = ForwardState(Model(), (torch.rand(5, 4),), {})
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert state.can_be_put_back()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert not state.can_be_put_back()
