"""`ebbtide run` and `torch.compile`: the same bits and the same graphs, whole and in parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

from run_cases import Net, batch, is_offloaded, make, step, watching

pytestmark = pytest.mark.usefixtures("frozen_imports")

BACKEND = {"backend": "aot_eager", "fullgraph": True}


def as_a_whole(model: Net) -> nn.Module:
    return torch.compile(model, **BACKEND)


def in_place(model: Net) -> nn.Module:
    model.compile(**BACKEND)
    return model


def by_layer(model: Net) -> nn.Module:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, **BACKEND)
    return model


def fresh() -> Net:
    torch._dynamo.reset()
    counters.clear()
    return make()


def train(model: nn.Module) -> list[list[Tensor]]:
    found = [step(model) for _ in range(2)]
    with torch.no_grad():
        return [*found, [model(batch())]]


@pytest.mark.parametrize("compile_it", [as_a_whole, in_place, by_layer])
def test_a_compiled_model_is_found(compile_it: Callable[[Net], nn.Module]) -> None:
    model = compile_it(fresh())
    expected = train(model)
    graphs = counters["stats"]["unique_graphs"]
    with watching() as watched, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # what ebbtide warns of is noted
        # Python 3.13.0 itself; torch 2.15 says so while it compiles.
        warnings.filterwarnings("ignore", "Guards may run slower", RuntimeWarning)
        model = compile_it(fresh())
        found = train(model)
        assert watched.names == ["Net"] and watched.left_alone == [None]
        assert counters["stats"]["unique_graphs"] == graphs
        assert not counters["graph_break"]
        if compile_it is by_layer:
            assert watched.handle().stats.offloaded_bytes
        else:
            assert "one region" in " ".join(watched.session.finder.found[0].notes)
    for before, after in zip(expected, found, strict=True):
        assert all(map(torch.equal, before, after))


def test_a_function_compiled_as_a_whole_has_one_graph_and_is_not_looked_into() -> None:
    @torch.compile(**BACKEND)
    def compute(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    expected_model, model = fresh(), make()
    expected = compute(expected_model, batch())
    with watching() as watched:
        found = compute(model, batch())
        found.backward()
        assert torch.equal(expected, found)
        assert not watched.names and not is_offloaded(model)
        report = watched.session.text()
        assert "not looked into" in " ".join(report.split())
