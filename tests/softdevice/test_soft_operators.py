"""Operators: the CPU's numbers, queued."""

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import softdevice
from soft_bench import PORTFOLIO


def _both(function, *inputs: Tensor, device: torch.device) -> None:
    """A function's results and gradients are the CPU's, to rounding.

    Some are computed in another way on an accelerator (attention, recurrent cells).
    """
    found = []
    for place in ("cpu", device):
        mine = [x.detach().to(place).requires_grad_(x.dtype.is_floating_point) for x in inputs]
        result = function(*mine)
        result = result if isinstance(result, tuple) else (result,)
        real = [torch.view_as_real(r.resolve_conj()) if r.is_complex() else r for r in result]
        sum(r.float().square().sum() for r in real).backward()
        found.append([*result, *(x.grad for x in mine if x.grad is not None)])
    for on_cpu, on_device in zip(*found, strict=True):
        assert on_device.device == device
        torch.testing.assert_close(on_device.cpu(), on_cpu, rtol=1e-5, atol=1e-5)


def _spectral(x: Tensor, weight: Tensor) -> Tensor:
    """What a layer of a neural operator does: slices, products and conjugates of spectra."""
    spectrum = torch.fft.rfft2(x)
    low = spectrum[..., :5, :5]
    mixed = torch.einsum("bixy,ioxy->boxy", low, torch.view_as_complex(weight)) * low.conj()
    filled = torch.zeros_like(spectrum)
    filled[..., :5, :5] = mixed
    return torch.fft.irfft2(filled, s=x.shape[-2:]) + torch.fft.fftn(x, norm="ortho").imag


CASES = {
    "linear": lambda x: F.linear(x, x[:3]),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "softmax": lambda x: x.softmax(-1),
    "gelu": F.gelu,
    "reduce": lambda x: (x.std(0), x.norm(), x.amax(1), x.cumsum(1)),
    "shape": lambda x: torch.cat([x.t()[::2], x.flip(1).t()], 0).unfold(0, 2, 1),
    "index": lambda x: x[[0, 2], 1:].masked_fill(x[[0, 2], 1:] > 0, 3.0),
    "index by mask": lambda x: x[x > 0],
    "in place": lambda x: x.clone().mul_(2).add_(x).clamp_(min=-1),
    "negative view": lambda x: torch.complex(x, 2 * x).conj().imag.mul(2),
    "sort": lambda x: x.sort(-1)[0],
    "foreach": lambda x: tuple(torch._foreach_mul([x, x[1:]], 2.0)),
    "where": lambda x: torch.where(x > 0, x, 0.5),
    "to double": lambda x: x.double().exp(),
}


@pytest.mark.parametrize("name", CASES)
def test_same_as_on_the_cpu(name: str, device: torch.device) -> None:
    _both(CASES[name], torch.randn(6, 8), device=device)


def test_spectra(device: torch.device) -> None:
    _both(_spectral, torch.randn(2, 3, 12, 12), torch.randn(3, 3, 5, 5, 2), device=device)


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (F.conv1d, [(2, 4, 16), (8, 4, 3), (8,)]),
        (F.conv2d, [(2, 4, 9, 9), (8, 4, 3, 3), (8,)]),
        (F.conv_transpose2d, [(2, 4, 9, 9), (4, 8, 3, 3), (8,)]),
        (lambda x, w: F.conv2d(x, w, groups=2, stride=2), [(2, 4, 9, 9), (8, 2, 3, 3)]),
        (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), [(2, 2, 8, 16)]),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [(2, 3, 5, 5)]),
        (lambda x: F.group_norm(x, 2), [(2, 4, 5, 5)]),
        (lambda x: F.batch_norm(x, None, None, training=True), [(4, 4, 5, 5)]),
        (lambda x: F.max_pool2d(x, 2), [(2, 3, 6, 6)]),
        (lambda a, b: torch.baddbmm(a, a, b), [(2, 4, 4), (2, 4, 4)]),
        (lambda x: F.pad(x, (1, 1), mode="circular"), [(2, 3, 6)]),
        (F.mse_loss, [(4, 5), (4, 5)]),
        (lambda x, y: F.mse_loss(x, y, reduction="sum"), [(4, 5), (4, 5)]),
        (F.smooth_l1_loss, [(4, 5), (4, 5)]),
        (F.huber_loss, [(4, 5), (4, 5)]),
        (lambda x: F.cross_entropy(x, x.softmax(-1)), [(4, 5)]),
    ],
)
def test_layers(function, sizes: list[tuple[int, ...]], device: torch.device) -> None:
    _both(function, *(torch.randn(size) for size in sizes), device=device)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent(kind: type[nn.Module], device: torch.device) -> None:
    torch.manual_seed(0)
    network = kind(5, 7, num_layers=2)
    weights = list(network.parameters())
    names = [name for name, _ in network.named_parameters()]

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        values = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(network, values, (x,))[0]

    _both(run, torch.randn(4, 3, 5), *weights, device=device)


def test_batch_norm_keeps_its_running_statistics(device: torch.device) -> None:
    on_cpu, mine = nn.BatchNorm2d(3), nn.BatchNorm2d(3).to(device)
    x = torch.randn(4, 3, 5, 5)
    on_cpu(x), mine(x.to(device))
    assert torch.equal(mine.running_mean.cpu(), on_cpu.running_mean)
    assert torch.equal(mine.eval()(x.to(device)).cpu(), on_cpu.eval()(x))


def test_random_numbers_are_drawn_when_they_are_queued(device: torch.device) -> None:
    """They depend on the seed and on the order of calls, never on when jobs run."""
    found = []
    for order in PORTFOLIO:
        softdevice.choose_order(order)
        torch.manual_seed(3)
        x = torch.ones(64, device=device)
        drawn = [
            torch.randn(64, device=device),
            torch.rand_like(x),
            F.dropout(x, 0.5),
            torch.bernoulli(x / 2),
            torch.randperm(64, device=device),
            torch.randint(9, (64,), device=device),
        ]
        found.append(torch.stack([d.double().cpu() for d in drawn]))
    assert all(torch.equal(one, found[0]) for one in found)
    assert not torch.equal(found[0][0], found[0][1])
    assert 10 < (found[0][2] == 0).sum() < 54


def test_generator_state_can_be_taken_and_set(device: torch.device) -> None:
    module = torch.get_device_module(device)
    state = module.get_rng_state()
    first = torch.randn(8, device=device)
    module.set_rng_state(state)
    assert torch.equal(torch.randn(8, device=device), first)
    own = torch.Generator(device=device).manual_seed(5)
    again = torch.Generator(device=device).manual_seed(5)
    one, two = (torch.randn(8, device=device, generator=g) for g in (own, again))
    assert torch.equal(one, two)


def test_autocast(device: torch.device) -> None:
    layer, x = nn.Linear(8, 8).to(device), torch.randn(4, 8, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        assert F.layer_norm(layer(x), (8,)).dtype == torch.float32
        assert layer(x).sum().dtype == torch.float32
    assert layer(x).dtype == torch.float32


def test_a_number_that_the_host_changes_is_taken_when_it_is_queued(device: torch.device) -> None:
    softdevice.choose_order("compute-first")
    x, number = torch.ones(4, device=device), torch.tensor(2.0)
    y = x * number
    number.fill_(9.0)
    assert y.sum().item() == 8.0


def test_parameters_move_between_the_host_and_the_device(device: torch.device) -> None:
    parameter = nn.Parameter(torch.ones(4, device=device))
    parameter.data = torch.zeros(4)
    assert parameter.device.type == "cpu"
    parameter.data = torch.full((4,), 3.0, device=device)
    assert parameter.sum().item() == 12.0


def test_backward_runs_in_the_devices_own_thread(device: torch.device) -> None:
    seen = []
    x = torch.ones(4, device=device, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(threading.get_ident()))
    y.sum().backward()
    assert seen
    assert seen != [threading.get_ident()]


def test_only_known_operators_run_at_once(device: torch.device) -> None:
    """Everything else is queued, or it would hide races."""
    x = torch.tensor([0.0, 1.0, 2.0, 1.0], device=device)
    assert x.nonzero().shape == (3, 1)
    assert x.unique().shape == (3,)
    assert torch.equal(x, x)
    at_once = set(softdevice.operators_run_at_once())
    assert {"aten::nonzero", "aten::_unique2", "aten::equal"} <= at_once
    # The last is indexing by a mask.
    known = {"masked_select", "nonzero", "_unique2", "equal", "index.Tensor_out"}
    assert at_once <= {f"aten::{name}" for name in known}, (
        "more operators are not queued than this test knows of"
    )
