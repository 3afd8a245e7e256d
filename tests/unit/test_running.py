"""`ebbtide run` finds the models that are trained, in whatever way they are called."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ebbtide
from forked import Child
from run_cases import SMALL, WIDTH, Net, batch, is_offloaded, make, step, watching
from waiting import wait_until

pytestmark = pytest.mark.usefixtures("frozen_imports")


def test_a_model_is_offloaded_in_its_first_training_forward() -> None:
    expected_model, model, teacher, frozen = make(), make(), make(), make()
    frozen.requires_grad_(False)
    loss = nn.MSELoss()
    expected = [step(expected_model) for _ in range(2)]
    with watching() as watched:
        with torch.no_grad():
            model.train()(batch())
            teacher(batch())
        assert not watched.names
        found = [step(model) for _ in range(2)]
        loss(model(batch()), frozen(batch())).backward()
        assert watched.names == ["Net"] and watched.steps == [3]
        stats = watched.handle().stats
        assert stats.offloaded_bytes > 0 and stats.kept_bytes == 0
        assert not any(map(is_offloaded, (teacher, frozen, loss, *model.blocks)))
    assert all(torch.equal(a, b) for a, b in zip(chain(*expected), chain(*found), strict=True))
    assert not is_offloaded(model)


def test_the_very_first_forward_is_offloaded_and_calls_are_as_before_afterwards() -> None:
    before = nn.Module.__call__
    model = make()
    with watching() as watched:
        assert nn.Module.__call__ is not before
        step(model)
        assert watched.handle().stats.offloaded_bytes > 0 and watched.steps == [1]
    assert nn.Module.__call__ is before


def test_each_of_two_adversaries_is_a_model() -> None:
    def play(generator: nn.Module, critic: nn.Module) -> list[Tensor]:
        results = []
        for _ in range(3):
            critic.zero_grad()
            (critic(batch()) - critic(generator(batch()).detach())).mean().backward()
            results += [p.grad.clone() for p in critic.parameters() if p.grad is not None]
            generator.zero_grad()
            critic(generator(batch())).mean().backward()
            results += [p.grad.clone() for p in generator.parameters() if p.grad is not None]
        return results

    expected = play(make(), make(2))
    with watching() as watched:
        found = play(make(), make(2))
        assert watched.names == ["Net", "Net"] and min(watched.steps) >= 3
    assert all(map(torch.equal, expected, found))


def test_a_part_that_is_trained_first_gives_way_to_the_whole() -> None:
    model = make()
    with watching() as watched:
        step(model.head)
        assert is_offloaded(model.head)
        step(model)
        assert is_offloaded(model) and not is_offloaded(model.head)
        assert watched.names == ["Linear", "Net"]
        step(model.head)  # now a part of the whole
        assert watched.names == ["Linear", "Net"] and watched.steps == [1, 2]


def test_parts_that_the_script_calls_one_by_one_are_models() -> None:
    def by_hand(model: Net) -> Tensor:
        x = batch()
        for block in model.blocks:
            x = block(x)
        return model.head(x)

    plain, model = make(8), make(8)
    expected = [step(plain, lambda _: by_hand(plain)) for _ in range(3)]
    with watching() as watched:
        found = [step(model, lambda _: by_hand(model)) for _ in range(3)]
        assert watched.names == ["Block"] * 8 + ["Linear"] and watched.steps == [3] * 9
    assert all(torch.equal(a, b) for a, b in zip(chain(*expected), chain(*found), strict=True))


def test_a_block_that_a_checkpoint_runs_again_is_no_model() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return self.head(x)

    torch.manual_seed(0)
    model = Checkpointed()
    with watching() as watched:
        for _ in range(2):
            model(batch().requires_grad_()).sum().backward()
        assert watched.names == ["Checkpointed"]
        whole = make()  # its forward records in backward only
        checkpoint(whole, batch().requires_grad_(), use_reentrant=True).sum().backward()
        assert watched.names == ["Checkpointed"] and not is_offloaded(whole)


def test_what_the_script_offloads_itself_stays_its_own() -> None:
    early, late, wrapped, looped = make(), make(), make(), make()
    early_handle = ebbtide.offload(early, activations=SMALL)
    wrapped.forward = ebbtide.wrap_forward_with_offload(wrapped.forward)
    with watching() as watched:
        for model in (early, late, wrapped):
            step(model)
        late_handle = ebbtide.offload(late, activations=SMALL)  # ours must make room
        session = ebbtide.OffloadSession(num_layers=1, model_layers=2, modules=[looped])
        x = batch()
        for _ in range(2):
            with session.layer():
                x = looped(x)
            x = session.sync(x)
        x.sum().backward()
        for model in (early, late, wrapped):
            step(model)
        assert watched.names == ["Net"] * 3 and watched.steps == [0, 1, 0]
        assert watched.session.finder.passing == {"Net": "the script offloads it itself"}
        assert not is_offloaded(looped)
    for handle in (early_handle, late_handle):
        assert handle.stats.offloaded_bytes
        handle.detach()


def test_the_script_can_offload_a_part_of_what_was_found() -> None:
    model = make()
    with watching():
        step(model)
        with ebbtide.offload(model.blocks[0], activations=SMALL) as handle:
            step(model)
            assert not is_offloaded(model) and handle.stats.offloaded_bytes


@pytest.mark.slow
def test_models_that_are_dropped_leave_nothing_behind() -> None:
    def train() -> weakref.ref[Net]:
        model = make()
        step(model)
        step(model)
        return weakref.ref(model)

    with watching() as watched:
        train()
        gc.collect()
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        models = [train() for _ in range(4)]
        assert [model() is None for model in models[:-1]] == [True] * 3  # found by the next one
        gc.collect()
        assert models[-1]() is None
        assert watched.steps == [2] * 5
        assert all(model.last_step.offloaded_bytes for model in watched.session.finder.found)
        # A thread that was told to end takes a moment.
        wait_until(lambda: threading.active_count() <= threads, "threads did not end")
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files, "files stayed open")


def test_a_forked_child_finds_nothing() -> None:
    model = make()
    with watching():

        def train_in_child() -> bool:
            step(model)
            return is_offloaded(model)

        assert Child(train_in_child).result() is False
        step(model)
        assert is_offloaded(model)


def test_an_error_in_a_forward_is_the_scripts_own() -> None:
    model = make()
    with watching() as watched:
        with pytest.raises(RuntimeError):
            model(torch.randn(2, WIDTH + 1))
        step(model)
        assert watched.left_alone == [None] and watched.handle().stats.offloaded_bytes


@pytest.mark.parametrize(
    "options",
    [
        {"store": "tiered"},
        {"layers": ("no_such.*",)},
        {"activations": ebbtide.ActivationPolicy(num_layers=99)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_setting_that_fits_no_model_ends_the_script(options: dict[str, Any]) -> None:
    model = make()
    with watching(**options) as watched:
        with pytest.raises(SystemExit) as ended:
            step(model)
        assert ended.value.code == 2 and not is_offloaded(model)
        assert "Net" in watched.printed.getvalue()


def test_a_second_model_that_a_setting_does_not_fit_is_left_alone_and_that_is_said() -> None:
    first, second = make(), nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    with watching(layers=("blocks.*",)) as watched:
        step(first)
        second(torch.rand(8, 64)).sum().backward()
        assert is_offloaded(first) and not is_offloaded(second)
        assert "Sequential is left alone" in watched.printed.getvalue()
        assert "Sequential was left alone" in watched.session.troubles()[0]


def test_many_threads_find_a_model_once() -> None:
    model = make()
    with watching() as watched:
        barrier = threading.Barrier(4)

        def call() -> None:
            barrier.wait()
            model(batch()).sum()

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert watched.names == ["Net"] and watched.left_alone == [None]
