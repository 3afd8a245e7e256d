"""Processes that are forked after `offload`: a store and threads of their own, or an error."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ebbtide
from forked import LIMIT_S, SMALL, Child, assert_same, batch, make, train, trained

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")


@pytest.fixture
def model(tmp_path: Path) -> Iterator[nn.Sequential]:
    """A model whose activations are offloaded and that has trained for some steps."""
    model = make()
    with ebbtide.offload(model, activations=SMALL, store=f"disk:{tmp_path}"):
        train(model, 0)
        yield model


def test_parent_and_children_train_at_the_same_time(model: nn.Module) -> None:
    children = [Child(lambda first=first: train(model, first, 10)) for first in (10, 20)]
    assert_same(train(model, 30, 10), train(trained(), 30, 10))
    for child, first in zip(children, (10, 20), strict=True):
        assert_same(child.result(), train(trained(), first, 10))


def test_a_fork_before_the_first_step(tmp_path: Path) -> None:
    """The threads start with the first step: then both processes have some, but one file."""
    model = make()
    with ebbtide.offload(model, activations=SMALL, store=f"disk:{tmp_path}"):
        children = [Child(lambda first=first: train(model, first, 10)) for first in (10, 20)]
        assert_same(train(model, 30, 10), train(make(), 30, 10))
        for child, first in zip(children, (10, 20), strict=True):
            assert_same(child.result(), train(make(), first, 10))


def test_a_fork_between_forward_and_backward(model: nn.Module) -> None:
    """The child gets a clear error, and its next step is right; the parent notices nothing."""
    loss = model(batch(1)).square().sum()

    def backward() -> list[Tensor]:
        with pytest.raises(ebbtide.ForkedProcessError):
            loss.backward()
        return train(model, 10)

    child = Child(backward)
    model.zero_grad()
    loss.backward()
    plain = trained()
    plain.zero_grad()
    plain(batch(1)).square().sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    assert_same(child.result(), train(trained(), 10))


def test_a_fork_inside_a_forward(tmp_path: Path) -> None:
    model, children = make(), []

    def step() -> list[Tensor]:
        model.zero_grad()
        model(batch(1)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    expected = step()
    parent = os.getpid()

    def fork(*_: object) -> None:
        if os.getpid() == parent and not children:
            children.append(os.fork())

    hook = model[2].register_forward_pre_hook(fork)
    with ebbtide.offload(model, activations=SMALL, store=f"disk:{tmp_path}"):
        try:
            got = step()
        except BaseException as error:
            os._exit(7 if isinstance(error, ebbtide.ForkedProcessError) else 8)
        if os.getpid() != parent:
            os._exit(9)
        assert_same(got, expected)
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7
        hook.remove()


def test_a_lock_that_another_thread_held_does_not_stop_the_child(model: nn.Module) -> None:
    engine = model.forward._engine
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with engine.transfers.gate:
            held.set()
            done.wait(LIMIT_S)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = Child(lambda: train(model, 10))
    done.set()
    thread.join()
    assert_same(child.result(), train(trained(), 10))


def test_a_child_that_detaches_is_plain(tmp_path: Path) -> None:
    model = make()
    handle = ebbtide.offload(model, activations=SMALL, store=f"disk:{tmp_path}")
    train(model, 0)

    def detach() -> list[Tensor]:
        handle.detach()
        assert "forward" not in vars(model)
        result = train(model, 10, 2)
        with ebbtide.offload(model, activations=SMALL):
            return result + train(model, 12, 2)

    plain = trained()
    assert_same(Child(detach).result(), train(plain, 10, 2) + train(plain, 12, 2))
    assert_same(train(model, 10), train(trained(), 10))
    handle.detach()


def test_a_session_in_a_child() -> None:
    layers = make()
    session = ebbtide.OffloadSession(2, 4, activations=SMALL, modules=[layers], store="disk")

    def step(*, offloaded: bool) -> list[Tensor]:
        layers.zero_grad()
        x = batch(0).requires_grad_()
        for layer in layers:
            if offloaded:
                with session.layer():
                    x = layer(x)
                x = session.sync(x)
            else:
                x = layer(x)
        x.square().sum().backward()
        return [p.grad.clone() for p in layers.parameters()]

    expected = step(offloaded=False)
    assert_same(step(offloaded=True), expected)
    assert_same(Child(lambda: step(offloaded=True)).result(), expected)
    assert_same(step(offloaded=True), expected)
    session.close()


def test_a_child_that_ends_like_a_program_leaves_the_parent_alone(tmp_path: Path) -> None:
    """With the collector, the exit handlers and the ends of all objects, even in mid-step."""
    model = make()
    policies = {"activations": SMALL, "weights": ebbtide.WeightPolicy()}
    handle = ebbtide.offload(model, **policies, store=f"disk:{tmp_path}")
    train(model, 0)
    loss = model(batch(1)).square().sum()
    code = 0
    pid = os.fork()
    if not pid:
        signal.alarm(LIMIT_S)
        try:
            del loss, model, handle
            gc.collect()
            import atexit

            atexit._run_exitfuncs()
        except BaseException:
            traceback.print_exc()
            code = 1
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    model.zero_grad()
    loss.backward()
    plain = trained()
    plain.zero_grad()
    plain(batch(1)).square().sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    assert_same(train(model, 10), train(plain, 10))
    handle.detach()


class Numbers(Dataset[Tensor]):
    """A data set that refers to the model, as one for active learning would."""

    def __init__(self, model: nn.Module, *, predicts: bool) -> None:
        self.model = model
        self.predicts = predicts

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> Tensor:
        x = batch(number)
        if self.predicts:
            with torch.no_grad():
                self.model(x)
        return x


@pytest.mark.parametrize("weights", [None, ebbtide.WeightPolicy()])
def test_the_workers_of_a_loader(weights: ebbtide.WeightPolicy | None) -> None:
    def loop(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.Adam(model.parameters())
        loader = DataLoader(
            Numbers(model, predicts=weights is None),
            num_workers=2,
            batch_size=2,
            multiprocessing_context="fork",
        )
        for x in loader:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    expected, mine = loop(make()), make()
    with ebbtide.offload(mine, activations=SMALL, weights=weights):
        assert_same(loop(mine), expected)


def train_alone(model: nn.Module, first: int) -> None:
    torch.set_num_threads(1)
    train(model, first)


@pytest.mark.parametrize(("method", "firsts"), [("fork", (10, 20)), ("spawn", (10,))])
def test_hogwild(method: str, firsts: tuple[int, ...]) -> None:
    """Processes that train the same shared weights, one after the other so that bits compare."""
    expected = make()
    for first in (0, *firsts):
        train(expected, first)
    model = make().share_memory()
    context = multiprocessing.get_context(method)
    with ebbtide.offload(model, activations=SMALL):
        train(model, 0)
        for first in firsts:
            process = context.Process(target=train_alone, args=(model, first), daemon=True)
            process.start()
            process.join(LIMIT_S)
            assert process.exitcode == 0
        assert_same(list(model.parameters()), list(expected.parameters()))


# What is left


def test_a_child_has_its_file_and_closes_the_inherited_one(
    model: nn.Module, tmp_path: Path
) -> None:
    def files() -> set[int]:
        found = set()
        for entry in Path("/proc/self/fd").iterdir():
            try:
                if str(tmp_path) in os.readlink(entry):
                    found.add(entry.stat().st_ino)
            except OSError:
                continue
        return found

    if not Path("/proc/self/fd").exists():
        pytest.skip("only Linux tells in /proc which files are open")
    gc.collect()  # an earlier test's files may still be open
    mine = files()
    assert len(mine) == 1
    # A job that runs at the fork refers to the file, and its thread never ends in the child.
    store = model.forward._engine.transfers.store
    for lane in (store._writer, store._reader):
        lane.submit(lambda: None).synchronize()

    def train_and_list() -> set[int]:
        train(model, 10)
        gc.collect()
        return files()

    assert Child(files).result() == set()
    its = Child(train_and_list).result()
    assert len(its) == 1
    assert not its & mine
