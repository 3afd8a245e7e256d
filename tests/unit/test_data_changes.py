"""Changes that no version counter sees, and resizes: what backward finds after them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import ebbtide
from ebbtide import ActivationPolicy
from plainly import (
    ACTIVATIONS,
    EVERY_WAY,
    EVERYTHING,
    MAPPED_WEIGHTS,
    ROWS,
    WIDTH,
    Block,
    Net,
    Offload,
    assert_same_bits,
    batch,
    gradients,
    not_offloaded,
    train,
    training,
)
from waiting import await_copies

IN_PLACE = ACTIVATIONS | MAPPED_WEIGHTS


def _scaled(parameter: nn.Parameter) -> None:
    parameter.data.mul_(1.5)


def _assigned(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 1.5


CHANGES: dict[str, Callable[[nn.Parameter], None]] = {
    "data.mul_": _scaled,
    "data = ...": _assigned,
}


@pytest.mark.parametrize("how", IN_PLACE)
@pytest.mark.parametrize("kind", CHANGES)
def test_parameters_are_seen_as_autograd_sees_them(kind: str, how: str) -> None:
    """The norm saves its weight itself, a linear layer a view of it."""

    def program(offload: Offload) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = Net(lambda block, x: F.layer_norm(block.first(x), (WIDTH,), block.scale))
        for block in model.blocks:
            block.scale = nn.Parameter(torch.rand(WIDTH))
        with offload(model):
            loss = model(batch()).square().sum()
            for parameter in model.parameters():
                CHANGES[kind](parameter)
            loss.backward()
            return [loss.detach(), *gradients(model)]

    assert_same_bits(program, IN_PLACE[how])


def _changed_after_forward(
    model: Net, held: list[Tensor], ready: Callable[[], None]
) -> list[Tensor | None]:
    loss = model(batch()).sum()
    ready()
    for tensor in held:
        tensor.data.mul_(2)
    held.clear()
    loss.backward()
    results = gradients(model)
    model.zero_grad()
    return results


@pytest.mark.parametrize("rebuild", [False, True])
def test_offloaded_activations_are_seen_as_save_on_cpu_sees_them(rebuild: bool) -> None:
    """`save_on_cpu` copies what it saves; for a tensor on the CPU it does not, so a clone does."""
    held: list[Tensor] = []

    def compute(block: Block, x: Tensor) -> Tensor:
        held.append(torch.ones(ROWS, WIDTH))
        return block.second(block.first(x)) * held[-1]

    torch.manual_seed(0)
    model = Net(compute)
    plain = _changed_after_forward(model, held, lambda: None)
    with saved_tensors_hooks(torch.clone, lambda copy: copy):
        copied = _changed_after_forward(model, held, lambda: None)
    policy = ActivationPolicy(min_bytes=1, rebuild=rebuild)
    with ebbtide.offload(model, activations=policy) as handle:
        offloaded = _changed_after_forward(model, held, lambda: await_copies(handle))
    with ebbtide.offload(model) as handle:  # these tensors are too small to leave
        kept = _changed_after_forward(model, held, lambda: await_copies(handle))
    for seen, old, new in zip(offloaded, copied, plain, strict=True):
        assert torch.equal(seen, old)
        assert not torch.equal(seen, new)
    for seen, new in zip(kept, plain, strict=True):
        assert torch.equal(seen, new)


class _Assign(torch.autograd.Function):
    """Writes a column of a buffer without a version, as a solver of torchdiffeq does."""

    @staticmethod
    def forward(ctx: Any, buffer: Tensor, value: Tensor, column: int) -> Tensor:
        ctx.column = column
        buffer.data[..., column] = value
        return buffer

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], grads[0][..., ctx.column], None


def _fill_by_function(buffer: Tensor, value: Tensor, column: int) -> Tensor:
    return _Assign.apply(buffer, value, column)


def _fill_by_data(buffer: Tensor, value: Tensor, column: int) -> Tensor:
    buffer.data[..., column] = value.detach()
    return buffer


@pytest.mark.parametrize("how", [*ACTIVATIONS, "recompute"])
@pytest.mark.parametrize("fill", [_fill_by_function, _fill_by_data])
def test_a_buffer_that_is_filled_part_by_part(
    fill: Callable[[Tensor, Tensor, int], Tensor], how: str
) -> None:
    """Autograd saves the parts that are filled; the first of them is most of the buffer."""
    columns, ready = 5, list[Callable[[], None]]()

    def compute(block: Block, x: Tensor) -> Tensor:
        buffer = torch.zeros(*x.shape, columns)
        for column in range(columns):
            buffer = fill(buffer, block.first(x), column)
            if column >= columns // 2:
                weights = block.second.weight[0, : column + 1] + x.mean()
                x = x + (buffer[..., : column + 1] * weights).sum(-1)
                ready[0]()
        return x

    def program(offload: Offload) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = Net(compute)
        with offload(model) as handle:
            on_cpu = handle is not None and how != "device"  # there, copies run in any order
            ready[:] = [lambda: await_copies(handle) if on_cpu else None]
            return train(model, not_offloaded)

    recompute = ActivationPolicy(min_bytes=1, mode="recompute+offload")
    ways = ACTIVATIONS | {"recompute": lambda model: ebbtide.offload(model, activations=recompute)}
    assert_same_bits(program, ways[how])


# ---- tensors that are resized --------------------------------------------------------------------

RESIZES: dict[str, Callable[[Tensor], object]] = {
    "larger": lambda tensor: tensor.resize_(64, WIDTH),
    "smaller": lambda tensor: tensor.resize_(2, WIDTH),
    "as another": lambda tensor: tensor.resize_as_(torch.empty(32, WIDTH)),
}


@pytest.mark.parametrize("how", EVERY_WAY)
@pytest.mark.parametrize("kind", RESIZES)
def test_tensors_resized_in_the_forward(kind: str, how: str) -> None:
    """Autograd saves the input of a sum's scaling nowhere, and the cosine's input is a copy."""

    def compute(block: Block, x: Tensor) -> Tensor:
        h = F.gelu(block.first(x)).detach()
        y = block.second(x) * (2 * h) + (h + h).cos()
        RESIZES[kind](h)
        return y

    assert_same_bits(training(compute), EVERY_WAY[how])


@pytest.mark.parametrize("how", EVERY_WAY)
@pytest.mark.parametrize("kind", RESIZES)
def test_a_saved_tensor_that_is_resized(kind: str, how: str) -> None:
    """Autograd itself raises."""
    model = Net(lambda block, x: block.first(x))
    for offload in (not_offloaded, EVERY_WAY[how]):
        with offload(model):
            x = batch().clone()
            loss = model(x).sum()
            RESIZES[kind](x)
            with pytest.raises(RuntimeError, match=r"modified (by an|it) in.?place"):
                loss.backward()


@pytest.mark.parametrize("how", IN_PLACE)
def test_a_storage_emptied_and_filled_again(how: str) -> None:
    """As sharded models do with gathered weights."""

    def program(offload: Offload) -> list[Tensor | None]:
        torch.manual_seed(0)
        gathered = torch.randn(WIDTH, WIDTH)
        values, size_bytes = gathered.clone(), gathered.nbytes
        model = Net(lambda block, x: x @ gathered + block.second(F.gelu(block.first(x))))
        with offload(model) as handle:
            loss = model(batch()).sum()
            if handle is not None:
                await_copies(handle)
            gathered.untyped_storage().resize_(0)
            gathered.untyped_storage().resize_(size_bytes)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(gathered):
                gathered.copy_(values)
            loss.backward()
            return [loss.detach(), *gradients(model)]

    assert_same_bits(program, IN_PLACE[how])


def test_an_offloaded_storage_can_still_be_resized() -> None:
    x = batch()
    model = Net()
    with ebbtide.offload(model, activations=EVERYTHING) as handle:
        model(x).sum().backward()
        assert handle.stats.offloaded_bytes > 0
    assert x.untyped_storage().resizable()


# ---- what only rebuilding would still need -------------------------------------------------------


def _changed_by_a_later_operation(block: Block, x: Tensor) -> Tensor:
    h = block.first(x)
    wave = h.sin()
    h.mul_(2)
    y = F.gelu(h)
    h.add_(1)
    return block.second(y) + wave


def _saver_is_dead(block: Block, x: Tensor) -> Tensor:
    h = block.first(x)
    unused = h.sin()
    y = -h
    del unused
    h.mul_(3)
    return block.second(y.sin())


@pytest.mark.parametrize("how", EVERY_WAY)
@pytest.mark.parametrize("compute", [_changed_by_a_later_operation, _saver_is_dead])
def test_a_forward_that_nobody_differentiates_never_raises(
    compute: Callable[[Block, Tensor], Tensor], how: str
) -> None:
    def program(offload: Offload) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = Net(compute)
        with offload(model):
            return [model(batch()).detach()]

    assert_same_bits(program, EVERY_WAY[how])


@pytest.mark.parametrize("how", EVERY_WAY)
def test_an_input_changed_before_its_output_is_saved(how: str) -> None:
    """Backward needs the GELU's output only, which nobody has changed."""

    def compute(block: Block, x: Tensor) -> Tensor:
        h = block.first(x)
        y = F.gelu(h)
        with torch.no_grad():
            h.mul_(2)
        return block.second(y)

    def program(offload: Offload) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = Net(compute)
        with offload(model):
            loss = model(batch()).sum()
            last = model.blocks[-1].second.weight
            return [loss.detach(), *torch.autograd.grad(loss, [last])]

    assert_same_bits(program, EVERY_WAY[how])


def test_a_large_weight_written_before_backward_is_noticed_by_a_recomputed_layer() -> None:
    """Small ones are copied. A version would tell of the write, were it not through ``data``."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(192, 192), nn.GELU()) for _ in range(2)])
    with ebbtide.offload(model, activations=ActivationPolicy(mode="recompute", min_bytes=1)):
        loss = model(torch.rand(8, 192)).sum()
        _scaled(next(model.parameters()))
        with pytest.raises(ebbtide.SavedTensorModifiedError):
            loss.backward()
        model(torch.rand(8, 192)).sum().backward()  # what it saves is offloaded from now on


class _Signs(nn.Module):
    """Replaces the memory of its input, as layers of binarized networks do."""

    def forward(self, x: Tensor) -> Tensor:
        x.data = x.data.sign()
        return x


class _Capped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.data.clamp_(max=0.1)
        return x


@pytest.mark.parametrize("how", ACTIVATIONS)
@pytest.mark.parametrize("write", [_Signs, _Capped])
def test_an_output_that_is_written_without_a_version_in_one_of_several_places(
    write: type[nn.Module], how: str
) -> None:
    """The output of the first GELU has the same shape, and can be rebuilt."""

    def program(offload: Offload) -> list[Tensor | None]:
        torch.manual_seed(0)
        first = nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
        model = nn.Sequential(*first, nn.GELU(), write(), nn.Linear(WIDTH, WIDTH))
        with offload(model):
            loss = model(torch.randn(ROWS, WIDTH)).square().sum()
            loss.backward()
            return [loss.detach(), *gradients(model)]

    assert_same_bits(program, ACTIVATIONS[how])


class _CappedAgain(nn.Module):
    """Writes what it has computed in its second call only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, writes: bool) -> Tensor:
        y = nn.functional.gelu(self.first(x))
        if writes:
            y.data.clamp_(max=0.1)
        return self.second(y)


class _InTwoRounds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_CappedAgain() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for writes in (False, True):
            for block in self.blocks:
                x = block(x, writes)
        return x


@pytest.mark.parametrize("how", ACTIVATIONS)
def test_an_output_that_is_written_without_a_version_in_one_of_several_calls(how: str) -> None:
    def program(offload: Offload) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = _InTwoRounds()
        with offload(model):
            loss = model(torch.randn(ROWS, WIDTH)).square().sum()
            loss.backward()
            return [loss.detach(), *gradients(model)]

    assert_same_bits(program, ACTIVATIONS[how])
