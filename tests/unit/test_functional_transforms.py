"""`torch.func`, forward-mode AD, export and tracing, around an offloaded model and inside one."""

import contextlib
import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    disable_saved_tensors_hooks,
    saved_tensors_hooks,
)
from torch.func import (
    functional_call,
    functionalize,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import ebbtide
from ebbtide import PolicyError
from plainly import (
    ACTIVATIONS,
    DEVICE_WEIGHTS,
    EVERY_WAY,
    EVERYTHING,
    MAPPED_WEIGHTS,
    ROWS,
    WIDTH,
    Block,
    Compute,
    Net,
    Offload,
    Program,
    assert_same_bits,
    batch,
    gradients,
    not_offloaded,
    on_cpu,
    train,
    training,
)
from saying import warned

EVERY = pytest.mark.parametrize("how", EVERY_WAY)
IN_PLACE = ACTIVATIONS | MAPPED_WEIGHTS
"""Every way in which the parameters stay tensors of the model's device."""


class Stack(nn.Module):
    """A model that `torch.jit.script` can compile."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.gelu(block(x))
        return x


def _around(use: Callable[[nn.Module], Sequence[Tensor]], make: type[nn.Module] = Net) -> Program:
    """A program that uses the offloaded model, and trains it afterwards."""

    def run(offload: Offload) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = make()
        with offload(model):
            results = list(use(model))
            model.zero_grad()
            model(batch()).sum().backward()
            return [*results, *gradients(model)]

    return run


# ---- a transform around the model ----------------------------------------------------------------


def _loss(model: nn.Module, weights: Any, x: Tensor) -> Tensor:
    return functional_call(model, weights, (x,)).square().sum()


def _detached(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _grad(model: nn.Module) -> Sequence[Tensor]:
    weights = dict(model.named_parameters())
    return list(grad(lambda weights: _loss(model, weights, batch()))(weights).values())


def _per_sample(model: nn.Module) -> Sequence[Tensor]:
    one = grad(lambda weights, x: _loss(model, weights, x.unsqueeze(0)))
    return list(vmap(one, (None, 0))(_detached(model), batch()).values())


def _ensemble(model: nn.Module) -> Sequence[Tensor]:
    states = stack_module_state([Net() for _ in range(3)])
    x = batch()
    y = vmap(lambda p, b: functional_call(model, (p, b), (x,)))(*states)
    y.sum().backward()
    return [y.detach(), *(p.grad for p in states[0].values())]


def _vmap(model: nn.Module) -> Sequence[Tensor]:
    loss = vmap(model)(batch()).sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def _jvp(model: nn.Module) -> Sequence[Tensor]:
    y, tangent = jvp(model, (batch(),), (torch.ones(ROWS, WIDTH),))
    (y.sum() + tangent.sum()).backward()
    return [y.detach(), tangent.detach(), *(p.grad.clone() for p in model.parameters())]


def _linearize(model: nn.Module) -> Sequence[Tensor]:
    y, tangents = linearize(model, batch())
    return [y.detach(), tangents(torch.ones(ROWS, WIDTH)).detach()]


def _functionalize(model: nn.Module) -> Sequence[Tensor]:
    return [functionalize(model)(batch()).detach()]


TRANSFORMS = {
    "grad": _grad,
    "per-sample gradients": _per_sample,
    "ensemble": _ensemble,
    "vmap": _vmap,
    "jvp": _jvp,
    "jacrev": lambda model: [jacrev(model)(batch(2)).detach()],
    "jacfwd": lambda model: [jacfwd(model)(batch(2)).detach()],
    "hessian": lambda model: [hessian(lambda x: model(x).sum())(batch(2)).detach()],
    "linearize": _linearize,
    "functionalize": _functionalize,
}


@pytest.mark.parametrize("how", IN_PLACE)
@pytest.mark.parametrize("kind", TRANSFORMS)
def test_transform_of_the_model(kind: str, how: str) -> None:
    assert_same_bits(_around(TRANSFORMS[kind]), IN_PLACE[how])


@pytest.mark.parametrize("how", DEVICE_WEIGHTS)
@pytest.mark.parametrize("kind", TRANSFORMS)
def test_moved_weights_refuse_a_transform(kind: str, how: str) -> None:
    torch.manual_seed(0)
    model = Net()
    with DEVICE_WEIGHTS[how](model):
        with pytest.raises(PolicyError):
            TRANSFORMS[kind](model)
        model.zero_grad()
        model(batch()).sum().backward()  # and the model still trains
    plain = Net()
    plain.load_state_dict(model.state_dict())
    plain(batch()).sum().backward()
    for mine, expected in zip(gradients(model), gradients(plain), strict=True):
        assert torch.equal(mine, expected)


def test_an_ensemble_is_offloaded() -> None:
    """Under vmap autograd saves plain tensors, so they leave as ever."""
    model = Net()
    with ebbtide.offload(model, activations=EVERYTHING) as handle:
        vmap(model)(batch()).sum().backward()
    assert handle.stats.offloaded_bytes > 0


@EVERY
def test_autograd_functional(how: str) -> None:
    def use(model: nn.Module) -> Sequence[Tensor]:
        functional = torch.autograd.functional
        return [
            functional.jacobian(model, batch(2)),
            functional.hessian(lambda x: model(x).square().sum(), batch(2)),
            functional.jvp(model, batch(2), torch.ones(2, WIDTH))[1],
        ]

    assert_same_bits(_around(use), EVERY_WAY[how])


class _Dropping(Net):
    def __init__(self) -> None:
        super().__init__(lambda block, x: x + block.second(F.dropout(block.first(x), 0.3)))


@EVERY
def test_several_gradients_at_once(how: str) -> None:
    """Such a backward runs inside `vmap`, which refuses to draw random numbers."""

    def use(model: nn.Module) -> Sequence[Tensor]:
        weights, rows = list(model.parameters()), torch.eye(WIDTH)
        results = list[Tensor]()
        for _ in range(2):
            y = model(batch()).sum(0)
            one = lambda row, y=y: torch.autograd.grad(y, weights, row, retain_graph=True)  # noqa: E731
            results += vmap(one)(rows)
            results += torch.autograd.grad(y, weights, rows, is_grads_batched=True)
        return results

    assert_same_bits(_around(use, _Dropping), EVERY_WAY[how])


@EVERY
def test_dual_tensors(how: str) -> None:
    def use(model: nn.Module) -> Sequence[Tensor]:
        with forward_ad.dual_level():
            y = model(forward_ad.make_dual(batch(), torch.ones(ROWS, WIDTH)))
            primal, tangent = forward_ad.unpack_dual(y)
            (primal.sum() + tangent.sum()).backward()
        return [primal.detach(), tangent.detach(), *(p.grad.clone() for p in model.parameters())]

    assert_same_bits(_around(use), EVERY_WAY[how])


# ---- a transform inside the forward --------------------------------------------------------------


def _dual(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(
            function(forward_ad.make_dual(x, torch.ones_like(x)))
        )
        return primal + tangent


def _energy(block: Block, row: Tensor) -> Tensor:
    return F.gelu(block.first(row)).square().sum()


def _no_hooks(block: Block, x: Tensor) -> Tensor:
    with disable_saved_tensors_hooks("none here"):
        return F.gelu(block.first(x))


INSIDE: dict[str, Compute] = {
    "grad": lambda block, x: grad(lambda z: _energy(block, z))(x),
    "vmap of grad": lambda block, x: vmap(grad(lambda row: _energy(block, row)))(x),
    "vmap": lambda block, x: vmap(lambda row: F.gelu(block.first(row)) * row)(x),
    "vjp": lambda block, x: vjp(lambda z: F.gelu(block.first(z)), x)[1](torch.ones_like(x))[0],
    "jvp": lambda block, x: jvp(lambda z: F.gelu(block.first(z)), (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda block, x: jacrev(lambda z: F.gelu(block.first(z)).sum(0))(x).sum(),
    "hessian": lambda block, x: hessian(lambda row: _energy(block, row))(x[0]).sum(),
    "dual tensors": lambda block, x: _dual(lambda z: F.gelu(block.first(z)), x),
    "hooks disabled": _no_hooks,
}


@EVERY
@pytest.mark.parametrize("kind", INSIDE)
def test_transform_inside_a_forward(kind: str, how: str) -> None:
    def compute(block: Block, x: Tensor) -> Tensor:
        return x + block.second(x) + INSIDE[kind](block, x)

    assert_same_bits(training(compute), EVERY_WAY[how])


def test_the_rest_of_that_forward_is_offloaded() -> None:
    model = Net(lambda block, x: block.second(block.first(x)) + INSIDE["grad"](block, x))
    with ebbtide.offload(model, activations=EVERYTHING) as handle:
        model(batch()).sum().backward()
    # Of each block, the inputs of both linear layers leave, at least.
    assert handle.stats.offloaded_bytes >= 3 * 2 * ROWS * WIDTH * 4


def test_hooks_of_other_code_still_refuse() -> None:
    """Torch's own check stays what it is for hooks that are not ours."""
    with ebbtide.offload(Net(), activations=EVERYTHING):
        pass
    with saved_tensors_hooks(lambda t: t, lambda t: t), pytest.raises(RuntimeError):
        _no_hooks(Block(), batch())


# ---- hooks of other code around the forward ------------------------------------------------------


def _rounded(tensor: Tensor) -> Tensor:
    """A lossy hook, as of a library that compresses activations."""
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


AROUND: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "hooks": lambda: saved_tensors_hooks(_rounded, lambda t: t.to(torch.float32)),
    "mutation allowed": allow_mutation_on_saved_tensors,
    "hooks disabled": lambda: disable_saved_tensors_hooks("none here"),
}


@EVERY
@pytest.mark.parametrize("kind", AROUND)
@pytest.mark.filterwarnings("ignore:saved-tensor hooks of other code")
def test_other_code_decides_what_becomes_of_saved_tensors(kind: str, how: str) -> None:
    def compute(block: Block, x: Tensor) -> Tensor:
        h = block.first(x).exp()
        y = h.sin()
        if kind == "mutation allowed":
            h.mul_(2)
        return block.second(y) * h

    def use(model: nn.Module) -> Sequence[Tensor]:
        with AROUND[kind]():
            loss = model(batch()).sum()
            loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    def run(offload: Offload) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = Net(compute)
        with offload(model):
            return list(use(model))

    assert_same_bits(run, EVERY_WAY[how])


def test_other_hooks_are_named() -> None:
    model = Net()
    with (
        ebbtide.offload(model, activations=EVERYTHING),
        saved_tensors_hooks(_rounded, lambda t: t.float()),
        warned("other-hooks"),
    ):
        model(batch())


# ---- export and tracing --------------------------------------------------------------------------


def _exported(model: nn.Module, *, strict: bool = False) -> Sequence[Tensor]:
    program = torch.export.export(model, (batch(),), strict=strict)
    return [program.module()(batch()).detach()]


def _saved_export(model: nn.Module) -> Sequence[Tensor]:
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(model, (batch(),)), buffer)
    buffer.seek(0)
    return [torch.export.load(buffer).module()(batch()).detach()]


def _faked(model: nn.Module) -> Sequence[Tensor]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = model(torch.empty(ROWS, WIDTH))
        y.sum().backward()
    return [torch.tensor(y.shape)]


def _on_meta(model: nn.Module) -> Sequence[Tensor]:
    weights = {name: torch.empty_like(p, device="meta") for name, p in model.named_parameters()}
    x = torch.empty(ROWS, WIDTH, device="meta", requires_grad=True)
    y = functional_call(model, weights, (x,))
    y.sum().backward()
    return [torch.tensor(y.shape)]


def _traced(model: nn.Module) -> Sequence[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.trace is deprecated
        return [torch.jit.trace(model, (batch(),))(batch()).detach()]


WRITTEN = {
    "export": _exported,
    "strict export": lambda model: _exported(model, strict=True),
    "saved export": _saved_export,
    "make_fx": lambda model: [make_fx(model)(batch())(batch()).detach()],
    "jit.trace": _traced,
    "fake tensors": _faked,
    "meta tensors": _on_meta,
}


@pytest.mark.parametrize("how", IN_PLACE)
@pytest.mark.parametrize("kind", WRITTEN)
def test_export_and_tracing(kind: str, how: str) -> None:
    assert_same_bits(_around(WRITTEN[kind], make=Stack), IN_PLACE[how])


@pytest.mark.parametrize("kind", ["export", "make_fx", "jit.trace", "fake tensors"])
def test_moved_weights_refuse_to_be_traced(kind: str) -> None:
    for offload in DEVICE_WEIGHTS.values():
        model = Stack()
        with offload(model):
            with pytest.raises(PolicyError):
                WRITTEN[kind](model)
            model(batch()).sum().backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_script_is_refused() -> None:
    with on_cpu(activations=EVERYTHING)(model := Stack()):
        with pytest.raises(PolicyError):
            torch.jit.script(model)
        assert len(train(model, not_offloaded)) > 0


@EVERY
def test_scripted_submodules(how: str) -> None:
    def program(offload: Offload) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = Net()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for block in model.blocks:
                block.first = torch.jit.script(block.first)
        return train(model, offload)

    assert_same_bits(program, EVERY_WAY[how])
