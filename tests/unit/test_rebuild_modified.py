"""Inputs of rebuilt tensors that are modified, and that autograd alone would not need any more."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ebbtide
from ebbtide.devices import CpuDevice
from ebbtide.stores import PinnedStore
from engine_bench import EngineBench

SIZE, W = (64, 32), (32, 32)


def _bench(rebuild: bool) -> EngineBench:
    device = CpuDevice()
    policy = ebbtide.ActivationPolicy(min_bytes=512, num_layers=0, rebuild=rebuild)
    return EngineBench(device, PinnedStore(device), 2**20, policy)


def _gradient_of_a_later_weight(run: Callable[..., Tensor], modify: bool) -> Tensor:
    """The backward of GELU, the only one that needs h, does not run."""
    torch.manual_seed(0)
    x, first, second = torch.randn(SIZE), *torch.randn(2, *W).requires_grad_()

    def function(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        h = x @ first
        y = F.gelu(h) @ second
        if modify:
            h.detach().mul_(2)
        return y.sum()

    weight = second.detach().requires_grad_()
    return torch.autograd.grad(run(function, x, first, weight), weight)[0]


def _gradient_without_the_first_graph(run: Callable[..., Tensor], modify: bool) -> Tensor:
    """The graph of the sine, which saved h, is gone before h is modified."""
    torch.manual_seed(0)
    x, w = torch.randn(SIZE), torch.randn(W).requires_grad_()

    def function(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        sine = h.sin()
        low = h.double() @ w.double()
        del sine
        if modify:
            h.detach().mul_(2)
        return low.sum()

    return torch.autograd.grad(run(function, x, w), w)[0]


def test_where_autograd_does_not_need_the_input_the_error_says_what_to_do() -> None:
    """The bytes are gone. The guide to rebuilding names this case."""
    gradient = _gradient_of_a_later_weight
    bench = _bench(rebuild=True)
    plain = gradient(lambda function, *inputs: function(*inputs), modify=True)
    assert torch.equal(gradient(bench.run, modify=False), plain)
    with pytest.raises(ebbtide.SavedTensorModifiedError, match="rebuild=False"):
        gradient(bench.run, modify=True)
    gc.collect()  # the error's traceback
    bench.close()
    bench = _bench(rebuild=False)
    assert torch.equal(gradient(bench.run, modify=True), plain)
    bench.close()


def test_what_only_a_dropped_graph_saved_may_be_modified() -> None:
    bench = _bench(rebuild=True)
    plain = _gradient_without_the_first_graph(lambda function, *inputs: function(*inputs), True)
    assert torch.equal(_gradient_without_the_first_graph(bench.run, modify=True), plain)
    bench.close()
