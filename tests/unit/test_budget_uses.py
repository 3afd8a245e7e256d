"""A budget beside what else programs do: other models, interrupts, copies, checkpoints, forks."""

from __future__ import annotations

import copy
import functools
import os
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide import ActivationPolicy
from forked import Child
from saying import warned

SMALL = ActivationPolicy(min_bytes=1)


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
    )


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor], steps: int) -> list[Tensor]:
    batch = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        model.zero_grad()
        call(batch).square().mean().backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


def check(model: nn.Module, call: Callable[[Tensor], Tensor] | None = None, steps: int = 4) -> None:
    plain = make()
    expected = gradients(plain, plain, 1)
    found = gradients(model, call or model, steps)
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))


def test_a_frozen_network_between_two_steps(recwarn: pytest.WarningsRecorder) -> None:
    """As the generator of a GAN while its discriminator is trained: nothing is to be planned."""
    model = make()
    with ebbtide.offload(model, budget="90%", activations=SMALL) as handle:
        for _ in range(5):
            model.requires_grad_(False)
            model(torch.randn(64, 32))
            model.requires_grad_(True)
            check(model, steps=1)
        assert handle.plan is not None
        model.requires_grad_(False)
        model(torch.randn(64, 32, requires_grad=True)).sum().backward()
    assert not [str(each.message) for each in recwarn if "budget" in str(each.message)]


def test_a_part_that_is_called_alone_is_warned_of() -> None:
    """A budget is planned for forwards of the model; one of a part of it finds no plan."""
    model = nn.Module()
    model.net = make()
    with ebbtide.offload(model, budget="90%", activations=SMALL) as handle:
        with warned("budget-bypassed") as said:
            check(model, model.net)
        assert handle.plan is None
    assert len(said) == 1


@pytest.mark.parametrize("budget", [None, "90%"])
def test_a_model_of_which_only_methods_are_called_is_warned_of(budget: str | None) -> None:
    """Nothing that is called has hooks, so that nothing is offloaded, and no budget is kept."""

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(32, 32)

        def log_prob(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.net.weight).exp()

    flow, called = Flow(), Flow()
    called.forward = called.log_prob  # type: ignore[method-assign]
    again = copy.deepcopy(called)
    cases = (
        (flow, flow.log_prob, 1),
        (called, called, 0),
        (again, functools.partial(checkpoint, again, use_reentrant=False), 0),
    )
    for model, compute, num_said in cases:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings(record=True) as said, ebbtide.offload(model, budget=budget):
            warnings.simplefilter("always")
            for _ in range(3):
                compute(torch.randn(64, 32)).sum().backward()
                optimizer.step()
        assert len([each for each in said if "model-not-called" in f"{each.message}"]) == num_said


def test_others_train_on_after_a_model_is_gone_whose_forward_is_kept() -> None:
    dropped, other = make(), nn.Linear(4, 1)
    ebbtide.offload(dropped)
    kept = [dropped.forward]
    del dropped
    other(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    with pytest.raises(ebbtide.PolicyError):
        kept[0](torch.ones(64, 32))


def test_an_interrupted_forward_leaves_nothing_behind() -> None:
    model = make()
    with ebbtide.offload(model, budget="90%", activations=SMALL):
        check(model, steps=1)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        hook = model.get_submodule("1").register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(64, 32))
        hook.remove()
        check(model, steps=5)


def test_one_autocast_around_the_forward_is_entered_once() -> None:
    """As Accelerate puts it there. Entered twice, it would stay on after the forward."""
    plain = make()
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(plain, plain, 1)
    model = make()
    with ebbtide.offload(model, budget="90%", activations=SMALL) as handle:
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        found = gradients(model, model, 4)
        assert handle.plan is not None
    assert not torch.is_autocast_enabled("cpu")
    assert all(map(torch.equal, expected, found))


def test_a_copy_of_the_model_is_plain() -> None:
    model = make()
    with ebbtide.offload(model, budget="90%", activations=SMALL) as handle:
        check(copy.deepcopy(model), steps=1)
        assert handle.plan is None
        check(model)


def test_a_checkpoint_around_the_model_runs_its_forward_again() -> None:
    model = make()
    with ebbtide.offload(model, budget="90%", activations=SMALL):
        check(model, lambda batch: checkpoint(model, batch, use_reentrant=False))


class Asked:
    """An argument of a forward that calls a function when the budget asks what is in it."""

    def __init__(self, asked: Callable[[], object]) -> None:
        self.asked = asked


class Asking(nn.Sequential):
    def forward(self, x: Tensor, _: Asked) -> Tensor:
        return super().forward(x)


def _ask(given: Asked) -> tuple[list[object], None]:
    asked, given.asked = given.asked, int  # once
    asked()
    return [], None


register_pytree_node(Asked, _ask, lambda *_: Asked(int))


def train_asked(model: nn.Module, asked: Callable[[], object]) -> list[Tensor]:
    """Gradients of some steps, in the middle of each of which a function is called."""
    found = []
    for number in range(4):
        model.zero_grad()
        batch = torch.randn(64, 32, generator=torch.Generator().manual_seed(number))
        model(batch, Asked(asked)).square().sum().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


def test_a_signal_handler_evaluates_while_a_plan_is_chosen() -> None:
    """It runs in the thread that chooses, so it cannot wait for the end of that."""
    model, results = Asking(*make()), list[Tensor]()

    def evaluate() -> None:
        with torch.no_grad():
            results.append(model(torch.ones(64, 32), Asked(int)))

    expected = train_asked(model, int)
    with ebbtide.offload(model, budget="90%", activations=SMALL) as handle:
        found = train_asked(model, evaluate)
        assert handle.plan is not None
    assert results
    assert all(map(torch.equal, expected, found))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_that_is_forked_while_a_plan_is_chosen_trains() -> None:
    """Another thread forks it, as one that starts the workers of a data loader."""
    model, children = Asking(*make()), list[Child]()

    def fork() -> None:
        children.append(Child(lambda: train_asked(model, int)))

    def fork_elsewhere() -> None:
        if not children:
            thread = threading.Thread(target=fork)
            thread.start()
            thread.join()

    expected = train_asked(model, int)
    with ebbtide.offload(model, budget="90%", activations=SMALL):
        found = train_asked(model, fork_elsewhere)
        of_child = children[0].result()
    assert all(map(torch.equal, expected, found))
    assert all(map(torch.equal, expected, of_child))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_plans_for_itself() -> None:
    model = make()
    with ebbtide.offload(model, budget="90%", activations=SMALL):
        check(model, steps=1)
        child = Child(lambda: check(model))
        assert child.result() is None
        check(model)
