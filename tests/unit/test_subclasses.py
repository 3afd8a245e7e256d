"""Wrapper subclasses are saved by their inner tensors; what cannot be taken apart stays."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import ebbtide
from ebbtide import ActivationPolicy

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


class Opaque(torch.Tensor):
    """A subclass without a way to take it apart."""


def test_unknown_subclass_passes_through() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64).as_subclass(Opaque)
    expected, _ = _gradient(x, offloaded=False)
    got, stats = _gradient(x, offloaded=True)
    assert torch.equal(got, expected)
    # Only exp's own result leaves: autograd saves it before it is made an Opaque.
    assert stats.offloaded_bytes == 64 * 64 * 4


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
