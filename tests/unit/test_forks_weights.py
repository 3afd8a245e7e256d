"""Forked children of a process whose weights rest in files."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing  # how tensors are sent to processes
from torch import Tensor, nn

import ebbtide
from forked import Child, assert_same, batch, make, train, trained

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")


@pytest.fixture
def resting(tmp_path: Path) -> Iterator[tuple[nn.Sequential, ebbtide.OffloadHandle]]:
    model = make()
    policy = ebbtide.WeightPolicy()
    with ebbtide.offload(model, weights=policy, store=f"disk:{tmp_path}") as handle:
        train(model, 0)
        yield model, handle


Resting = tuple[nn.Sequential, ebbtide.OffloadHandle]


def test_a_child_does_not_change_the_weights_of_its_parent(resting: Resting) -> None:
    model, _ = resting

    def change() -> float:
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(7)
                p.grad.fill_(7)
        return sum(p.sum().item() for p in model.parameters())

    assert Child(change).result() == 7 * sum(p.numel() for p in model.parameters())
    assert_same(list(model.parameters()), list(trained().parameters()))
    assert_same(train(model, 10), train(trained(), 10))


def call_the_model(model: nn.Module) -> None:
    with torch.no_grad():
        model(batch(0))


def call_a_layer(model: nn.Module) -> None:
    model[0](batch(0))


def step_with_old_gradients(model: nn.Module) -> None:
    torch.optim.Adam(model.parameters()).step()


@pytest.mark.parametrize("use", [train, call_the_model, call_a_layer, step_with_old_gradients])
def test_a_child_cannot_use_weights_of_its_parent(resting: Resting, use: Any) -> None:
    model, _ = resting
    arguments = (model, 0) if use is train else (model,)
    error = Child(lambda: use(*arguments)).result()
    assert isinstance(error, ebbtide.ForkedProcessError)
    assert_same(train(model, 10), train(trained(), 10))


def test_a_graph_of_the_parent_raises_in_a_child(resting: Resting) -> None:
    model, _ = resting
    loss = model(batch(1)).square().sum()
    assert isinstance(Child(loss.backward).result(), ebbtide.ForkedProcessError)
    loss.backward()


def test_a_child_that_detaches_has_weights_of_its_own(resting: Resting) -> None:
    model, handle = resting

    def train_alone() -> list[Tensor]:
        handle.detach()
        with ebbtide.offload(model, weights=ebbtide.WeightPolicy()):
            return train(model, 10)

    child = Child(train_alone)
    assert_same(child.result(), train(trained(), 10))
    assert_same(train(model, 20), train(trained(), 20))


def test_a_model_that_is_sent_shares_its_weights_as_without_offload(resting: Resting) -> None:
    """As `Process(args=(model,))` does with the methods spawn and forkserver."""
    model, handle = resting
    twin = pickle.loads(bytes(ForkingPickler.dumps(model)))
    assert twin.forward.__func__ is nn.Sequential.forward
    train(model, 10)
    plain = trained()
    train(plain, 10)
    assert_same(list(twin.parameters()), list(plain.parameters()))
    handle.detach()
    train(twin, 20)
    train(plain, 20)
    assert_same(list(model.parameters()), list(plain.parameters()))
