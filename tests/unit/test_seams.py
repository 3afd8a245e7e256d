"""Programs in which two models, threads, graphs or owners of memory meet train as they do plainly.

Each program is run twice, without ebbtide and with it, and must give the same bits or raise the
same kind of error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ebbtide

Wrap = Callable[[nn.Module], nn.Module]
Program = Callable[[Wrap], Iterable[Tensor]]

POLICIES = {
    "offloaded": ebbtide.ActivationPolicy(min_bytes=1),
    "not rebuilt": ebbtide.ActivationPolicy(min_bytes=1, rebuild=False),
    "kept": ebbtide.ActivationPolicy(min_bytes=1, num_layers=0),
}


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> ebbtide.ActivationPolicy:
    return POLICIES[request.param]


def outcome(program: Program, policy: ebbtide.ActivationPolicy | None) -> list[Tensor] | str:
    """Return what a program computes, or the message of the RuntimeError that it raises."""
    handles: list[Any] = []

    def wrap(model: nn.Module) -> nn.Module:
        if policy is not None:
            layers = [name for name, _ in model.named_children()]
            handles.append(ebbtide.offload(model, activations=policy, layers=layers))
        return model

    torch.manual_seed(0)
    try:
        return [tensor.clone() for tensor in program(wrap)]
    except RuntimeError as error:
        return str(error)
    finally:
        for handle in handles:
            handle.detach()


def assert_as_plain(program: Program, policy: ebbtide.ActivationPolicy) -> None:
    plain, offloaded = outcome(program, None), outcome(program, policy)
    if isinstance(plain, str):
        assert isinstance(offloaded, str), f"no error, but without ebbtide: {plain}"
        assert "modified" in offloaded and "modified" in plain
        return
    assert not isinstance(offloaded, str), offloaded
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))


def gradients(*models: nn.Module) -> list[Tensor]:
    return [p.grad for model in models for p in model.parameters() if p.grad is not None]


class Apply(nn.Module):
    """Two linear layers and a function that is given their outputs one after the other."""

    def __init__(self, function: Callable[..., Tensor], width: int = 64) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.function = function
        self.factor = 1.5

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return self.function(self, x, *others)


# ---- tensors that operators fill after autograd has saved them -----------------------------------


def _rrelu_twice(self: Apply, x: Tensor) -> Tensor:
    return F.rrelu(self.second(F.rrelu(self.first(x), training=True)), training=True)


def _rrelu_in_place(self: Apply, x: Tensor) -> Tensor:
    return self.second(F.rrelu_(self.first(x), training=True))


def _rrelu_into_a_view(self: Apply, x: Tensor) -> Tensor:
    """The noise is a small part of its storage, so that it is gathered before it is copied."""
    h = self.first(x)
    noise = torch.empty(4, *h.shape)[1]
    return self.second(torch.ops.aten.rrelu_with_noise(h, noise, 0.1, 0.3, True))


def _instance_norm(self: Apply, x: Tensor) -> Tensor:
    """Its running statistics are no buffers of a module."""
    h = self.first(x)
    statistics = torch.zeros(h.shape[0]), torch.ones(h.shape[0])
    return self.second(F.batch_norm(h.T, *statistics, training=True).T)


def _dropout(self: Apply, x: Tensor) -> Tensor:
    return self.second(torch.native_dropout(self.first(x), 0.5, True)[0])


@pytest.mark.parametrize(
    "function", [_rrelu_twice, _rrelu_in_place, _rrelu_into_a_view, _instance_norm, _dropout]
)
@pytest.mark.parametrize("rows", [64, 8192])
def test_a_tensor_that_its_operator_fills_later(
    function: Callable[..., Tensor], rows: int, policy: ebbtide.ActivationPolicy
) -> None:
    def program(wrap: Wrap) -> list[Tensor]:
        model = wrap(Apply(function))
        model(torch.randn(rows, 64)).square().mean().backward()
        return gradients(model)

    for _ in range(3 if rows == 64 else 1):
        assert_as_plain(program, policy)


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_tensor_that_its_operator_fills_later_in_a_recomputed_layer(
    is_last: bool, in_place: bool
) -> None:
    """A checkpoint of torch's own ends before the operator has filled it, if it is the last."""

    def program(wrap: Wrap) -> list[Tensor]:
        functions = [nn.Linear(64, 64), nn.RReLU(inplace=in_place)]
        layer = nn.Sequential(*functions, *([] if is_last else [nn.Linear(64, 64)]))
        model = wrap(nn.Sequential(layer, nn.Linear(64, 8)))
        model(torch.randn(64, 64)).square().mean().backward()
        return gradients(model)

    assert_as_plain(program, ebbtide.ActivationPolicy(min_bytes=1, mode="recompute"))


def test_only_tensors_without_gradient_are_saved_before_they_are_filled() -> None:
    """Every operator that writes to an argument and saves it: the rule of the engine holds.

    Found by running all of torch's own samples: `rrelu`, and the running statistics of the norms.
    """
    early: dict[str, bool] = {}
    name = ""

    def pack(tensor: Tensor) -> Tensor:
        packed.append((tensor, tensor.detach().clone()))
        return tensor.detach()

    x = torch.randn(8, 4, 6, requires_grad=True)
    statistics = lambda: (torch.zeros(4), torch.ones(4))  # noqa: E731
    operators: dict[str, Callable[[], Tensor]] = {
        "rrelu": lambda: F.rrelu(x, training=True),
        "rrelu_": lambda: F.rrelu_(x * 1, training=True),
        "batch_norm": lambda: F.batch_norm(x, *statistics(), training=True),
        "instance_norm": lambda: F.instance_norm(x, *statistics(), use_input_stats=True),
        "dropout": lambda: F.dropout(x),
        "native_dropout": lambda: torch.native_dropout(x, 0.5, True)[0],
        "max_pool": lambda: F.max_pool1d(x, 2),
        "index_put_": lambda: (x * 1).index_put_((torch.tensor([0]),), torch.zeros(())),
        "cumprod_": lambda: (x * 1).cumprod_(0),
    }
    for name, operator in operators.items():
        packed: list[tuple[Tensor, Tensor]] = []
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            operator()
        changed = [
            t for t, before in packed if not torch.equal(t.nan_to_num(), before.nan_to_num())
        ]
        assert all(tensor.grad_fn is None for tensor in changed), name
        early[name] = bool(changed)
    assert early["batch_norm"] and early["instance_norm"] and not early["max_pool"]


# ---- memory that changes without a version -------------------------------------------------------


def _over_numpy() -> tuple[Tensor, Callable[[float], None]]:
    array = np.zeros((64, 64), np.float32)
    return torch.from_numpy(array), array.fill


def _over_a_bytearray() -> tuple[Tensor, Callable[[float], None]]:
    memory = bytearray(64 * 64 * 4)
    array = np.frombuffer(memory, np.float32)
    return torch.frombuffer(memory, dtype=torch.float32).view(64, 64), array.fill


def _lent_to_numpy() -> tuple[Tensor, Callable[[float], None]]:
    tensor = torch.zeros(64, 64)
    return tensor, tensor.numpy().fill


def _shared() -> tuple[Tensor, Callable[[float], None]]:
    tensor = torch.zeros(64, 64).share_memory_()
    return tensor, lambda value: tensor.data.fill_(value)


def _over_dlpack() -> tuple[Tensor, Callable[[float], None]]:
    array = np.zeros((64, 64), np.float32)
    return torch.from_dlpack(array), array.fill


SLOTS = [_over_numpy, _over_a_bytearray, _lent_to_numpy, _shared, _over_dlpack]


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_slots_that_are_refilled(
    slot: Callable[[], tuple[Tensor, Callable[[float], None]]],
    num_slots: int,
    policy: ebbtide.ActivationPolicy,
) -> None:
    """Four forwards, whose inputs are filled in turn, and one backward for all of them."""

    def program(wrap: Wrap) -> list[Tensor]:
        model = wrap(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)))
        slots = [slot() for _ in range(num_slots)]
        losses = []
        for number in range(4):
            x, fill = slots[number % num_slots]
            fill(number + 1)
            losses.append(model(x).square().mean())
        torch.stack(losses).sum().backward()
        return gradients(model)

    assert_as_plain(program, policy)


@pytest.mark.parametrize("slot", [*SLOTS, lambda: _through_data()])
def test_an_input_that_is_refilled_while_an_earlier_graph_is_alive(
    slot: Callable[[], tuple[Tensor, Callable[[float], None]]], policy: ebbtide.ActivationPolicy
) -> None:
    def program(wrap: Wrap) -> list[Tensor]:
        model = wrap(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)))
        x, fill = slot()
        fill(1.0)
        before = model(x).square().mean()
        fill(2.0)
        model(x).square().mean().backward()
        return [*gradients(model), before]

    assert_as_plain(program, policy)


def _through_data() -> tuple[Tensor, Callable[[float], None]]:
    tensor = torch.zeros(64, 64)
    return tensor, lambda value: tensor.data.fill_(value)


def test_what_is_rebuilt_is_not_taken_from_memory_that_is_refilled(
    policy: ebbtide.ActivationPolicy,
) -> None:
    """The product was saved with the old mask; autograd reads the new one for its own gradient."""

    def program(wrap: Wrap) -> list[Tensor]:
        array = np.ones((64, 64), np.float32)
        mask = torch.from_numpy(array)
        model = wrap(Apply(lambda self, x: self.second(F.silu(self.first(x)) * mask)))
        loss = model(torch.randn(64, 64)).square().mean()
        array.fill(2)
        loss.backward()
        return gradients(model)

    assert_as_plain(program, policy)


def test_within_a_forward_an_input_is_stored_once() -> None:
    model = Apply(lambda self, x: self.first(x) + self.second(x))
    with ebbtide.offload(model, activations=POLICIES["not rebuilt"]) as handle:
        x = torch.randn(64, 64)
        model(x).sum().backward()
        assert handle.stats.unique_bytes == handle.stats.offloaded_bytes == x.nbytes


# ---- what backward is given, and who changes it --------------------------------------------------


class Doubles(torch.autograd.Function):
    """Changes its saved tensor in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].mul_(2)


def _with_a_square(self: Apply, x: Tensor) -> Tensor:
    h = self.first(x)
    return self.second(h.square()) + Doubles.apply(h)


def _with_a_view(self: Apply, x: Tensor) -> Tensor:
    h = self.first(x)
    return self.second(h.T.exp().T * h.T.T) + Doubles.apply(h)


def _of_something_rebuilt(self: Apply, x: Tensor) -> Tensor:
    h = F.gelu(self.first(x))
    return self.second(h) + Doubles.apply(h)


@pytest.mark.parametrize("function", [_with_a_square, _with_a_view, _of_something_rebuilt])
def test_a_backward_that_changes_what_another_one_reads(
    function: Callable[..., Tensor], policy: ebbtide.ActivationPolicy
) -> None:
    def program(wrap: Wrap) -> list[Tensor]:
        model = wrap(Apply(function))
        model(torch.randn(64, 64)).square().mean().backward()
        return gradients(model)

    assert isinstance(outcome(program, None), str)
    assert_as_plain(program, policy)


def test_a_backward_that_changes_what_it_reads_again(policy: ebbtide.ActivationPolicy) -> None:
    def program(wrap: Wrap) -> list[Tensor]:
        model = wrap(Apply(lambda self, x: Doubles.apply(self.first(x))))
        loss = model(torch.randn(64, 64)).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    assert isinstance(outcome(program, None), str)
    assert_as_plain(program, policy)


# ---- inputs of recipes that the program changes --------------------------------------------------


def _after_a_metric(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """H is saved only by a metric that is logged and dropped; what follows from h is kept on."""

    def function(self: Apply, x: Tensor) -> Tensor:
        h = self.first(x)
        metric = h.square().mean()
        derived = change(h)
        out = self.second(derived.to(h.dtype))
        self.logged = metric.item()
        del metric
        h.mul_(0.5)
        return out + h

    return function


def _chain(self: Apply, x: Tensor) -> Tensor:
    """SiLU is rebuilt from GELU's output, which is rebuilt from h: and h is changed before it."""
    h = self.first(x)
    y = F.gelu(h)
    out = self.second(y)
    with torch.no_grad():
        h.mul_(0.5)
    return out + self.second(F.silu(y)).detach()


@pytest.mark.parametrize(
    "function",
    [
        _after_a_metric(lambda h: -h),
        _after_a_metric(lambda h: h.clone()),
        _after_a_metric(lambda h: h.double()),
        _after_a_metric(lambda h: h + h),
    ],
    ids=["negated", "copied", "cast", "added"],
)
def test_an_input_changed_after_its_graph_was_dropped(
    function: Callable[..., Tensor], policy: ebbtide.ActivationPolicy
) -> None:
    def program(wrap: Wrap) -> list[Tensor]:
        model = wrap(Apply(function))
        model(torch.randn(64, 64)).square().mean().backward()
        return gradients(model)

    assert not isinstance(outcome(program, None), str)
    assert_as_plain(program, policy)


def test_a_chain_whose_first_input_is_changed_does_not_end_the_forward(
    policy: ebbtide.ActivationPolicy,
) -> None:
    """The forward goes on; backward raises, as it does without ebbtide."""

    def forward_only(wrap: Wrap) -> list[Tensor]:
        return [wrap(Apply(_chain))(torch.randn(64, 64)).detach()]

    def program(wrap: Wrap) -> list[Tensor]:
        model = wrap(Apply(_chain))
        model(torch.randn(64, 64)).square().mean().backward()
        return gradients(model)

    assert_as_plain(forward_only, policy)
    assert isinstance(outcome(program, None), str)
    assert_as_plain(program, policy)


def test_what_could_be_rebuilt_when_it_was_saved_first_and_no_more_when_it_is_saved_again(
    policy: ebbtide.ActivationPolicy,
) -> None:
    def function(self: Apply, x: Tensor) -> Tensor:
        h = self.first(x)
        y = F.gelu(h)
        self.logged = self.second(y)
        h.detach().mul_(0.5)
        return self.second(y.detach())

    def program(wrap: Wrap) -> list[Tensor]:
        model = wrap(Apply(function))
        model(torch.randn(64, 64)).square().mean().backward()
        model.logged = None
        return gradients(model)

    assert not isinstance(outcome(program, None), str)
    assert_as_plain(program, policy)


def _detached(g: Tensor) -> Tensor:
    return g.detach()


def _view_of_a_leaf(g: Tensor) -> Tensor:
    return g.detach().requires_grad_().view(-1, 64)


def _view_without_gradient(g: Tensor) -> Tensor:
    with torch.no_grad():
        return g.view(-1, 64)


class CutsTheGraph(torch.autograd.Function):
    """Returns the memory of its input, as part of another graph than the input's."""

    @staticmethod
    def forward(_: Any, __: Tensor, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_zeros(64, 64), None


@pytest.mark.parametrize(
    "cut",
    [_detached, _view_of_a_leaf, _view_without_gradient, None],
    ids=["detached", "view of a leaf", "without gradient", "custom function"],
)
def test_what_outlives_the_graph_of_a_shared_output(
    cut: Callable[[Tensor], Tensor] | None, policy: ebbtide.ActivationPolicy
) -> None:
    """GELU's output is saved by a metric, which is dropped, and by what is kept without h."""

    def function(self: Apply, x: Tensor) -> Tensor:
        h = self.first(x)
        g = F.gelu(h)
        metric = self.second(g).mean()
        rest = CutsTheGraph.apply(self.first.weight, g.detach()) if cut is None else cut(g)
        y = self.second(rest)
        del metric, g, rest
        h.mul_(0.5)
        return y + h

    def program(wrap: Wrap) -> list[Tensor]:
        model = wrap(Apply(function))
        for _ in range(2):
            model(torch.randn(64, 64)).square().mean().backward()
        return gradients(model)

    assert not isinstance(outcome(program, None), str)
    assert_as_plain(program, policy)


def test_what_belongs_to_the_graph_of_a_shared_output_is_stored_once() -> None:
    """Two layers and a view save GELU's output; none of them stores it, nor h a second time."""
    policy = ebbtide.ActivationPolicy(min_bytes=1)

    def function(self: Apply, x: Tensor) -> Tensor:
        g = F.gelu(self.first(x))
        return self.second(g) + self.second(g.view(-1, 64)) + self.second(g)

    model = Apply(function)
    with ebbtide.offload(model, activations=policy, layers=["first"]) as handle:
        model(torch.randn(64, 64)).square().mean().backward()
        assert handle.stats.rebuilt_bytes == 64 * 64 * 4


def test_a_parameter_that_is_pointed_elsewhere_before_backward(
    policy: ebbtide.ActivationPolicy,
) -> None:
    """The product was computed with the old scale, and is saved as it was."""

    def program(wrap: Wrap) -> list[Tensor]:
        model = Apply(lambda self, x: self.second(self.first(x) * self.scale))
        model.scale = nn.Parameter(torch.randn(64, 64))
        wrap(model)
        loss = model(torch.randn(64, 64)).square().mean()
        model.scale.data = torch.ones(64, 64)
        loss.backward()
        return gradients(model)

    assert_as_plain(program, policy)


# ---- what kernels depend on ----------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "softplus": F.softplus,
    "elu": F.elu,
    "power": lambda x: x.abs() ** 2.5,
}


@pytest.fixture
def own_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def _elementwise(function: Callable[[Tensor], Tensor], around: Callable[[], Any]) -> Program:
    """The function's output is saved by a product with a constant, and is all that backward reads.

    The sizes do not fill vector registers, nor do the parts that threads are given.
    """

    def forward(self: Apply, x: Tensor, other: Tensor) -> Tensor:
        with around():
            return function(x * self.factor) * other

    def program(wrap: Wrap) -> Iterator[Tensor]:
        model = wrap(Apply(forward, 1))
        for size in (65_543, 100_003, 262_145):
            x = (3 * torch.randn(size)).requires_grad_()
            other = torch.randn(size, requires_grad=True)
            torch.set_num_threads(1)
            y = model(x, other)
            torch.set_num_threads(3)
            (gradient,) = torch.autograd.grad(y.sum(), other)
            yield gradient

    return program


@pytest.mark.usefixtures("own_threads")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("uses_onednn", [True, False])
def test_backward_with_another_number_of_threads_or_without_onednn(
    name: str, uses_onednn: bool
) -> None:
    def around() -> Any:
        return torch.backends.mkldnn.flags(enabled=uses_onednn)

    program = _elementwise(FUNCTIONS[name], around)
    assert_as_plain(program, ebbtide.ActivationPolicy(min_bytes=1))


@pytest.mark.usefixtures("own_threads")
def test_flags_around_an_operation_alone() -> None:
    """Its output is saved when the flags are gone: nothing tells how it was computed."""

    def forward(self: Apply, x: Tensor, other: Tensor) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=False):
            y = F.gelu(x * self.factor)
        return y * other

    def program(wrap: Wrap) -> list[Tensor]:
        model = wrap(Apply(forward, 1))
        x = (3 * torch.randn(100_003)).requires_grad_()
        other = torch.randn(100_003, requires_grad=True)
        for _ in range(2):
            model(x, other).sum().backward()
        return [x.grad, other.grad]

    assert_as_plain(program, ebbtide.ActivationPolicy(min_bytes=1))


@pytest.mark.usefixtures("own_threads")
def test_the_number_of_threads_is_the_programs_own_after_backward() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    with ebbtide.offload(model, activations=POLICIES["offloaded"]) as handle:
        torch.set_num_threads(1)
        loss = model(torch.randn(64, 64)).sum()
        torch.set_num_threads(2)
        loss.backward()
        assert torch.get_num_threads() == 2
        assert handle.stats.rebuilt_bytes


# ---- two models, and several threads -------------------------------------------------------------


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return F.silu(a) * b


BORDERS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "leaky relu": nn.LeakyReLU,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
    "gate": Gate,
}


@pytest.mark.parametrize("name", BORDERS)
def test_two_models_that_meet(name: str, policy: ebbtide.ActivationPolicy) -> None:
    def program(wrap: Wrap) -> list[Tensor]:
        encoder = wrap(nn.Sequential(nn.Linear(64, 64), BORDERS[name]()))
        width = encoder(torch.randn(2, 64)).shape[-1]
        decoder = wrap(nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, 8)))
        for _ in range(2):
            decoder(encoder(torch.randn(64, 64))).square().mean().backward()
        loss = decoder(encoder(torch.randn(64, 64)).detach()).mean()
        (loss + decoder(encoder(torch.randn(64, 64))).mean()).backward()
        return gradients(encoder, decoder)

    assert_as_plain(program, policy)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.gelu(self.inner(x)))


@pytest.mark.parametrize("called", ["model", "part"])
def test_threads_that_train_one_model(called: str, policy: ebbtide.ActivationPolicy) -> None:
    """They call the model, or a part of it that no forward of the model surrounds."""

    def program(wrap: Wrap) -> list[Tensor]:
        model = wrap(nn.Sequential(*[Block(32) for _ in range(3)], nn.Linear(32, 8)))
        call = model if called == "model" else model[1]
        parameters = list(call.parameters())
        inputs = [torch.randn(16, 32) for _ in range(4)]
        found: list[Any] = [None] * len(inputs)
        together = threading.Barrier(len(inputs))

        def train(number: int) -> None:
            try:
                together.wait()
                for _ in range(8):
                    loss = call(inputs[number]).square().mean()
                    found[number] = torch.autograd.grad(loss, parameters)
            except BaseException as error:
                found[number] = error

        threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return [gradient for each in found for gradient in each]

    assert_as_plain(program, policy)


def test_a_forward_on_one_thread_and_its_backward_on_another(
    policy: ebbtide.ActivationPolicy,
) -> None:
    def program(wrap: Wrap) -> list[Tensor]:
        model = wrap(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)))
        losses: list[Tensor] = []
        for _ in range(2):
            x = torch.randn(64, 64)
            forward = threading.Thread(target=lambda x=x: losses.append(model(x).square().mean()))
            forward.start()
            forward.join()
        torch.stack(losses).sum().backward()
        return gradients(model)

    assert_as_plain(program, policy)


def test_a_gradient_penalty_inside_a_forward(policy: ebbtide.ActivationPolicy) -> None:
    def function(self: Apply, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        y = self.second(F.gelu(self.first(x)))
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + slope.square().mean()

    def program(wrap: Wrap) -> list[Tensor]:
        model = wrap(Apply(function))
        for _ in range(2):
            model(torch.randn(64, 64)).backward()
        return gradients(model)

    assert_as_plain(program, policy)
