"""What rests on the host is read without waiting, and its memory is let go before the read has run.

The host memory of a gradient is page-locked, and a later gradient lands in it again. What orders
the landing after the read is the compute stream: the read is queued on it, or it waits for the
stream that reads, or the host has waited. Before `detach` gives memory back, it waits for all
streams.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ebbtide
import softdevice
from soft_bench import LONG, PORTFOLIO, on
from soft_guards import check_late_reads

WIDTH = 64

Read = Callable[[Callable[[], list[Tensor]]], list[Tensor]]


def _on_the_current_stream(read: Callable[[], list[Tensor]]) -> list[Tensor]:
    softdevice.sleep(LONG)
    return read()


def _current_stream_waits(read: Callable[[], list[Tensor]]) -> list[Tensor]:
    found, stream = _beside(read)
    torch.accelerator.current_stream().wait_stream(stream)
    return found


def _host_waits(read: Callable[[], list[Tensor]]) -> list[Tensor]:
    found, stream = _beside(read)
    stream.synchronize()
    return found


def _beside(read: Callable[[], list[Tensor]]) -> tuple[list[Tensor], torch.Stream]:
    stream = torch.Stream(device="softdevice")
    with on(stream):
        softdevice.sleep(LONG)
        return read(), stream


@pytest.mark.parametrize("read", [_on_the_current_stream, _current_stream_waits, _host_waits])
def test_the_next_gradient_lands_after_the_read(device: torch.device, read: Read) -> None:
    for order in PORTFOLIO:
        softdevice.choose_order(order)
        num_locked, wrong = _train(device, read)
        assert num_locked > 0, f"{order}: no gradient was page-locked, so no read was late"
        assert not wrong, f"{order}: {wrong} gradients were read too late"


def _train(device: torch.device, read: Read) -> tuple[int, int]:
    """Read the gradients of each step and let go of them.

    Returns:
        How many of the gradients were in page-locked memory, and how many were read wrongly.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)))
    model.to(device)
    x = torch.randn(8, WIDTH).to(device)
    num_locked, expected, found = 0, [], []
    with ebbtide.offload(model, activations=None, weights=ebbtide.WeightPolicy()):
        for step in range(4):
            (model(x) * (step + 1)).square().mean().backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            num_locked += sum(gradient.is_pinned() for gradient in gradients)
            expected += [gradient.clone() for gradient in gradients]
            found += read(functools.partial(_up, gradients, device))
            del gradients
            model.zero_grad()
        right = [torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True)]
    return num_locked, right.count(False)


def _up(gradients: list[Tensor], device: torch.device) -> list[Tensor]:
    return [gradient.to(device, non_blocking=True) for gradient in gradients]


def test_detach_waits_for_the_streams_of_the_program() -> None:
    """Memory that is unmapped under a copy ends the process."""
    for order in PORTFOLIO:
        for seed in range(3):
            check_late_reads(seed, order)
