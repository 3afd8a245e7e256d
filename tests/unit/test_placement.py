"""One decision for each storage, by policy or by plan, under the same number in every step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ebbtide import ActivationPolicy
from ebbtide.devices import CpuDevice, Layer
from ebbtide.runtime.handles import Decision
from ebbtide.runtime.rebuild import Plan
from ebbtide.stores import DiskStore
from engine_bench import EngineBench

KEEP, OFFLOAD, REBUILD = Decision.KEEP, Decision.OFFLOAD, Decision.REBUILD
SIZE = 1024
BYTES = 4 * SIZE


def chain(x: Tensor) -> Tensor:
    """Saves five storages: x, gelu(x), sin's result, a small slice, and the product's input."""
    y = torch.nn.functional.gelu(x)
    z = y * y.sin()
    w = z[:100] * 2.0
    return (w * w).sum() + z.cos().sum()


def in_layers(bench: EngineBench, *functions: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Run functions one after the other, each as a layer that leaves."""

    def run(x: Tensor) -> Tensor:
        for number, function in enumerate(functions):
            bench.activations.scopes.begin_layer(Layer(number, f"layer {number}"), offloads=True)
            x = function(x)
            bench.activations.scopes.end_layer()
        return x

    return run


def step(bench: EngineBench, function: Callable[[Tensor], Tensor] = chain) -> Tensor:
    """The gradient of one step."""
    torch.manual_seed(0)
    x = torch.randn(SIZE, requires_grad=True)
    bench.run(function, x).sum().backward()
    assert x.grad is not None
    return x.grad


def make(policy: ActivationPolicy | None = None, plan: Plan | None = None) -> EngineBench:
    return EngineBench(CpuDevice(), DiskStore(), 2**20, policy, plan=plan)


def expected() -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(SIZE, requires_grad=True)
    chain(x).sum().backward()
    assert x.grad is not None
    return x.grad


PLANS = [{}, *({(None, number): decision} for number in range(5) for decision in Decision)]


def test_a_storage_has_the_same_number_whatever_becomes_of_it() -> None:
    """Kept, moved, rebuilt, or any of them for one storage: numbers and sizes stay."""
    seen = set()
    policies = (
        ActivationPolicy(min_bytes=1, rebuild=False),
        ActivationPolicy(min_bytes=1, rebuild=False, num_layers=0),
        ActivationPolicy(min_bytes=1),
    )
    for policy in policies:
        for plan in PLANS:
            bench = make(policy, plan)
            for _ in range(2):
                assert torch.equal(step(bench), expected())
            storages = bench.inspect().storages
            seen.add(tuple((each.number, each.size_bytes) for each in storages))
            bench.close()
    assert len(seen) == 1, seen
    (numbers,) = seen
    assert [number for number, _ in numbers] == list(range(len(numbers)))


@pytest.mark.parametrize("decision", list(Decision))
@pytest.mark.parametrize("number", range(5))
def test_a_plan_decides_for_one_storage(number: int, decision: Decision) -> None:
    """The others are placed by the policy, which here keeps all."""
    bench = make(
        ActivationPolicy(min_bytes=1, num_layers=0, rebuild=False), {(None, number): decision}
    )
    assert torch.equal(step(bench), expected())
    for each in bench.inspect().storages:
        if each.number != number:
            assert each.decision == "keep"
        elif decision is not REBUILD:
            assert each.decision == decision.value
        else:  # what no recipe gives again is placed by the policy
            assert each.decision in ("keep", "rebuild")
    bench.close()


def test_a_plan_names_layers_and_numbers() -> None:
    """Each layer's call counts anew."""
    plan = {(1, 0): KEEP, (2, 0): KEEP}
    bench = make(ActivationPolicy(min_bytes=1, rebuild=False), plan)
    step(bench, in_layers(bench, torch.sin, torch.cos, torch.sin))
    found = [(each.layer, each.number, each.decision) for each in bench.inspect().storages]
    assert found == [(0, 0, "offload"), (1, 0, "keep"), (2, 0, "keep")]
    assert bench.stats.kept_bytes == 2 * BYTES
    bench.close()


def test_the_first_save_decides_for_all() -> None:
    """Layer 0 stays, layer 1 leaves, and both save the same tensor: it stays, and moves nowhere."""
    bench = make(ActivationPolicy(min_bytes=1, rebuild=False), {(0, 0): KEEP})

    shared = torch.randn(SIZE, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        for number in range(2):
            bench.activations.scopes.begin_layer(Layer(number, ""), offloads=True)
            x = x + shared.sin()
            bench.activations.scopes.end_layer()
        return x

    step(bench, run)
    (only,) = bench.inspect().storages
    assert (only.layer, only.decision, only.saves, only.shared_by) == (0, "keep", 2, (1,))
    assert bench.stats.offloaded_bytes == 0
    assert bench.stats.kept_bytes == BYTES
    bench.close()


def test_views_of_one_storage_share_its_number_and_its_decision() -> None:
    """Two small slices are gathered one by one; both have the number of their storage."""

    def slices(x: Tensor) -> Tensor:
        y = x * 1.0
        return (y[:100] * y[:100]).sum() + (y[200:300] * y[200:300]).sum()

    for decision, records in ((OFFLOAD, 2), (KEEP, 1)):
        bench = make(ActivationPolicy(min_bytes=1, rebuild=False), {(None, 0): decision})
        step(bench, slices)
        storages = bench.inspect().storages
        assert [each.number for each in storages] == [0] * records
        assert {each.decision for each in storages} == {decision.value}
        bench.close()
