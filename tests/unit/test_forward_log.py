"""What backward is expected to want, and how little it costs to know."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.devices import CpuDevice
from ebbtide.planning import Hardware, offload_first, place
from ebbtide.runtime.record import AccessOrder, ForwardLog, Record, State
from ebbtide.stores import PinnedStore
from engine_bench import EngineBench
from plan_cases import fake_profile


@dataclass
class Numbered:
    ordinal: int


def filled(num_records: int, learned: AccessOrder | None = None) -> ForwardLog:
    log = ForwardLog(learned)
    for ordinal in range(num_records):
        log.add(Numbered(ordinal))
        log.note_save(ordinal)
    return log


def reloads(log: ForwardLog, most: int = 100) -> list[int]:
    """What is brought back from here on, if there is room for so many."""
    ordinals = []
    while len(ordinals) < most and (record := log.next_reload()) is not None:
        ordinals.append(record.ordinal)
        log.pass_reload()
    return ordinals


def test_no_state_follows_out_of_order() -> None:
    record = Record(None, 0, 8, State.PENDING)
    with pytest.raises(AssertionError):
        record.move_to(State.STORED)


def test_nothing_comes_back_before_backward() -> None:
    assert filled(3).next_reload() is None


def test_without_history_the_last_comes_first() -> None:
    log = filled(4)
    log.note_backward()
    assert reloads(log) == [3, 2, 1, 0]
    assert reloads(log) == []


def test_what_backward_has_passed_is_not_brought_back() -> None:
    log = filled(6)
    log.note_unpack(5)
    log.note_unpack(3)
    assert reloads(log) == [2, 1, 0]


def test_what_has_died_is_not_brought_back() -> None:
    log = filled(3)
    log.note_backward()
    log.remove(1)
    assert reloads(log) == [2, 0]


def test_what_leaves_again_comes_back_for_its_next_use_only() -> None:
    """Backward wants 2, 1, 0, 1."""
    log = filled(3, AccessOrder([2, 1, 0, 1], 3))
    log.note_unpack(2)
    assert reloads(log) == [1, 0, 1]
    log.note_unpack(1)
    log.note_stored(1)
    assert reloads(log) == [1]  # place 3, not place 1
    log.note_stored(2)
    assert reloads(log) == []  # never again


def test_an_unexpected_use_leaves_the_guess() -> None:
    log = filled(4, AccessOrder([3, 2, 0], 4))
    log.note_unpack(3)
    log.note_unpack(1)
    assert reloads(log) == [2, 0]


def test_an_order_is_learned_once() -> None:
    first = filled(3)
    for ordinal in (1, 2, 2, 0):
        first.note_unpack(ordinal)
    learned = first.learned(3)
    assert learned is not None
    assert learned.items == [1, 2, 0]
    second = filled(3, learned)
    for ordinal in (1, 2, 0):
        second.note_unpack(ordinal)
    assert second.learned(3) is learned
    assert filled(3, learned).learned(3) is None, "there was no backward"


def test_an_order_over_other_records_is_forgotten() -> None:
    log = filled(4, AccessOrder([0, 1, 2], 3))
    log.note_backward()
    assert reloads(log) == [3, 2, 1, 0]


class CountingList(list):
    looked_at = 0

    def __getitem__(self, place):
        CountingList.looked_at += 1
        return super().__getitem__(place)


@pytest.mark.parametrize("learns", [False, True])
def test_backward_looks_at_each_record_a_few_times(learns: bool) -> None:
    """2,000 records that all fit: a look at all that is to come, each time, would be 2 million."""
    device = CpuDevice()
    bench = EngineBench(device, PinnedStore(device), 2**30)
    hooks = bench.hooks
    for _ in range(1 + learns):
        CountingList.looked_at = 0
        hooks.begin()
        bench.activations.scopes.current.forward.records = CountingList()
        x = torch.ones(4, requires_grad=True)
        y = x
        for _ in range(2000):
            y = y.sin()
        hooks.end()
        y.sum().backward()
        del y
    assert 1999 <= CountingList.looked_at < 5 * 2000
    bench.close()


def test_the_second_step_of_a_model_knows_its_order() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)])
    with ebbtide.offload(model, activations=ebbtide.ActivationPolicy(min_bytes=1)) as handle:
        for _ in range(2):
            model(torch.randn(8, 64)).sum().backward()
        learned = handle._engine.activations.scopes.learned
        assert learned is not None
        model(torch.randn(8, 64)).sum().backward()
        assert handle._engine.activations.scopes.learned is learned


def test_an_order_is_forgotten_with_the_plan_that_it_was_learned_under() -> None:
    """As many records under another plan are of other storages."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)])
    batch = torch.randn(8, 64)
    profile = fake_profile(model, batch, Hardware.named("cpu"), optimizer_states=0)
    with ebbtide.offload(model, activations=ebbtide.ActivationPolicy(min_bytes=1)) as handle:
        scopes = handle._engine.activations.scopes
        model(batch).sum().backward()
        assert scopes.learned is not None
        late = model(batch)
        handle._engine.follow(place(profile, offload_first(profile, 2)), None)
        assert scopes.learned is None
        late.sum().backward()  # under the plan before
        assert scopes.learned is None
        model(batch).sum().backward()
        learned = scopes.learned
        assert learned is not None
        handle._engine.follow(place(profile, offload_first(profile, 2)), None)
        assert scopes.learned is learned  # it is the same plan


def test_backwards_through_a_retained_graph_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ebbtide.runtime.record.MOST_USES", 50)
    monkeypatch.setattr("ebbtide.runtime.activations._MOST_ENDED", 10)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
    policy = ebbtide.ActivationPolicy(min_bytes=1)
    with ebbtide.offload(model, activations=policy) as handle:
        loss = model(torch.randn(8, 16)).sum()
        for _ in range(60):
            loss.backward(retain_graph=True)
        activations = handle._engine.activations
        # One graph is alive, whose records were all read by the last backward.
        assert len(activations._ended) <= 10
        logs = {id(record.forward): record.forward for record in activations.alive()}
        assert [len(log.uses) for log in logs.values()] == [50]
        loss.backward()
