"""Several models under one budget of `ebbtide run`, and the peak that they share."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide import ActivationPolicy
from ebbtide.stores import DeviceMemory, ProcessMemory
from run_cases import batch, is_offloaded, make, step, watching

MIB = 2**20


def test_models_are_planned_one_after_the_other() -> None:
    first, second = make(), make(2)
    plain = [make(), make(2)]
    expected = [[step(model) for model in plain] for _ in range(36)]
    settled_at = waited_until = None
    with watching(budget="90%") as watched:
        for number in range(36):
            for model, wanted in zip((first, second), expected[number], strict=True):
                assert all(map(torch.equal, wanted, step(model)))
            plan, other = watched.handle(0).plan, watched.handle(1).plan
            assert (plan is None) is (number == 0)  # the first step is what it is planned from
            if number == 1:  # recomputed layers have been verified
                assert other is None and watched.handle(1).stats.recomputed_bytes
            if plan is not None and plan.settled and settled_at is None:
                settled_at = number
            if other is not None and waited_until is None:
                waited_until = number
        assert settled_at is not None and waited_until is not None
        assert settled_at <= waited_until
        assert watched.names == ["Net", "Net"] and watched.left_alone == [None, None]
        assert watched.steps == [36, 36]


def test_a_model_that_is_done_with_keeps_no_other_waiting() -> None:
    models = [make() for _ in range(2)]  # both stay alive, as in a list of results
    with watching(budget="90%") as watched:
        step(models[0])
        for _ in range(36):
            step(models[1])
        assert watched.handle(1).plan is not None


def test_the_next_model_need_not_wait_for_one_that_is_gone() -> None:
    with watching(budget="90%") as watched:
        for _ in range(2):
            model = make()
            step(model)
            step(model)
            assert watched.handle(len(watched.names) - 1).plan is not None
            del model
            gc.collect()
        plans = [model.plan for model in watched.session.finder.found]
        assert all(plan is not None for plan in plans)


def test_a_model_without_layers_and_one_called_by_parts_have_no_plan() -> None:
    lone, model = nn.Linear(32, 32), make(6)
    with watching(budget="90%") as watched:
        step(lone)
        assert "no modules with parameters" in str(watched.left_alone[0])

        def by_hand(x: torch.Tensor) -> torch.Tensor:
            for block in model.blocks:
                x = block(x)
            return x

        for _ in range(3):
            step(model, by_hand)
        found = watched.session.finder.found[-1]
        assert any("no plan" in note for note in found.notes) and found.plan is None
        found.freeze()
        assert found.num_steps and found.last_step.kept_bytes == 0


def test_a_budget_error_is_noted_and_a_smaller_batch_makes_up_for_it() -> None:
    model = make()
    with watching(budget="1MiB") as watched:
        step(model)
        with pytest.raises(ebbtide.BudgetError):
            step(model)
        assert watched.session.is_over_budget()
        report = watched.session.make_report()
        assert "--weights" in report.text() and "--weights" in report.troubles()[0]
    with watching() as watched:
        step(model)
        (found,) = watched.session.finder.found
        found.note_budget_error(ebbtide.BudgetError("too small", smallest_bytes=1))
        assert watched.session.is_over_budget()
        step(model)
        assert not watched.session.is_over_budget()


@pytest.mark.parametrize("options", [{}, {"budget": "90%"}, {"layers": ("blocks.*",)}])
def test_dry_plans_and_attaches_nothing(options: dict[str, object]) -> None:
    model = make()
    expected = step(make())
    with watching(dry=True, **options) as watched:
        assert all(map(torch.equal, expected, step(model)))
        watched.session.make_report()
        assert not is_offloaded(model)
        (found,) = watched.session.finder.found
        assert found.dry is not None and (found.dry.planned is not None) == ("budget" in options)
        # Each block saves its input and the output of tanh, the head its input: 4 bytes each.
        rows = batch().shape[0]
        per_block = rows * (32 + 64) * 4
        head = rows * 32 * 4  # or work after the layers
        assert found.dry.saved_bytes == 3 * per_block + head
        text = watched.printed.getvalue()
        assert "Net: " in text and ("of 4 layers" in text) == ("budget" in options)


def touch_memory(nbytes: int) -> None:
    """Take fresh memory from the system, and return it, whatever the C library keeps."""
    with mmap.mmap(-1, nbytes) as memory:
        memory[::4096] = bytes(nbytes // 4096)


def test_an_object_that_resets_the_peak_hides_it_from_no_other() -> None:
    one, two = ProcessMemory(), ProcessMemory()
    gc.collect()
    one.return_freed()
    one.reset_peak()
    low = one.peak_bytes()
    touch_memory(64 * MIB)
    two.reset_peak()
    assert one.peak_bytes() > low + 48 * MIB
    assert two.peak_bytes() < one.peak_bytes() - 32 * MIB
    one.reset_peak()
    assert one.peak_bytes() < low + 32 * MIB


def test_the_peak_of_a_device_is_shared_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {"max_memory_allocated": 10, "max_memory_reserved": 20}
    for name in peaks:
        monkeypatch.setattr(torch.accelerator, name, lambda _, name=name: peaks[name])
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda _: None)
    one, two = DeviceMemory(torch.device("cuda", 0)), DeviceMemory(torch.device("cuda", 0))
    other = DeviceMemory(torch.device("cuda", 1))
    two.reset_peak()
    peaks.update(max_memory_allocated=3, max_memory_reserved=4)
    assert (one.peak_bytes(), one.reserved_peak_bytes()) == (10, 20)
    assert (two.peak_bytes(), two.reserved_peak_bytes()) == (3, 4)
    assert other.peak_bytes() == 3


def test_two_budgets_see_each_others_peak() -> None:
    first, second = make(), make()
    with (
        ebbtide.offload(first, budget="90%", activations=ActivationPolicy(min_bytes=1)) as one,
        ebbtide.offload(second, budget="90%", activations=ActivationPolicy(min_bytes=1)),
    ):
        for _ in range(3):
            loss = first(batch()).sum()
            step(second)  # resets the peak inside of the step of the first
            touch_memory(48 * MIB)
            step(second)
            loss.backward()
        assert one.plan is not None and one.plan.measured is not None
        plan = one.plan
        # What the second model needed counts at the loss of the first.
        assert plan.measured.peak_bytes > ProcessMemory().now_bytes() + 24 * MIB
