"""Wrapper subclasses are saved by their inner tensors; what cannot be taken apart stays."""

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import ebbtide
from ebbtide import ActivationPolicy
from ebbtide.runtime.torch_internals import parts_of

EVERYTHING = ActivationPolicy(min_bytes=1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x.sin() * x).exp() * 2


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def _gradient(x: Tensor, offloaded: bool) -> tuple[Tensor, ebbtide.StepStats | None]:
    model = Model()
    x = x.detach().requires_grad_()
    if not offloaded:
        model(x).sum().backward()
        return x.grad, None
    with ebbtide.offload(model, activations=EVERYTHING) as handle:
        model(x).sum().backward()
    return x.grad, handle.stats


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_dtensor(mesh: DeviceMesh, placement: Shard | Replicate) -> None:
    torch.manual_seed(0)
    x = distribute_tensor(torch.randn(64, 64), mesh, [placement])
    expected, _ = _gradient(x, offloaded=False)
    got, stats = _gradient(x, offloaded=True)
    assert isinstance(got, DTensor)
    assert got.placements == expected.placements
    assert torch.equal(got.to_local(), expected.to_local())
    # sin and the product save x, the product also sin(x), exp its result: three storages.
    assert stats.offloaded_bytes == 3 * 64 * 64 * 4


def test_subclass_of_two_tensors() -> None:
    torch.manual_seed(0)
    x = TwoTensor(torch.randn(64, 64), torch.randn(64, 64))
    expected, _ = _gradient(x, offloaded=False)
    got, stats = _gradient(x, offloaded=True)
    assert isinstance(got, TwoTensor)
    assert torch.equal(got.a, expected.a)
    assert torch.equal(got.b, expected.b)
    assert stats.offloaded_bytes == 2 * 3 * 64 * 64 * 4


def _outer(kind: str, mesh: DeviceMesh) -> Tensor:
    torch.manual_seed(0)
    if kind == "dtensor":
        return distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)])
    return TwoTensor(torch.randn(64, 64), torch.randn(64, 64))


class Changing(nn.Module):
    """Saves a tensor, changes it, and saves it again."""

    def __init__(self, first: list[Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        self.first.append(y.sin())  # its graph lives on
        y.mul_(2)
        return y.sin()


@pytest.mark.parametrize("kind", ["dtensor", "two"])
def test_a_change_in_place_is_seen(kind: str, mesh: DeviceMesh) -> None:
    """It counts in the outer tensor's version, and not in those of its inner tensors."""
    plain = _outer(kind, mesh).requires_grad_()
    Changing([])(plain).sum().backward()
    x = _outer(kind, mesh).requires_grad_()
    first: list[Tensor] = []
    model = Changing(first)
    with ebbtide.offload(model, activations=EVERYTHING) as handle:
        model(x).sum().backward()  # has the values from after the change
        for got, expected in zip(parts_of(x.grad), parts_of(plain.grad), strict=True):
            assert torch.equal(got, expected)
        with pytest.raises(ebbtide.SavedTensorModifiedError, match=r"\(64, 64\).*version 0"):
            first[0].sum().backward()
        first.clear()
        num_parts = sum(1 for _ in parts_of(x))
        # The product's result before the change and after it.
        assert handle.stats.offloaded_bytes == num_parts * 2 * 64 * 64 * 4


def test_inner_tensors_leave_memory(mesh: DeviceMesh) -> None:
    made: list[weakref.ref[torch.UntypedStorage]] = []

    class Watched(Model):
        def forward(self, x: Tensor) -> Tensor:
            y = x.sin()
            made.append(weakref.ref(y.to_local().untyped_storage()))
            return (y * x).exp() * 2

    model = Watched()
    x = _outer("dtensor", mesh).requires_grad_()
    kept = model(x)
    assert made.pop()() is not None
    del kept
    # No more than one copy is in flight, so that of exp's result waits for the one of sin's.
    policy = ActivationPolicy(min_bytes=1, max_inflight_bytes=1)
    with ebbtide.offload(model, activations=policy) as handle:
        y = model(x)
        assert made.pop()() is None
        y.sum().backward()
    assert handle.stats.offloaded_bytes == 3 * 64 * 64 * 4


class SavedOnly(torch.autograd.Function):
    """Saves a factor that its forward does not look at."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


def test_a_collective_is_waited_for_before_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    result = torch.zeros(64, 64)  # is filled when somebody waits for it

    def wait(self: AsyncCollectiveTensor) -> Tensor:
        if self.elem is result:
            result.fill_(3)
        return self.elem

    monkeypatch.setattr(AsyncCollectiveTensor, "trigger_wait", wait)
    x = torch.ones(64, 64, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        y = SavedOnly.apply(x, AsyncCollectiveTensor(result))
        # The second copy waits for the end of the first one, which lets go of its source.
        return y + SavedOnly.apply(x, torch.zeros_like(x))

    policy = ActivationPolicy(min_bytes=1, max_inflight_bytes=1)
    wrapped = ebbtide.wrap_forward_with_offload(forward, activations=policy, device="cpu")
    wrapped(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))


class Opaque(torch.Tensor):
    """A subclass that has nothing to take apart."""


def test_a_subclass_of_a_plain_tensor_is_offloaded() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64).as_subclass(Opaque)
    expected, _ = _gradient(x, offloaded=False)
    got, stats = _gradient(x, offloaded=True)
    assert torch.equal(got, expected)
    assert stats.offloaded_bytes == 3 * 64 * 64 * 4
    assert stats.kept_bytes == 0


def test_a_subclass_of_a_plain_tensor_is_computed_again() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64).as_subclass(Opaque).requires_grad_()
    plain = x.detach().clone().requires_grad_()
    model = nn.Sequential(Model(), Model())
    model(plain).sum().backward()
    policy = ActivationPolicy(mode="recompute")
    with ebbtide.offload(model, activations=policy, layers=list(model)) as handle:
        model(x).sum().backward()
    assert torch.equal(x.grad, plain.grad)
    # Each of the two layers makes two storages that are saved: the results of sin and of exp.
    assert handle.stats.recomputed_bytes == 2 * 2 * 64 * 64 * 4


def test_sparse_tensor_passes_through() -> None:
    model = nn.Linear(64, 64, bias=False)
    matrix = torch.eye(64).to_sparse()

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(matrix, self.inner(x))

    x = torch.randn(64, 64)
    product = Product()
    product(x).sum().backward()
    expected = model.weight.grad.clone()
    model.weight.grad = None
    with ebbtide.offload(product, activations=EVERYTHING) as handle:
        product(x).sum().backward()
    assert torch.equal(model.weight.grad, expected)
    assert handle.stats.offloaded_bytes == 64 * 64 * 4  # the input of the linear layer
