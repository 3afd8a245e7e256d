"""A budget does not run the user's program once more: what a program does besides, it does once."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import pkgutil
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import ebbtide
from ebbtide import ActivationPolicy
from ebbtide.planning import Plan, PlanBudget, Prediction, StepTiming, find_frugal, search
from live_memory import LiveMemory
from plan_cases import MB, make_layer, make_link, make_profile

SMALL = ActivationPolicy(min_bytes=1)
ROWS, WIDTH = 64, 32
GENERATOR = np.random.default_rng(0)
COUNTER = itertools.count()
COLLECTED: list[Tensor] = []


@functools.lru_cache
def cached_mask(rows: int) -> Tensor:
    return torch.tril(torch.ones(rows, rows)) / rows


class Block(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)).sigmoid())


class Net(nn.Module):
    """Does something besides computing, before its blocks."""

    def __init__(self, besides: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.besides = besides

    def forward(self, x: Tensor, *_: object) -> Tensor:
        if self.besides is not None:
            x = self.besides(x)
        for block in self.blocks:
            x = block(x)
        return x


def keeps_a_mask(x: Tensor) -> Tensor:
    return cached_mask(len(x)) @ x


def draws_numbers(x: Tensor) -> Tensor:
    return x * float(GENERATOR.random()) + random.random()


def counts_on(x: Tensor) -> Tensor:
    Block.calls += 1
    return x * (1 + next(COUNTER) + Block.calls)


def collects(x: Tensor) -> Tensor:
    COLLECTED.append(x.detach().mean(0))
    return x - torch.stack(COLLECTED[-3:]).mean(0)


def looks_at_values(x: Tensor) -> Tensor:
    return x * (2.0 if x.sum().item() > 0 else 1.0)


def embeds_sparsely() -> Callable[[Tensor], Tensor]:
    embedding = nn.Embedding(7, WIDTH, sparse=True)
    return lambda x: x + embedding(torch.arange(len(x)) % 7)


@pytest.fixture(autouse=True)
def _fresh_globals() -> None:
    global GENERATOR, COUNTER
    GENERATOR, COUNTER = np.random.default_rng(0), itertools.count()
    COLLECTED.clear()
    cached_mask.cache_clear()
    Block.calls = 0


def losses(net: nn.Module, steps: int = 6, **offload: object) -> list[float]:
    """Train, with an offload if there are arguments for one."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    found = []
    batches = torch.Generator().manual_seed(1)
    handle = ebbtide.offload(net, activations=SMALL, **offload) if offload else None
    for _ in range(steps):
        loss = net(torch.randn(ROWS, WIDTH, generator=batches)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    if handle is not None:
        assert handle.plan is not None
        handle.detach()
    return found


BESIDES = [keeps_a_mask, draws_numbers, counts_on, collects, looks_at_values]


@pytest.mark.parametrize("besides", BESIDES, ids=lambda each: each.__name__)
def test_what_a_forward_does_besides_happens_once_in_a_step(
    besides: Callable[[Tensor], Tensor],
) -> None:
    results = []
    for offload in ({}, {"budget": "90%"}):
        _fresh_globals.__wrapped__()
        torch.manual_seed(0)
        random.seed(0)
        results.append((losses(Net(besides), **offload), random.random(), GENERATOR.random()))
    assert results[0] == results[1]
    assert Block.calls in (0, 6)
    kept = [*COLLECTED, *([cached_mask(ROWS)] if besides is keeps_a_mask else [])]
    assert not any(isinstance(each, FakeTensor) for each in kept)


def test_a_sparse_embedding_is_planned() -> None:
    torch.manual_seed(0)
    plain = losses(Net(embeds_sparsely()))
    torch.manual_seed(0)
    assert losses(Net(embeds_sparsely()), budget="90%") == plain


@pytest.mark.parametrize("shared", [False, True])
def test_threads_that_run_models_under_budgets(shared: bool) -> None:
    torch.manual_seed(0)
    nets = [Net()] * 3 if shared else [Net() for _ in range(3)]
    handles = [ebbtide.offload(net, budget="90%", activations=SMALL) for net in dict.fromkeys(nets)]
    errors: list[BaseException] = []
    begin = threading.Barrier(3)

    def train(net: nn.Module) -> None:
        try:
            begin.wait()
            for _ in range(6):
                torch.autograd.grad(net(torch.ones(ROWS, WIDTH)).sum(), list(net.parameters()))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(net,)) for net in nets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for handle in handles:
        handle.detach()


@pytest.fixture
def num_recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps were recorded, so that kinds of steps have plans."""
    recorded: list[int] = []
    place = "ebbtide.planning.budget.BudgetController._record"
    record = pkgutil.resolve_name(place)

    def counted(self: object, kind: object, args: object, kwargs: object) -> None:
        recorded.append(1)
        record(self, kind, args, kwargs)

    monkeypatch.setattr(place, counted)
    return recorded


class Config:
    """An object of the program's own."""


def holds_a_tensor(net: Net, data: Tensor) -> None:
    net.dataset = data


def holds_a_dataset(net: Net, data: Tensor) -> None:
    net.dataset = torch.utils.data.TensorDataset(data)


def holds_an_object(net: Net, data: Tensor) -> None:
    net.config = Config()
    net.config.data = {"train": [data]}


def layers_hold_it(net: Net, data: Tensor) -> None:
    for block in net.blocks:
        block.table = data


DATA_BYTES = 2**24


@pytest.mark.parametrize(
    ("holds", "num_copies"),
    [(holds_a_tensor, 0), (holds_a_dataset, 0), (holds_an_object, 0), (layers_hold_it, 1)],
)
def test_data_that_the_model_holds_is_not_copied(
    holds: Callable[[Net, Tensor], None], num_copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a layer itself holds is copied once, while the layer is verified."""
    live = LiveMemory()
    monkeypatch.setattr("ebbtide.planning.budget.memory_of", lambda _: live)
    slow = make_link(1.0, computes_on_host=True)  # so that layers are recomputed
    monkeypatch.setattr("ebbtide.planning.budget.assumed_hardware", lambda _: slow)
    monkeypatch.setattr("ebbtide.planning.budget_study.measured_hardware", lambda known, _: known)
    recomputed_bytes = peak_bytes = 0
    with live, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = Net()
        holds(net, torch.ones(DATA_BYTES // 4))
        before_bytes = live.now_bytes()
        # Of the 5.8 MB that a step needs; 3.2 with all layers recomputed.
        budget = before_bytes + 5_200_000
        with ebbtide.offload(net, budget=budget, activations=SMALL) as handle:
            for _ in range(6):
                net(torch.randn(64 * ROWS, WIDTH)).sum().backward()
                recomputed_bytes += handle.stats.recomputed_bytes
                peak_bytes = max(peak_bytes, live.peak_bytes())  # the budget resets it
        assert peak_bytes - before_bytes < (num_copies + 0.5) * DATA_BYTES
    assert recomputed_bytes > 0


def test_anomaly_detection_finds_no_anomaly(capfd: pytest.CaptureFixture[str]) -> None:
    net = Net()
    with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
        warnings.simplefilter("error")
        with ebbtide.offload(net, budget="90%", activations=SMALL) as handle:
            for _ in range(6):
                net(torch.randn(ROWS, WIDTH)).sum().backward()
            assert handle.plan is not None
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("number", [lambda step: step, lambda step: step / 7, lambda _: True])
def test_a_number_among_the_arguments_is_no_kind_of_its_own(
    number: Callable[[int], object], num_recorded: list[int]
) -> None:
    net = Net()
    with ebbtide.offload(net, budget="90%", activations=SMALL) as handle:
        for step in range(12):
            net(torch.randn(ROWS, WIDTH), number(step)).sum().backward()
        assert handle.plan is not None
    assert len(num_recorded) == 1


class Deep(Net):
    """Calls as many of its blocks as a number says."""

    def forward(self, x: Tensor, depth: int) -> Tensor:
        for block in self.blocks[:depth]:
            x = block(x)
        return x


def test_a_number_that_changes_what_is_saved_is_planned_for(num_recorded: list[int]) -> None:
    """The plan of the first depth is followed for each other one, as far as there are layers."""
    plain, net = Deep(), Deep()
    net.load_state_dict(plain.state_dict())
    x = torch.randn(ROWS, WIDTH)
    for step in range(24):
        plain(x, 1 + step % 3).sum().backward()
    with ebbtide.offload(net, budget="90%", activations=SMALL):
        for step in range(24):
            net(x, 1 + step % 3).sum().backward()
    assert len(num_recorded) == 1
    pairs = zip(plain.parameters(), net.parameters(), strict=True)
    assert all(torch.equal(one.grad, two.grad) for one, two in pairs)


def test_lengths_that_change_share_what_they_can(num_recorded: list[int]) -> None:
    net = Net()
    lengths = random.Random(0)
    with ebbtide.offload(net, budget="90%", activations=SMALL) as handle:
        for _ in range(60):
            net(torch.randn(lengths.randrange(8, 512), WIDTH)).sum().backward()
        assert handle.plan is not None
    assert len(num_recorded) <= 8


def test_a_long_step_is_planned_in_about_the_time_that_it_may_take() -> None:
    """In time that passes as predictions are made: no clock of this machine is asked."""
    layers = tuple(
        dataclasses.replace(make_layer(2, 1, name=f"cell.{index % 2}"), input_same_as=None)
        for index in range(300)
    )
    profile, link = make_profile(*layers), make_link(1000.0, computes_on_host=True)
    budget = PlanBudget(device_bytes=200 * MB)
    now_s = [0.0]

    class Counting:
        num_predictions = 0

        def predict(self, plan: Plan) -> Prediction:
            self.num_predictions += 1
            now_s[0] += 1.0
            return StepTiming(profile, link).predict(plan)

    counting = Counting()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ebbtide.planning.contest.time.thread_time", lambda: now_s[0])
        plan = search(profile, link, budget, counting, limit_s=6.0)
        assert plan.peak_bytes is not None and plan.peak_bytes <= budget.device_bytes
        assert counting.num_predictions <= 16
        counting.num_predictions = 0
        find_frugal(profile, link, counting, limit_s=20.0)
    assert counting.num_predictions <= 21


def test_a_gradient_penalty_has_a_plan_that_settles() -> None:
    net = Net()
    plain = [p.detach().clone() for p in net.parameters()]
    with ebbtide.offload(net, budget="90%", activations=SMALL) as handle:
        for _ in range(30):
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            (grad,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
            grad.square().sum().backward()
        assert handle.plan is not None and handle.plan.settled
    assert all(map(torch.equal, plain, net.parameters()))


def test_a_dropped_model_under_a_budget_is_freed_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        net = Net()
        handle = ebbtide.offload(net, budget="90%", activations=SMALL)
        for _ in range(3):
            net(torch.randn(ROWS, WIDTH)).sum().backward()
        gone = weakref.ref(net.blocks[0])
        del net, handle
        assert gone() is None
    finally:
        gc.enable()


class Timed(nn.Module):
    """A block that is shared by several calls, before each of which the loop sets an attribute."""

    t = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x) * self.t).sigmoid().square().exp())


class Shared(nn.Module):
    """Calls one block three times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Timed()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for step in range(3):
            self.block.t = (1 + step) / 3
            x = self.block(x)
        return self.head(x)


class Forgetful(Shared):
    """Its block depends on a global counter, of which a second forward knows nothing."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            self.block.t = float(1 + next(COUNTER) % 5)
            x = self.block(x + 0.1 * (next(COUNTER) % 3))
        return self.head(x)


@pytest.mark.parametrize("kind", [Shared, Forgetful])
def test_what_a_tight_budget_recomputes_is_the_same_forward(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Link so slow that recomputation is what a plan chooses, memory so tight that it must."""
    global COUNTER
    live = LiveMemory()
    monkeypatch.setattr("ebbtide.planning.budget.memory_of", lambda _: live)
    slow = make_link(1.0, computes_on_host=True)
    monkeypatch.setattr("ebbtide.planning.budget.assumed_hardware", lambda _: slow)
    results, peak = [], 0
    with live, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for budget in (None, 0.6):
            torch.manual_seed(0)
            COUNTER = itertools.count()
            net = kind()
            found, begin = [], live.now_bytes()
            live.reset_peak()
            offload = {} if budget is None else {"budget": begin + int(budget * peak)}
            handle = ebbtide.offload(net, activations=SMALL, **offload) if offload else None
            recomputed = 0
            for step in range(20):
                x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
                loss = net(x).square().mean()
                loss.backward()
                found.append([loss.item(), *(p.grad.clone() for p in net.parameters())])
                net.zero_grad()
                recomputed += 0 if handle is None else handle.stats.recomputed_bytes
            peak = live.peak_bytes() - begin
            results.append(found)
            if handle is not None:
                assert recomputed
                handle.detach()
    for one, two in zip(*results, strict=True):
        assert one[0] == two[0]
        assert all(map(torch.equal, one[1:], two[1:]))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.usefixtures("_own_compiler_cache")
def test_compiled_layers_are_compiled_as_often_as_without_a_budget(in_place: bool) -> None:
    counts = []
    for budget in (None, "90%"):
        torch._dynamo.reset()
        compiled, runs = [], []

        def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
            compiled.append(graph)  # noqa: B023

            def run(*args: object) -> object:
                runs.append(1)  # noqa: B023
                return graph.forward(*args)

            return run

        blocks: list[nn.Module] = [Block() for _ in range(2)]
        if in_place:
            for block in blocks:
                block.compile(backend=backend)
        else:
            blocks = [torch.compile(block, backend=backend) for block in blocks]
        model = nn.Sequential(*blocks)
        if budget is not None:
            ebbtide.offload(model, budget=budget, activations=SMALL)
        for _ in range(4):
            model(torch.ones(ROWS, WIDTH)).sum().backward()
        counts.append((len(compiled), len(runs)))
    assert counts[0] == counts[1]


@pytest.fixture
def _own_compiler_cache() -> Iterator[None]:
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("retains", [False, True])
def test_a_plan_knows_whether_backward_lets_go_of_what_it_has_read(retains: bool) -> None:
    """Two forwards come before the two backwards: each lets go of its own, or of nothing.

    A program that does the latter in some steps only may do so in any.
    """
    model = Net()
    with ebbtide.offload(model, budget="90%", activations=SMALL) as handle:
        for number in range(5):
            losses = [model(torch.ones(ROWS, WIDTH)).sum() for _ in range(2)]
            for loss in losses:
                loss.backward(retain_graph=retains and number < 3)
            del loss, losses
        plan = handle.plan
    assert plan is not None and plan.profile.retains is retains
