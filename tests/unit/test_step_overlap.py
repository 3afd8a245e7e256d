"""`handle.overlap`: an optimizer steps inside backward, with the bits of the plain loop."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import ebbtide
from ebbtide.devices import AbstractEvent, AbstractLane, CpuDevice, LaneEvent

WIDTH = 32
ROOM = "1GiB"  # without it, nothing steps ahead on a CPU

pytestmark = pytest.mark.filterwarnings("ignore:ebbtide offloaded nothing:RuntimeWarning")


class PromptLane(AbstractLane):
    """A worker that is never behind: what it is given has ended when `submit` returns."""

    def __init__(self, lane: str) -> None:
        self._lane = lane

    def submit(
        self, work: Callable[[], None], then: Callable[[], None] | None = None
    ) -> AbstractEvent:
        event = LaneEvent(self._lane)
        event.begin()
        try:
            work()
        except RuntimeError as error:
            event.finish(error)
        else:
            event.finish()
        assert then is None
        return event

    def close(self) -> None:
        """Nothing is left to do."""


@pytest.fixture(autouse=True)
def prompt_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """What steps ahead does not depend on how fast a thread of its own would be."""
    make = CpuDevice.lane

    def lane(device: CpuDevice, name: str, lane: str) -> AbstractLane:
        return PromptLane(lane) if lane == "cpu_optimizer" else make(device, name, lane)

    monkeypatch.setattr(CpuDevice, "lane", lane)


Make = Callable[[Any], torch.optim.Optimizer]


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])


def overlapped(
    optimizer: Make = fused, *, max_norm: float | None = 1.0, **others: Any
) -> tuple[nn.Module, Any, ebbtide.OffloadHandle]:
    model = make()
    handle = ebbtide.offload(model, trace=others.pop("trace", False))
    others.setdefault("shadow_budget", ROOM)
    return model, handle.overlap(optimizer(model.parameters()), max_norm=max_norm, **others), handle


def batches(count: int) -> Iterator[Tensor]:
    draws = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(8, WIDTH, generator=draws)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, by: float = 1.0) -> None:
    optimizer.zero_grad()
    (model(x).square().mean() * by).backward()
    optimizer.step()


def assert_same(mine: nn.Module, plain: nn.Module, my: Any, optimizer: Any) -> None:
    for got, expected in zip(mine.parameters(), plain.parameters(), strict=True):
        assert torch.equal(got, expected)
        assert torch.equal(got.grad, expected.grad)
        for name, value in optimizer.state[expected].items():
            assert torch.equal(my.state[got][name], value), name


class _Own(torch.optim.SGD):
    pass


class LateLane(PromptLane):
    """A worker that is at its first job when `step` comes, and has not begun the others."""

    def __init__(self, lane: str) -> None:
        super().__init__(lane)
        self.queue: list[tuple[LaneEvent, Callable[[], None]]] = []
        self.begun: list[AbstractEvent] = []
        self.num_given = 0

    def submit(
        self, work: Callable[[], None], then: Callable[[], None] | None = None
    ) -> AbstractEvent:
        self.num_given += 1
        if self.num_given % 4 == 1:
            self.begun.append(super().submit(work, then))
            return self.begun[-1]
        event = LaneEvent(self._lane)
        self.queue.append((event, work))
        return event  # whoever waits for it without taking it back waits for ever


@pytest.mark.parametrize("max_norm", [None, 1e-3, 1e6])
def test_step_takes_over_what_the_worker_has_not_begun(
    max_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = LateLane("cpu_optimizer")
    waited: list[AbstractEvent] = []
    monkeypatch.setattr(CpuDevice, "lane", lambda *_: lane)
    monkeypatch.setattr(LaneEvent, "synchronize", lambda event: waited.append(event))
    model, optimizer, handle = overlapped(max_norm=max_norm)
    plain = make()
    reference = fused(plain.parameters())
    for x in batches(4):
        step(model, optimizer, x)
        reference.zero_grad()
        plain(x).square().mean().backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        reference.step()
        work, lane.queue = lane.queue, []
        assert not any(event.begin() for event, _ in work)
        assert_same(model, plain, optimizer, reference)
    assert work
    assert waited == lane.begun
    assert optimizer.overlap.num_overlapped == (0 if max_norm == 1e-3 else 3)
    handle.detach()


def test_muon_steps_matrices_ahead() -> None:
    model, plain = make(), make()
    for net in (model, plain):
        for layer in net:
            layer[0].bias = None
    optimizer: Any = torch.optim.Muon(model.parameters(), lr=1e-2)
    handle = ebbtide.offload(model)
    optimizer = handle.overlap(optimizer, max_norm=0.1, shadow_budget=ROOM)
    reference = torch.optim.Muon(plain.parameters(), lr=1e-2)
    for x, by in zip(batches(6), (1.0, 1.0, 1.0, 100.0, 1.0, 1.0), strict=True):
        step(model, optimizer, x, by)
        reference.zero_grad()
        (plain(x).square().mean() * by).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        reference.step()
        assert_same(model, plain, optimizer, reference)
    assert optimizer.overlap.num_overlapped >= 3
    assert optimizer.overlap.num_clipped >= 1
    handle.detach()


def test_nothing_steps_ahead_on_the_cores_of_backward() -> None:
    model, optimizer, handle = overlapped(shadow_budget=None)
    for x in batches(3):
        step(model, optimizer, x)
    assert optimizer.overlap.num_overlapped == optimizer.overlap.shadow_bytes == 0
    assert "nothing stepped ahead" in [finding.cause for finding in handle.explain().findings]
    handle.detach()


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam, _Own])
def test_others_are_refused_by_name(kind: type[torch.optim.Optimizer]) -> None:
    model = make()
    with ebbtide.offload(model) as handle:
        optimizer = kind(model.parameters())
        with pytest.raises(ebbtide.PolicyError, match=kind.__name__):
            handle.overlap(optimizer)
    assert type(optimizer) is kind


def test_what_cannot_be_honoured_is_refused() -> None:
    model = make()
    handle = ebbtide.offload(model)
    for max_norm in (0, -1.0, float("nan"), True):
        with pytest.raises(ebbtide.PolicyError, match="max_norm"):
            handle.overlap(fused(model.parameters()), max_norm=max_norm)
    for shadow_budget in ("much", 24, "90%"):
        with pytest.raises(ebbtide.PolicyError, match="shadow_budget"):
            handle.overlap(fused(model.parameters()), shadow_budget=shadow_budget)
    replaced = fused(model.parameters())
    replaced.step = lambda: None
    for other in (replaced, model, list(model.parameters())):
        with pytest.raises(ebbtide.PolicyError):
            handle.overlap(other)
    with pytest.raises(ebbtide.PolicyError, match="max_norm"):
        handle.overlap(fused(model.parameters())).clip_grad_norm_()
    twice = handle.overlap(fused(model.parameters()))
    with pytest.raises(ebbtide.PolicyError):
        handle.overlap(twice)
    handle.detach()
    with pytest.raises(ebbtide.PolicyError):
        handle.overlap(fused(model.parameters()))


def test_it_is_the_same_optimizer_and_copies_of_it_are_plain() -> None:
    model = make()
    handle = ebbtide.offload(model)
    given = fused(model.parameters())
    optimizer = handle.overlap(given, max_norm=1.0, shadow_budget=ROOM)
    assert optimizer is given
    assert isinstance(optimizer, torch.optim.AdamW)
    for x in batches(3):
        step(model, optimizer, x)
    for plain in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(plain) is torch.optim.AdamW
        mine, its = optimizer.state_dict()["state"], plain.state_dict()["state"]
        for number, state in mine.items():
            assert all(torch.equal(value, its[number][name]) for name, value in state.items())
    handle.detach()
    assert type(optimizer) is torch.optim.AdamW
    step(model, optimizer, torch.ones(8, WIDTH))


def test_parameters_and_state_change_in_step_only() -> None:
    model, optimizer, handle = overlapped(trace=True)
    for x in batches(3):
        step(model, optimizer, x)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    model(torch.ones(8, WIDTH)).square().mean().backward()
    assert any(event.lane == "cpu_optimizer" for event in handle.trace.events)  # which has ended
    weights, state = before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    for number, own in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state[number][name]) for name, value in own.items())
    ahead = optimizer.overlap.num_overlapped
    optimizer.step()
    assert optimizer.overlap.num_overlapped == ahead + 1
    assert not any(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    handle.detach()


def test_who_refers_to_the_state_sees_the_step() -> None:
    """As with torch: in a `state_dict` that was taken before, and through a view."""
    model, optimizer, handle = overlapped()
    for x in batches(2):
        step(model, optimizer, x)
    taken = optimizer.state_dict()["state"]
    views = [state["exp_avg"].view(-1) for state in list(optimizer.state.values())[::2]]
    weights = [parameter.detach() for parameter in model.parameters()]
    for x in batches(3):
        step(model, optimizer, x)
    assert optimizer.overlap.num_overlapped == 4
    for (parameter, state), old, weight in zip(
        optimizer.state.items(), taken.values(), weights, strict=True
    ):
        assert all(torch.equal(state[name], value) for name, value in old.items())
        assert torch.equal(parameter, weight)
    for state, view in zip(list(optimizer.state.values())[::2], views, strict=True):
        assert torch.equal(state["exp_avg"].view(-1), view)
    handle.detach()


def test_weights_that_share_memory_step_one_after_the_other() -> None:
    models, optimizers = [], []
    for overlaps in (False, True):
        model = make()
        model[3][0].weight.data = model[0][0].weight.data
        optimizer = fused(model.parameters())
        if overlaps:
            optimizer = ebbtide.offload(model).overlap(optimizer, shadow_budget=ROOM)
        for x in batches(4):
            step(model, optimizer, x)
        models.append(model)
        optimizers.append(optimizer)
    assert_same(models[1], models[0], optimizers[1], optimizers[0])
    assert optimizers[1].overlap.num_overlapped == 3


def test_two_optimizers_step_the_same_weights() -> None:
    """A fused step raises no version of the weights that it changes."""
    results = []
    for overlaps in (False, True):
        model = make()
        optimizers = [fused(model.parameters()), fused(model[1:].parameters())]
        if overlaps:
            handle = ebbtide.offload(model)
            optimizers[1] = handle.overlap(optimizers[1], max_norm=None, shadow_budget=ROOM)
        for x in batches(4):
            model.zero_grad()
            model(x).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        results.append(list(model.parameters()))
    assert all(torch.equal(mine, plain) for plain, mine in zip(*results, strict=True))


@pytest.mark.parametrize("max_norm", [None, 0.2])
@pytest.mark.parametrize("kind", ["fused", "one by one"])
def test_with_a_gradient_scaler(kind: str, max_norm: float | None) -> None:
    """A scaler unscales the gradients in place, so all of them step in `step`."""
    models, optimizers = [], []
    for overlaps in (False, True):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=kind == "fused")
        if overlaps:
            optimizer = ebbtide.offload(model).overlap(
                optimizer, max_norm=max_norm, shadow_budget=ROOM
            )
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=2)
        for number, x in enumerate(batches(6)):
            optimizer.zero_grad()
            by = float("inf") if number == 3 else 1.0
            scaler.scale(model(x).square().mean() * by).backward()
            if max_norm is not None and not overlaps:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
        models.append(model)
        optimizers.append(optimizer)
    for mine, plain in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine, plain)
        assert mine.isfinite().all()
    # The infinite step was skipped, in torch's way: by the scaler, or by the fused kernel.
    assert optimizers[1].overlap.num_steps == (6 if kind == "fused" and max_norm is None else 5)


@pytest.mark.parametrize("scheduled", ["after", "before"])
def test_a_scheduler_a_closure_and_hooks_work_as_ever(
    scheduled: str, recwarn: pytest.WarningsRecorder
) -> None:
    results = []
    make_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR
    for overlaps in (False, True):
        model = make()
        optimizer = fused(model.parameters())
        scheduler = make_scheduler(optimizer, 8) if scheduled == "before" else None
        if overlaps:
            handle = ebbtide.offload(model)
            optimizer = handle.overlap(optimizer, max_norm=0.5, shadow_budget=ROOM)
        scheduler = scheduler or make_scheduler(optimizer, 8)
        called = []
        optimizer.register_step_pre_hook(lambda *_, called=called: called.append("before"))
        optimizer.register_step_post_hook(lambda *_, called=called: called.append("after"))
        losses = []
        for x in batches(6):

            def closure(model=model, optimizer=optimizer, overlaps=overlaps, x=x) -> Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                if not overlaps:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                return loss

            losses.append(optimizer.step(closure))
            scheduler.step()
        results.append([*model.parameters(), *losses])
        assert called == ["before", "after"] * 6
    assert all(torch.equal(mine, plain) for plain, mine in zip(*results, strict=True))
    assert not any("lr_scheduler" in str(warning.message) for warning in recwarn)
    assert optimizer.overlap.num_steps == 6
    handle.detach()
    assert ("step" in vars(optimizer)) == (scheduled == "before")  # as the scheduler left it
    optimizer.step()
    assert called == ["before", "after"] * 7


@pytest.mark.parametrize("bound", [1e6, 1e-3])
def test_the_program_may_clip_before_the_step(bound: float) -> None:
    """As a `Trainer` does, which logs the norm."""
    norms: list[list[Tensor]] = []
    models, optimizers = [], []
    for overlaps in (False, True):
        model = make()
        optimizer: Any = fused(model.parameters())
        if overlaps:
            optimizer = ebbtide.offload(model).overlap(
                optimizer, max_norm=bound, shadow_budget=ROOM
            )
        norms.append([])
        for x in batches(5):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if overlaps:
                norms[-1].append(optimizer.clip_grad_norm_())
            else:
                norms[-1].append(nn.utils.clip_grad_norm_(model.parameters(), bound))
            optimizer.step()
        models.append(model)
        optimizers.append(optimizer)
    assert all(torch.equal(mine, plain) for plain, mine in zip(*norms, strict=True))
    assert_same(models[1], models[0], optimizers[1], optimizers[0])
    stats = optimizers[1].overlap
    assert (stats.num_clipped, stats.num_overlapped) == ((0, 4) if bound > 1 else (5, 0))


def test_clipping_before_the_step_after_a_scaler_has_unscaled() -> None:
    """Unscaling raises no version, so the norms that the worker has computed do not count."""
    models = []
    for overlaps in (False, True):
        model = make()
        optimizer: Any = fused(model.parameters())
        if overlaps:
            optimizer = ebbtide.offload(model).overlap(optimizer, max_norm=0.2, shadow_budget=ROOM)
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
        for x in batches(4):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            if overlaps:
                optimizer.clip_grad_norm_()
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            scaler.step(optimizer)
            scaler.update()
        models.append(model)
    for mine, plain in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(mine, plain)


@pytest.mark.parametrize("what", ["weights", "gradients"])
def test_memory_that_is_assigned_through_data_is_seen(what: str) -> None:
    models = []
    for overlaps in (False, True):
        model = make()
        optimizer: Any = fused(model.parameters())
        if overlaps:
            optimizer = ebbtide.offload(model).overlap(optimizer, max_norm=1e6, shadow_budget=ROOM)
        for x in batches(4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            for parameter in model[1].parameters():
                changed = parameter if what == "weights" else parameter.grad
                changed.data = changed.data * 0.5
            if not overlaps:
                nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()
        models.append(model)
    for mine, plain in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(mine, plain)
    assert optimizer.overlap.num_overlapped == 3  # of the other layers


def test_a_step_that_raises_commits_nothing() -> None:
    """One parameter cannot step. Those that have stepped ahead stay as they were, and can step."""
    model, optimizer, handle = overlapped(max_norm=None)
    for x in batches(3):
        step(model, optimizer, x)
    model(torch.ones(8, WIDTH)).square().mean().backward()
    odd = model[0][0].bias
    gradient, odd.grad = odd.grad, odd.grad.to_sparse()  # AdamW refuses it
    optimizer_state = copy.deepcopy(optimizer.state_dict()["state"])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(state[name], v) for name, v in optimizer_state[number].items())
    odd.grad = gradient
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))
    handle.detach()


def test_shadows_keep_within_their_budget() -> None:
    # A layer has a weight of 32 x 32 and a bias of 32. Each has its values and two moments, of 4
    # bytes an element, and a count of steps of 4 bytes: two layers fit, and some of a third.
    layer_bytes = 3 * 4 * (WIDTH * WIDTH + WIDTH) + 2 * 4
    model, optimizer, handle = overlapped(shadow_budget=2 * layer_bytes + 500)
    for x in batches(3):
        step(model, optimizer, x)
    assert optimizer.overlap.num_overlapped == 2
    assert 2 * layer_bytes <= optimizer.overlap.shadow_bytes <= 2 * layer_bytes + 500
    handle.detach()


def test_where_most_steps_clip_nothing_is_stepped_ahead() -> None:
    model, optimizer, handle = overlapped(max_norm=0.3)
    for x in batches(8):
        step(model, optimizer, x, by=100.0)
    stats = optimizer.overlap
    assert stats.num_clipped == 8
    assert not stats.steps_ahead
    assert stats.shadow_bytes == 0
    for x in batches(8):
        step(model, optimizer, x, by=1e-3)
    assert optimizer.overlap.steps_ahead
    assert optimizer.overlap.num_clipped == 8
    assert optimizer.overlap.num_overlapped > 0
    assert "steps ahead now" in repr(optimizer)
    handle.detach()


def test_nothing_steps_ahead_of_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may add to a gradient that has landed, without a version."""
    model, optimizer, handle = overlapped()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for x in batches(3):
        step(model, optimizer, x)
    assert optimizer.overlap.num_overlapped == 0
    handle.detach()


def test_the_norm_is_that_of_torch() -> None:
    model, optimizer, handle = overlapped(max_norm=1e-2)
    for x in batches(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        assert torch.equal(optimizer.grad_norm, norm)
    handle.detach()


class _Seen(TorchFunctionMode):
    num_stepped = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch._fused_adamw_:
            self.num_stepped += len(args[0])
        return function(*args, **(kwargs or {}))


def test_a_step_without_gradients_has_the_norm_0() -> None:
    model, optimizer, handle = overlapped()
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    assert torch.equal(optimizer.grad_norm, torch.tensor(0.0))
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    handle.detach()


def test_several_threads_read_large_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    readers: set[int] = set()
    another_came = threading.Event()
    compute = torch._foreach_norm

    def noted(*arguments: Any) -> Any:
        readers.add(threading.get_ident())
        if len(readers) > 1:
            another_came.set()
        another_came.wait(60)  # or one that is quick would read all
        return compute(*arguments)

    torch.manual_seed(0)
    sizes = [10 + 40_000 * number for number in range(20)]
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    plain = [nn.Parameter(torch.zeros(size)) for size in sizes]
    model = nn.ParameterList(parameters)
    handle = ebbtide.offload(model)
    optimizer: Any = handle.overlap(torch.optim.SGD(parameters, lr=1.0), max_norm=0.5)
    for mine, theirs in zip(parameters, plain, strict=True):
        mine.grad = torch.randn(mine.shape) * torch.rand(())
        theirs.grad = mine.grad.clone()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = nn.utils.clip_grad_norm_(plain, 0.5)
        monkeypatch.setattr(torch, "_foreach_norm", noted)
        assert torch.equal(optimizer.clip_grad_norm_(), expected)
        assert len(readers) > 1
    finally:
        torch.set_num_threads(threads)
    for mine, theirs in zip(parameters, plain, strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    handle.detach()


def test_a_mode_around_the_step_sees_all_of_it() -> None:
    """Such a mode may change what a step does, and the worker's thread has none."""
    model, optimizer, handle = overlapped()
    for x in batches(3):
        step(model, optimizer, x)
    model(torch.ones(8, WIDTH)).square().mean().backward()
    with _Seen() as seen:
        optimizer.step()
    assert seen.num_stepped == len(list(model.parameters()))
    handle.detach()


def test_a_dropped_optimizer_leaves_no_hooks() -> None:
    model, optimizer, handle = overlapped()
    step(model, optimizer, torch.ones(8, WIDTH))
    assert all(len(p._post_accumulate_grad_hooks) == 1 for p in model.parameters())
    del optimizer
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    model(torch.ones(8, WIDTH)).sum().backward()
    handle.detach()


class _Spectrum(nn.Module):
    """The norm of so many complex numbers depends on how many threads add them up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(300_000, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).abs().sum()


@pytest.mark.parametrize("before_backward", [True, False])
def test_the_number_of_threads_may_change(before_backward: bool) -> None:
    norms: list[list[Tensor]] = []
    threads = torch.get_num_threads()
    for overlaps in (False, True):
        model = _Spectrum()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
        if overlaps:
            optimizer = ebbtide.offload(model).overlap(optimizer, max_norm=1e9, shadow_budget=ROOM)
        norms.append([])
        torch.manual_seed(1)
        for number in range(5):
            optimizer.zero_grad()
            if before_backward:
                torch.set_num_threads(1 + number % 2)
            model(torch.randn(300_000)).backward()
            torch.set_num_threads(1 + number % 2)
            if not overlaps:
                norms[-1].append(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
            optimizer.step()
            if overlaps:
                norms[-1].append(optimizer.grad_norm)
        assert not overlaps or optimizer.overlap.num_overlapped == (4 if before_backward else 0)
    torch.set_num_threads(threads)
    assert all(torch.equal(mine, plain) for plain, mine in zip(*norms, strict=True))


def step_in(worker: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this thread step ahead."""

    class ElsewhereLane(PromptLane):
        def submit(
            self, work: Callable[[], None], then: Callable[[], None] | None = None
        ) -> AbstractEvent:
            event = LaneEvent(self._lane)
            event.begin()
            assert then is None
            worker.submit(work).add_done_callback(lambda _: event.finish())
            return event

    make = CpuDevice.lane

    def lane(device: CpuDevice, name: str, lane: str) -> AbstractLane:
        return ElsewhereLane(lane) if lane == "cpu_optimizer" else make(device, name, lane)

    monkeypatch.setattr(CpuDevice, "lane", lane)


@pytest.mark.parametrize("clips", ["in step", "before step", "never"])
def test_a_step_computes_with_its_own_number_of_threads(
    clips: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of a plain step with as many; the program, and new threads, keep theirs."""
    with ThreadPoolExecutor(1) as worker:
        step_in(worker, monkeypatch)
        before = torch.get_num_threads()
        norms: list[list[Tensor]] = []
        for overlaps in (False, True):
            torch.set_num_threads(1)
            model = _Spectrum()
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
            max_norm = None if clips == "never" else 1e9
            if overlaps:
                optimizer = ebbtide.offload(model).overlap(
                    optimizer, max_norm=max_norm, shadow_budget=ROOM, num_threads=2
                )
            norms.append([])
            torch.manual_seed(1)
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(300_000)).backward()
                worker.submit(int).result()
                with ThreadPoolExecutor(1) as new:
                    assert new.submit(torch.get_num_threads).result() == 1
                torch.set_num_threads(1 if overlaps else 2)
                if not overlaps:
                    norms[-1].append(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
                elif clips == "before step":
                    norms[-1].append(optimizer.clip_grad_norm_())
                optimizer.step()
                if overlaps and clips == "in step":
                    norms[-1].append(optimizer.grad_norm)
                assert torch.get_num_threads() == (1 if overlaps else 2)
                torch.set_num_threads(1)
            assert not overlaps or worker.submit(torch.get_num_threads).result() == 2
            # Clipping multiplies complex gradients by 1, also before the step.
            num_overlapped = 0 if clips == "before step" else 3
            assert not overlaps or optimizer.overlap.num_overlapped == num_overlapped
        torch.set_num_threads(before)
    assert all(torch.equal(mine, plain) for plain, mine in zip(*norms, strict=False))
    assert clips == "never" or len(norms[1]) == 4


@pytest.mark.parametrize("given", [0, -1, True, 1.5])
def test_a_number_of_threads_is_a_number(given: Any) -> None:
    with pytest.raises(ebbtide.PolicyError, match="num_threads"):
        overlapped(num_threads=given)


def test_the_worker_flushes_small_numbers_no_more_than_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread has the setting of who started it, which the program has changed since."""
    with ThreadPoolExecutor(1) as worker:
        torch.set_flush_denormal(True)
        worker.submit(int).result()
        torch.set_flush_denormal(False)
        step_in(worker, monkeypatch)
        plain = make()
        reference = fused(plain.parameters())
        model, optimizer, handle = overlapped(max_norm=None)
        for x in batches(3):  # the squares of gradients of 1e-20 are no normal numbers
            step(plain, reference, x, by=1e-17)
            optimizer.zero_grad()
            (model(x).square().mean() * 1e-17).backward()
            worker.submit(int).result()  # it has done all before that
            optimizer.step()
        assert optimizer.overlap.num_overlapped
        assert_same(model, plain, optimizer, reference)
        assert any(state["exp_avg_sq"].any() for state in reference.state.values())
        handle.detach()


class _Signed(nn.Module):
    """Its gradient is -0.0 - 1.0j, which a multiplication by 1 makes 0.0 - 1.0j."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), complex(-0.0, 3.0)))

    def forward(self) -> Tensor:
        return (torch.view_as_real(self.weight) * torch.tensor([-0.0, -1.0])).sum()


def test_clipping_by_one_changes_the_signs_of_complex_zeros() -> None:
    results = []
    for overlaps in (False, True):
        model = _Signed()
        optimizer: Any = torch.optim.Adagrad(model.parameters(), lr=0.1)
        if overlaps:
            optimizer = ebbtide.offload(model).overlap(
                optimizer, max_norm=100.0, shadow_budget=ROOM
            )
        for _ in range(3):
            optimizer.zero_grad()
            model().backward()
            if not overlaps:
                nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
        both = torch.stack([model.weight.detach(), model.weight.grad])
        results.append(torch.view_as_real(both))
        assert not overlaps or optimizer.overlap.num_overlapped == 2
    assert torch.equal(results[0].signbit(), results[1].signbit())
    assert torch.equal(*results)


def test_reports_tell_of_the_step_inside_backward(tmp_path: Path) -> None:
    model, optimizer, handle = overlapped(max_norm=1e-3, trace=True)
    assert "0 of 0 steps" in handle.notes[-1]
    for x in batches(6):
        step(model, optimizer, x, by=100.0)
    stats = optimizer.overlap
    assert not stats.steps_ahead
    said = str(handle.explain())
    assert "stepped again, so nothing is stepped ahead now" in " ".join(said.split())
    assert "clipped in 6 of 6 steps" in " ".join(said.split())
    for x in batches(6):
        step(model, optimizer, x, by=1e-6)
    # Two of these pass until it pays again, and then each step commits what was stepped ahead.
    ahead = optimizer.overlap.num_overlapped
    assert ahead > 0
    causes = [finding.cause for finding in handle.explain().findings]
    assert "stepped twice" not in causes
    hidden = optimizer.overlap.hidden_share
    assert ("step not hidden" in causes) == (hidden < 0.5)
    assert f"inside backward in {ahead} of 12 steps: {hidden:.0%} of" in handle.notes[-1]
    handle.report(tmp_path / "run.html")
    assert handle.notes[-1] in (tmp_path / "run.html").read_text()
    handle.save_run(tmp_path / "run.json")
    assert '"cpu_optimizer"' in (tmp_path / "run.json").read_text()
    assert "cpu_optimizer" in handle.trace.timeline()
    handle.detach()
