"""FLOPs, bytes and seconds of single operators, and of the parts of a step, by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.planning import Hardware
from ebbtide.tools.roofline import count_flops, count_traffic, operator_seconds
from plan_cases import fake_profile

# Round figures: a byte takes a microsecond, a product's FLOP a nanosecond, an FFT's 10 ns.
SLOW = dataclasses.replace(
    Hardware.named("h100"),
    device_memory_bytes_per_s=1e6,
    matmul_fp32_flops=1e9,
    fft_flops=1e8,
)


class Counting(TorchDispatchMode):
    """Adds up what the operators cost."""

    def __init__(self) -> None:
        super().__init__()
        self.matmul_flops = self.fft_flops = self.seconds = 0.0
        self.traffic_bytes = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        output = operator(*args, **kwargs)
        matmul_flops, fft_flops = count_flops(operator, args, kwargs, output)
        self.matmul_flops += matmul_flops
        self.fft_flops += fft_flops
        self.traffic_bytes += count_traffic(operator, args, kwargs, output)
        self.seconds += operator_seconds(SLOW, operator, args, kwargs, output)
        return output


def counted(run: Callable[[], Any]) -> Counting:
    with Counting() as counting:
        run()
    return counting


def forward_and_backward(run: Callable[..., Tensor], *inputs: Tensor) -> tuple[float, float]:
    """Matmul FLOPs of the forward and of the backward."""
    leaves = [each.requires_grad_() for each in inputs]
    with Counting() as counting:
        output = run(*leaves)
        forward = counting.matmul_flops
        output.sum().abs().backward()
    return forward, counting.matmul_flops - forward


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


COMPLEX = torch.complex64


@pytest.mark.parametrize(
    ("run", "flops"),
    [
        (lambda: values(3, 5) @ values(5, 7), 2 * 3 * 5 * 7),
        (lambda: values(2, 3, 5) @ values(2, 5, 7), 2 * 2 * 3 * 5 * 7),
        (lambda: F.linear(values(3, 5), values(7, 5), values(7)), 2 * 3 * 5 * 7),
        (lambda: torch.baddbmm(values(2, 3, 7), values(2, 3, 5), values(2, 5, 7)), 2 * 2 * 105),
        # Four real multiplications and additions for each complex one.
        (lambda: values(3, 5, dtype=COMPLEX) @ values(5, 7, dtype=COMPLEX), 8 * 3 * 5 * 7),
        (
            # An FNO's contraction: batch x in x modes with in x out x modes.
            lambda: torch.einsum(
                "bim,iom->bom", values(2, 3, 5, dtype=COMPLEX), values(3, 4, 5, dtype=COMPLEX)
            ),
            8 * 2 * 3 * 4 * 5,
        ),
    ],
)
def test_flops_of_products(run: Callable[[], Tensor], flops: float) -> None:
    assert counted(run).matmul_flops == flops


@pytest.mark.parametrize(
    ("run", "flops"),
    [
        # 5 n log2 n for each complex signal, 2.5 n log2 n for each real one, both ways.
        (lambda: torch.fft.fft(values(3, 16, dtype=COMPLEX)), 3 * 5 * 16 * 4),
        (lambda: torch.fft.ifft2(values(3, 8, 16, dtype=COMPLEX)), 3 * 5 * 128 * 7),
        (lambda: torch.fft.rfft(values(3, 16)), 3 * 2.5 * 16 * 4),
        (lambda: torch.fft.rfftn(values(3, 8, 16), dim=(-2, -1)), 3 * 2.5 * 128 * 7),
        (lambda: torch.fft.irfft(values(3, 9, dtype=COMPLEX)), 3 * 2.5 * 16 * 4),
        (lambda: torch.fft.rfft(values(3, 12)), 3 * 2.5 * 12 * math.log2(12)),
        (lambda: torch.fft.fft(values(3, 1, dtype=COMPLEX)), 0),
    ],
)
def test_flops_of_ffts(run: Callable[[], Tensor], flops: float) -> None:
    found = counted(run)
    assert found.fft_flops == pytest.approx(flops)
    assert found.matmul_flops == 0


def test_flops_of_convolutions() -> None:
    """Each of the outputs meets (in / groups) x kernel weights; backward does that twice."""
    once = 2 * (2 * 6 * 8 * 8) * (4 // 2) * 9
    found = forward_and_backward(
        lambda x, w: F.conv2d(x, w, padding=1, groups=2), values(2, 4, 8, 8), values(6, 2, 3, 3)
    )
    assert found == (once, 2 * once)
    # Each input of a transposed one meets out x kernel weights. The input has no gradient here.
    once = 2 * (2 * 4 * 8 * 8) * 6 * 4
    x = values(2, 4, 8, 8)
    found = forward_and_backward(lambda w: F.conv_transpose2d(x, w, stride=2), values(4, 6, 2, 2))
    assert found == (once, once)


@pytest.mark.parametrize("causal", [False, True])
def test_flops_of_attention(causal: bool) -> None:
    """Two products forward and five backward; half of them if no later value is looked at."""
    product = 2 * 2 * 3 * 16 * 16 * 8 / (2 if causal else 1)
    inputs = (values(2, 3, 16, 8) for _ in range(3))
    found = forward_and_backward(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), *inputs
    )
    assert found == (2 * product, 5 * product)


X = torch.zeros(4, 8)  # 128 bytes
FIRST_ROWS = torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("run", "traffic_bytes"),
    [
        (lambda: X + X, 3 * 128),
        (lambda: X.relu(), 2 * 128),
        (lambda: X.t()[1:].unsqueeze(0), 0),
        (lambda: torch.empty(4, 8), 0),
        (lambda: torch.zeros_like(X), 128),
        (lambda: X.clone().copy_(X), 2 * 128 + 2 * 128),
        (lambda: X.clone().add_(X), 2 * 128 + 3 * 128),
        (lambda: X.new_zeros(4, 1).expand(4, 8) + X, 16 + 16 + 128 + 128),
        # Two rows of 32 bytes, which 16 bytes of indices name, are read and written.
        (lambda: F.embedding(FIRST_ROWS, X), 16 + 64 + 64),
        # 128 real bytes become 4 x 5 complex numbers, which the second dimension reads and writes.
        (lambda: torch.fft.rfft(X), 128 + 160),
        (lambda: torch.fft.rfft2(X), 128 + 160 + 2 * 160),
        (lambda: torch.fft.ifft2(X.to(COMPLEX)), (128 + 256) + 256 + 256 + 2 * 256),
    ],
)
def test_bytes_read_and_written(run: Callable[[], Any], traffic_bytes: int) -> None:
    assert counted(run).traffic_bytes == traffic_bytes


@pytest.mark.parametrize(
    ("run", "seconds"),
    [
        # Bytes: (15 + 35 + 21) x 4 us; FLOPs: 210 ns.
        (lambda a, b: a[:3, :5] @ b[:5, :7], 284e-6),
        # Bytes: 3 x 256 x 256 x 4 us; FLOPs: 2 x 256^3 ns.
        (lambda a, b: a @ b, max(3 * 256 * 256 * 4e-6, 2 * 256**3 * 1e-9)),
        # Real input of 1024 bytes, 129 complex values out; FLOPs: 2.5 x 256 x 8 x 10 ns.
        (lambda a, _: torch.fft.rfft(a[0]), 1024e-6 + 129 * 8e-6),
    ],
)
def test_seconds_are_those_of_the_slower_resource(run: Any, seconds: float) -> None:
    a, b = values(256, 256), values(256, 256)
    assert counted(lambda: run(a, b)).seconds == pytest.approx(seconds)


def test_seconds_of_each_part_of_a_step() -> None:
    """All matrices are 16 x 16 float32 and take as long as their bytes."""
    one = 16 * 16 * 4e-6  # seconds for the bytes of one matrix

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(16, 16, bias=False)
            self.blocks = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.before(x)
            x = self.blocks[0](x).neg()  # counts with the layer before it
            return self.blocks[1](x).neg().neg()

    model = Products()
    profile = fake_profile(model, values(16, 16), SLOW, layers=model.blocks, optimizer_states=2)
    product, pointwise = 3 * one, 2 * one
    # The product before the layers saves its input, which makes it one of its own.
    assert profile.before_s == 0
    assert [each.forward_s for each in profile.layers] == pytest.approx(
        [product, product + pointwise, product]
    )
    # The gradients of input and weight; of the first product, that of the weight only.
    assert [each.backward_s for each in profile.layers] == pytest.approx(
        [product, 2 * product + pointwise, 2 * product]
    )
    # neg().neg(), the sum of one matrix to one number; the first gradient is one number that is
    # made from it and expanded: 4 bytes read by neg, and 4 by the sum's.
    assert profile.loss_s == pytest.approx(2 * pointwise + one + pointwise + one, rel=0.02)
    # Adam reads the gradient, and reads and writes the weight and its two states, of three weights.
    assert profile.after_s == pytest.approx(3 * (1 + 2 * 3) * one)
