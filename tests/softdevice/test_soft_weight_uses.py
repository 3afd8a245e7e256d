"""What else programs do with weights at rest: copies, hooks, optimizers, scalers, pipelines."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ebbtide
import softdevice
from ebbtide.interop.pipelining import offload_stages
from soft_bench import PORTFOLIO
from test_soft_processes import _code, _run

WIDTH = 16

Program = Callable[[nn.Sequential, torch.device], list[Tensor]]


def _model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers).to(device)


def _batch(device: torch.device, number: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)).to(device)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, number: int
) -> Tensor:
    optimizer.zero_grad()
    loss = model(_batch(device, number)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def _saved(state: object) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=False)


def _copied(model: nn.Sequential, device: torch.device) -> list[Tensor]:
    """Copied, pickled and saved in a forward, between forward and backward, and after it."""
    optimizer = _adam(model)
    _step(model, optimizer, device, 0)
    copies: list[nn.Module] = []

    def take(*_: object) -> None:
        copies.append(copy.deepcopy(model))
        copies.append(pickle.loads(pickle.dumps(model)))
        copies.append(_saved(model))

    x = model[1](model[0](_batch(device, 1)))
    take()
    loss = model[3](model[2](x)).square().mean()
    take()
    loss.backward()
    take()
    optimizer.step()
    take()
    assert not any(hasattr(each.forward, "planner") for each in copies)  # as a replaced one has
    return [value for each in (model, *copies) for value in _values(each)]


def _states(model: nn.Sequential, device: torch.device) -> list[Tensor]:
    """State dicts, saved at any time."""
    optimizer = _adam(model)
    _step(model, optimizer, device, 0)
    states: list[dict[str, Tensor]] = []

    def take(*_: object) -> None:
        states.append(_saved(model.state_dict()))

    hook = model[1][0].register_forward_hook(take)
    y = model[0](_batch(device, 1))
    y.register_hook(take)
    loss = model[3](model[2](model[1](y))).square().mean()
    hook.remove()
    take()
    loss.backward()
    states += _saved(optimizer.state_dict())["state"].values()
    optimizer.step()
    return [value for state in states for value in state.values()] + _values(model)


def _changed_by_hooks(model: nn.Sequential, device: torch.device) -> list[Tensor]:
    """Weights of the layer that runs, of one that has run, and of one that will."""

    def shrink(module: nn.Module, *_: object) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.9)

    def before(module: nn.Module, *_: object) -> None:
        with torch.no_grad():
            module.weight.mul_(0.9)  # type: ignore[operator, union-attr]
        module.bias.data.add_(0.1)  # type: ignore[operator, union-attr]

    def after(*_: object) -> None:
        with torch.no_grad():
            model[3][0].bias.mul_(0.9)
        model[0][0].bias.data.mul_(1.1)

    hooks = [layer.register_forward_pre_hook(shrink) for layer in model]
    hooks += [layer[0].register_forward_pre_hook(before) for layer in model]
    hooks.append(model[2].register_forward_hook(after))
    optimizer = _adam(model)
    losses = [_step(model, optimizer, device, number) for number in range(3)]
    for hook in hooks:
        hook.remove()
    return losses + _values(model)


def _switched(model: nn.Sequential, device: torch.device) -> list[Tensor]:
    """Another optimizer, also between a backward and the step; and the first one loaded again."""
    first = _adam(model)
    losses = [_step(model, first, device, number) for number in range(2)]
    state = copy.deepcopy(first.state_dict())
    second = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    losses += [_step(model, second, device, number) for number in range(2, 4)]
    model(_batch(device, 4)).square().mean().backward()
    third = _adam(model)
    third.load_state_dict(state)
    third.step()
    return [*losses, _step(model, third, device, 5), *_values(model)]


def _stepped_in_backward(model: nn.Sequential, device: torch.device) -> list[Tensor]:
    optimizers = {p: torch.optim.SGD([p], lr=0.1, foreach=False) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    hooks = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    losses = []
    for number in range(3):
        loss = model(_batch(device, number)).square().mean()
        loss.backward()
        losses.append(loss.detach())
    for hook in hooks:
        hook.remove()
    return losses + _values(model)


def _searched(model: nn.Sequential, device: torch.device) -> list[Tensor]:
    """LBFGS evaluates several times in a step, and writes the weights in between."""
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(_batch(device, 0)).square().mean()
        loss.backward()
        return loss

    return [optimizer.step(closure).detach() for _ in range(2)] + _values(model)  # type: ignore[arg-type, attr-defined]


def _scaled(
    model: nn.Sequential, device: torch.device, *, fused: bool = False, clipped: bool = False
) -> list[Tensor]:
    """The second of four steps has gradients that are not finite."""
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, fused=fused, foreach=False
    )
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    scales = []
    for number in range(4):
        optimizer.zero_grad()
        batch = _batch(device, number) * (float("inf") if number == 1 else 1)
        scaler.scale(model(batch).square().mean()).backward()
        if clipped:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=False)
        scaler.step(optimizer)
        scaler.update()
        scales.append(torch.tensor(scaler.get_scale()))
    return scales + _values(model)


def _scaled_and_fused(model: nn.Sequential, device: torch.device) -> list[Tensor]:
    return _scaled(model, device, fused=True)


def _scaled_and_clipped(model: nn.Sequential, device: torch.device) -> list[Tensor]:
    return _scaled(model, device, clipped=True)


PROGRAMS = (
    _copied,
    _states,
    _changed_by_hooks,
    _switched,
    _stepped_in_backward,
    _searched,
    _scaled,
    _scaled_and_fused,
    _scaled_and_clipped,
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__[1:])
def test_a_program_gives_what_it_gives_without_offload(
    device: torch.device, program: Program
) -> None:
    for order in PORTFOLIO:
        softdevice.choose_order(order)
        expected = [value.cpu() for value in program(_model(device), device)]
        mine = _model(device)
        with ebbtide.offload(mine, weights=ebbtide.WeightPolicy()):
            found = program(mine, device)
            pairs = zip(found, expected, strict=True)
            right = [torch.equal(value.cpu(), plain) for value, plain in pairs]
        assert all(right), f"{order}: {right}"


@pytest.fixture
def _group() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
def test_a_stage_of_a_pipeline_with_weights_at_rest(device: torch.device) -> None:
    def train(*, offloads: bool) -> list[Tensor]:
        stage = PipelineStage(_model(device), 0, 1, device)
        pipeline = ScheduleGPipe(stage, 4, loss_fn=F.mse_loss)
        policy = ebbtide.ActivationPolicy(min_bytes=1)
        weights = ebbtide.WeightPolicy()
        handle = None
        if offloads:
            handle = offload_stages(pipeline, resident=2, activations=policy, weights=weights)
        optimizer = _adam(stage.submod)
        found: list[Tensor] = []
        for number in range(3):
            losses: list[Tensor] = []
            optimizer.zero_grad()
            pipeline.step(_batch(device, number), target=_batch(device, 9), losses=losses)
            optimizer.step()
            found += [loss.detach() for loss in losses]
        if handle is not None:
            handle.detach()
        return [value.cpu() for value in found + _values(stage.submod)]

    for order in PORTFOLIO:
        softdevice.choose_order(order)
        expected = train(offloads=False)
        assert all(map(torch.equal, train(offloads=True), expected)), order


@pytest.mark.parametrize("order", ["threads", "compute-first", "copies-first", "random:1"])
def test_a_forked_child_is_told_and_the_parent_goes_on(order: str) -> None:
    body = """
import ebbtide
from torch import nn
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
model.to("softdevice")
handle = ebbtide.offload(model, weights=ebbtide.WeightPolicy())
x = torch.randn(4, 8).to("softdevice")
loss = model(x).square().mean()
child = os.fork()
if child == 0:
    try:
        model(x)
    except ebbtide.ForkedProcessError as error:
        print(error, flush=True)
    try:
        model[0][0].weight.tolist()
    except (RuntimeError, NotImplementedError) as error:
        print(error, flush=True)
    print("child", {p.device.type for p in model.parameters()}, flush=True)
    handle.detach()
    os._exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7
loss.backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
handle.detach()
print("parent", all(p.grad is not None for p in model.parameters()))
"""
    finished = _run(_code(order, body))
    assert finished.returncode == 0, finished.stderr
    assert "Offload only after the processes have been forked" in finished.stdout
    assert "meta" in finished.stdout
    assert "child {'meta'}" in finished.stdout
    assert finished.stdout.endswith("parent True\n")


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
        raise ValueError("here")


def _keep_callbacks(monkeypatch: pytest.MonkeyPatch, alive: list[Any]) -> None:
    """Keep what is called at the end of backwards, as autograd's thread may."""
    engine = torch.autograd.Variable._execution_engine

    def queue_callback(end: Callable[[], None]) -> None:
        engine.queue_callback(end)
        alive.append(end)

    proxy = SimpleNamespace(queue_callback=queue_callback, run_backward=engine.run_backward)
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", proxy)


def test_writes_after_a_backward_that_raised(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd's thread may be slow to let go of that backward; a forward reads its weights."""
    alive: list[Any] = []
    _keep_callbacks(monkeypatch, alive)
    for order in PORTFOLIO:
        softdevice.choose_order(order)
        torch.manual_seed(0)
        plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).to(device)
        mine = copy.deepcopy(plain)
        x = torch.randn(8, 64).to(device)
        with ebbtide.offload(mine, layers=list(mine), weights=ebbtide.WeightPolicy()):
            with pytest.raises(ValueError, match="here"):
                mine[2](mine[1](_Raises.apply(mine[0](x)))).sum().backward()
            values = []
            for model in (plain, mine):
                with torch.no_grad():
                    for factor in (1.1, 0.5):
                        for parameter in model.parameters():
                            parameter.mul_(factor)
                        values.append(model(x))
                    for parameter in model.parameters():
                        parameter.mul_(7)
        for one, other in zip(values[:2], values[2:], strict=True):
            assert torch.equal(one.cpu(), other.cpu()), order
        alive.clear()


class _Stop(BaseException):
    """Torch calls no hook of a module that this ends, as with SystemExit."""


def test_parameters_are_back_after_a_recomputation_that_was_interrupted(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd's thread, in which the layer ran again, may be slow to let go of that backward."""
    alive: list[Any] = []
    _keep_callbacks(monkeypatch, alive)

    def stop_in_backward(*_: object) -> None:
        if torch._C._current_graph_task_id() != -1:
            raise _Stop

    for order in PORTFOLIO:
        softdevice.choose_order(order)
        model, plain = _model(device), _model(device)
        expected = [value.cpu() for value in _values(plain)]
        with ebbtide.offload(model, layers=list(model), weights=ebbtide.WeightPolicy()):
            hook = model[1][1].register_forward_pre_hook(stop_in_backward)
            y = checkpoint(model[1], model[0](_batch(device, 0)), use_reentrant=False)
            with pytest.raises(_Stop):
                y.sum().backward()
            hook.remove()
            state = model.state_dict()
            assert {value.device.type for value in state.values()} == {"cpu"}, order
            assert all(map(torch.equal, _saved(state).values(), expected)), order
            for each in (model, plain):
                each.zero_grad()
                each(_batch(device, 1)).square().sum().backward()
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(mine.grad.cpu(), other.grad.cpu()), order
        alive.clear()


def test_parameters_stay_on_the_device_in_a_layer_that_runs(device: torch.device) -> None:
    """Whoever looks at all parameters in a layer's forward does not take them out of it."""
    model = _model(device)
    found = []

    def look(module: nn.Module, _: object) -> None:
        found.extend(parameter.device.type for parameter in module.parameters())

    with ebbtide.offload(model, layers=list(model), weights=ebbtide.WeightPolicy()):
        model[2].register_forward_pre_hook(look)
        model[2](_batch(device, 0)).sum().backward()
        model(_batch(device, 0)).sum().backward()
    assert set(found) == {device.type}


def _closure_steps(model: nn.Module, device: torch.device, width: int = WIDTH) -> list[Tensor]:
    """Steps of an optimizer that calls forward and backward itself, and joins all gradients."""
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    x = torch.randn(256, width, generator=torch.Generator().manual_seed(0)).to(device)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    return [optimizer.step(closure).detach().cpu() for _ in range(4)]


def test_a_budget_leaves_weights_where_an_optimizer_joins_them(device: torch.device) -> None:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))
    model = nn.Sequential(*blocks, nn.Linear(64, 1)).to(device)
    twin = copy.deepcopy(model)
    torch.accelerator.reset_peak_memory_stats()
    expected = _closure_steps(twin, device, 64)
    budget = int(0.6 * torch.accelerator.max_memory_allocated())
    del twin
    everything = ebbtide.ActivationPolicy(min_bytes=1)
    with ebbtide.offload(model, budget=budget, activations=everything) as handle:
        found = _closure_steps(model, device, 64)
        assert handle.plan is not None and not handle.plan.plan.has_weights_on_host
    assert all(map(torch.equal, found, expected))


def test_an_optimizer_that_joins_parameters_on_two_devices_is_refused(
    device: torch.device,
) -> None:
    model = _model(device)
    with (
        ebbtide.offload(model, layers=list(model)[:2], weights=ebbtide.WeightPolicy()),
        pytest.raises(ebbtide.PolicyError),
    ):
        _closure_steps(model, device)


def test_a_budget_can_be_told_to_leave_the_weights_on_the_device(device: torch.device) -> None:
    """Though they are more than half of it, and would rest from the beginning."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8))).to(device)
    for weights, places in ((None, {"cpu", device.type}), (0, {device.type})):
        policy = None if weights is None else ebbtide.WeightPolicy(num_layers=weights)
        with ebbtide.offload(model, budget="700KiB", weights=policy):
            assert {each.device.type for each in model.parameters()} == places


def test_a_bias_that_is_replaced_between_two_forwards_of_a_graph(device: torch.device) -> None:
    def run(offloads: bool) -> list[Tensor | None]:
        model = _model(device)
        handle = ebbtide.offload(model, weights=ebbtide.WeightPolicy()) if offloads else None
        first, before = model(_batch(device, 0)).mean(), model[1][0].bias
        given = nn.Parameter((before.detach() * 1.5).to("cpu" if offloads else device))
        model[1][0].bias = given
        (first + model(_batch(device, 1)).mean()).backward()
        gradients = [before.grad, *(p.grad for p in model.parameters())]
        if handle is not None:
            handle.detach()
        return [None if each is None else each.cpu() for each in gradients]

    for plain, offloaded in zip(run(False), run(True), strict=True):
        assert plain is not None and offloaded is not None
        assert torch.equal(plain, offloaded)


class _Momentum(nn.Module):
    """Updates a copy of its weights through ``.data``, which no version tells of, and calls it."""

    def __init__(self, query: nn.Module) -> None:
        super().__init__()
        self.query = query
        self.key = copy.deepcopy(query).requires_grad_(False)
        self.pairs = [*zip(self.query.parameters(), self.key.parameters(), strict=True)]

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        with torch.no_grad():
            for own, average in self.pairs:
                average.data.mul_(0.5).add_(own.data, alpha=0.1)
            key = self.key(x)
        return query - key


@pytest.mark.parametrize("store", ["host", "disk", "tiered"])
def test_weights_that_the_forward_writes_through_data_before_their_layer_runs(
    device: torch.device, store: str
) -> None:
    """The first layer of `key` is prefetched while the last one of `query` runs."""
    results = []
    for offloads in (False, True):
        model = _Momentum(_model(device))
        if offloads:
            ebbtide.offload(model, weights=ebbtide.WeightPolicy(), store=store)
        optimizer = _adam(model.query)
        losses = [_step(model, optimizer, device, number) for number in range(3)]
        results.append([each.cpu() for each in losses + _values(model)])
    assert all(map(torch.equal, *results))


class _Linear(nn.Linear):
    """A layer whose forward asks more of its weight than its values, or leaves something there."""

    def __init__(self, kind: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.kind, self.number, self.seen = kind, 0, -1
        self.twins = nn.ModuleList()
        self.weight.scale = 0.5  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        weight, self.number = self.weight, self.number + 1
        return F.linear(x, getattr(self, f"use_{self.kind}")(weight), self.bias)

    def use_attribute(self, weight: Any) -> Any:
        return weight * getattr(weight, "scale", 1.0)

    def use_attribute_set(self, weight: Any) -> Any:
        weight.scale *= 1.1
        return weight * weight.scale

    def use_version(self, weight: Any) -> Any:
        if weight._version != self.seen:
            self.seen, self.norm = weight._version, weight.detach().norm().clone()
        return weight / self.norm

    def use_gradient(self, weight: Any) -> Any:
        return weight * (1.0 if weight.grad is None else 0.9)

    def use_gradient_forgotten(self, weight: Any) -> Any:
        if self.number % 2:
            weight.grad = None
        return weight

    def use_hook(self, weight: Any) -> Any:
        if self.number == 1:
            mask = torch.full((WIDTH, 1), 0.5, device=weight.device)
            weight.register_hook(lambda gradient: gradient * mask)
        return weight

    def use_later_hook(self, weight: Any) -> Any:
        def forget(parameter: Tensor) -> None:
            parameter.grad = None

        if self.number == 2:
            weight.register_post_accumulate_grad_hook(forget)
        return weight

    def use_frozen(self, weight: Any) -> Any:
        return weight.requires_grad_(self.number < 3)

    def use_thawed(self, weight: Any) -> Any:
        if self.number == 1:
            weight.requires_grad = False
        if self.number == 3:
            weight.requires_grad = True
        return weight

    def use_kept(self, weight: Any) -> Any:
        if self.number == 1:
            self.kept = [weight]
        return self.kept[0]

    def use_copied(self, weight: Any) -> Any:
        if self.number == 1:
            self.twins.append(copy.deepcopy(self))
            self.twins.append(pickle.loads(pickle.dumps(self.twins[0])))
            self.twins.append(pickle.loads(pickle.dumps(self)))
        for twin in self.twins:
            weight = weight + twin.weight * 0.1
        return weight


KINDS = [name[4:] for name in vars(_Linear) if name.startswith("use_")]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_forward_finds_and_leaves_on_its_weight(device: torch.device, kind: str) -> None:
    """It is the parameter's: it lasts from forward to forward, as values do."""
    results = []
    for offloads in (False, True):
        torch.manual_seed(0)
        layers = [nn.Sequential(_Linear(kind), nn.Tanh()) for _ in range(3)]
        model = nn.Sequential(*layers).to(device)
        if offloads:
            ebbtide.offload(model, layers=list(model), weights=ebbtide.WeightPolicy())
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)
        losses = []
        for number in range(6):
            loss = model(_batch(device, number)).square().mean()
            loss.backward()
            losses += [loss.detach(), *(p.grad.clone() for p in parameters if p.grad is not None)]
            optimizer.step()
        states = [each.requires_grad for each in parameters], [vars(each) for each in parameters]
        results.append(([each.cpu() for each in losses + _values(model)], states))
    (plain, states), (found, states_at_rest) = results
    assert [torch.equal(*pair) for pair in zip(plain, found, strict=True)] == [True] * len(plain)
    assert states == states_at_rest


@pytest.mark.parametrize("through", ["", ".data", ".detach()"])
def test_a_weight_that_a_forward_has_kept_is_not_changed_unnoticed(
    device: torch.device, through: str
) -> None:
    model = nn.Sequential(*[nn.Sequential(_Linear("kept"), nn.Tanh()) for _ in range(3)]).to(device)
    ebbtide.offload(model, layers=list(model), weights=ebbtide.WeightPolicy())
    optimizer = _adam(model)
    _step(model, optimizer, device, 0)
    _step(model, optimizer, device, 1)

    def change(module: Any, *_: object) -> None:
        with torch.no_grad():
            eval(f"module.kept[0]{through}.mul_(2)", {"module": module})

    model[1][0].register_forward_pre_hook(change)
    with pytest.raises(ebbtide.PolicyError):
        _step(model, optimizer, device, 2)


def _layer_by_layer(model: nn.Sequential, backend: Any) -> nn.Module:
    for number, layer in enumerate(model):
        model[number] = torch.compile(layer, backend=backend)
    return model


def _in_place(model: nn.Sequential, backend: Any) -> nn.Module:
    for layer in model:
        layer.compile(backend=backend)
    return model


@pytest.mark.parametrize("compiled", [_layer_by_layer, _in_place])
@pytest.mark.parametrize("before", [False, True])
def test_layers_that_are_compiled(
    device: torch.device, compiled: Callable[[nn.Sequential, Any], nn.Module], before: bool
) -> None:
    """Device parameters are others in each step, and nothing is compiled again for them."""
    results = []
    for offloads in (False, True):
        torch.compiler.reset()
        model, backend = _model(device), CompileCounterWithBackend("aot_eager")
        if before:
            compiled(model, backend)
        if offloads:
            ebbtide.offload(model, weights=ebbtide.WeightPolicy())
        if not before:
            compiled(model, backend)
        optimizer = _adam(model)
        losses = [_step(model, optimizer, device, number) for number in range(3)]
        results.append([each.cpu() for each in losses + _values(model)])
        # The layers share their code. The first one's input needs no gradient, those of others do.
        assert backend.frame_count <= 2
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("budget_bytes", [None, 20 * 2**10])
def test_steps_that_are_compiled(device: torch.device, budget_bytes: int | None) -> None:
    """The optimizer's counts of steps go to the device where the compiler wants them there."""
    results = []
    for offloads in (False, True):
        torch.compiler.reset()
        gc.collect()  # other tests may have left something there
        begin_bytes = torch.accelerator.memory_allocated()
        model = _model(device)
        if offloads and budget_bytes is None:
            ebbtide.offload(model, weights=ebbtide.WeightPolicy())
        elif offloads and budget_bytes is not None:
            ebbtide.offload(model, budget=begin_bytes + budget_bytes)
        optimizer = _adam(model)
        step = torch.compile(
            functools.partial(_step, model, optimizer, device), backend="aot_eager"
        )
        losses = [step(number) for number in range(6)]
        results.append([each.cpu() for each in losses + _values(model)])
        assert offloads == any(each.device.type == "cpu" for each in model.parameters())
    assert all(map(torch.equal, *results))


class _Scripted(nn.Module):
    """A layer with a script module in it, whose code refers to its parameters itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit.script is deprecated
            self.scripted = torch.jit.script(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.scripted(self.linear(x)))


def test_script_modules_in_layers_keep_their_weights_on_the_device(device: torch.device) -> None:
    def run(offload: Callable[[nn.Module], object]) -> tuple[list[Tensor], nn.Module]:
        torch.manual_seed(0)
        model = nn.Sequential(*(_Scripted() for _ in range(4))).to(device)
        offload(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        losses = [_step(model, optimizer, device, number).cpu() for number in range(3)]
        return losses, model

    plain, _ = run(lambda _: None)
    found, model = run(functools.partial(ebbtide.offload, weights=ebbtide.WeightPolicy()))
    assert all(map(torch.equal, found, plain))
    for name, parameter in model.named_parameters():
        assert parameter.device.type == (device.type if "scripted" in name else "cpu")


class _Adapted(nn.Module):
    """A layer with a low-rank term beside it, which is made where the layer's weight is."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.terms = nn.ParameterList()

    def add(self) -> None:
        place = self.layer.weight.device
        for shape in ((WIDTH, 2), (2, WIDTH)):
            self.terms.append(nn.Parameter(torch.full(shape, 0.1).to(place)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        for first, second in zip(self.terms[::2], self.terms[1::2], strict=True):
            y = y + x @ first @ second
        return y


@pytest.mark.parametrize("layers", [None, ["*.0"]])
@pytest.mark.parametrize("is_brought", [False, True])
@pytest.mark.parametrize("mode", [None, "offload", "recompute+offload"])
def test_adapters_that_come_to_layers_whose_weights_rest(
    device: torch.device, mode: Any, is_brought: bool, layers: list[str] | None
) -> None:
    """Some come before the first step, some between two steps; in layers, or around them."""
    options: dict[str, Any] = {"weights": ebbtide.WeightPolicy(), "layers": layers}
    if mode is not None:
        options["activations"] = ebbtide.ActivationPolicy(min_bytes=1, mode=mode)
    if is_brought:
        options["device"] = device

    def train(*, offloaded: bool) -> list[Tensor]:
        model = _model(torch.device("cpu") if is_brought else device)
        handle = ebbtide.offload(model, **options) if offloaded else None
        model.to(device).requires_grad_(False)
        adapted = [_Adapted(layer[0]) for layer in model]
        for layer, replacement in zip(model, adapted, strict=True):
            layer[0] = replacement
            replacement.add()
        trained = (p for p in model.parameters() if p.requires_grad)
        optimizer = torch.optim.SGD(trained, lr=0.1)
        losses = []
        for number in range(4):
            if number == 2:
                adapted[-1].add()
                optimizer.add_param_group({"params": list(adapted[-1].terms[2:])})
            losses.append(_step(model, optimizer, device, number))
        if handle is not None:
            handle.detach()
        return [each.cpu() for each in (*losses, *_values(model))]

    assert all(map(torch.equal, train(offloaded=True), train(offloaded=False)))
