"""Random training with weights at rest on the software accelerator, against plain training."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
from torch import nn

import ebbtide
from harness import drain_autograd, make_store, poll_weakly
from loops import on_device
from programs import InterruptedStepError
from soft_programs import Leftovers, make_device, running
from weight_programs import (
    WIDTH,
    Block,
    Net,
    _make,
    _Training,
    check_late_change,
    detach_between,
)


class _Streams:
    """What a program calls its device: it says on which of two streams the host queues kernels."""

    def __init__(self) -> None:
        self._streams = (torch.accelerator.current_stream(), torch.Stream(device="softdevice"))
        self._current = 0

    @property
    def current(self) -> int:
        return self._current

    @current.setter
    def current(self, number: int) -> None:
        if number != self._current:
            self._streams[number].wait_stream(self._streams[self._current])
            torch.accelerator.set_stream(self._streams[number])
            self._current = number


def check_weights(seed: int, order: str = "threads", kind: str = "host") -> Counter[str]:
    """Train plainly and with weights at rest in a kind of store; compare everything.

    Args:
        seed: of the program, and of the knobs of its bench.
        order: of execution.
        kind: of the store.
    """
    clip = mock.patch.object(nn.utils, "clip_grad_norm_", _clip_in_order)
    with running("weights", seed, order), clip:
        leftovers = Leftovers()
        draw = random.Random(seed)
        plain, mine = _make(seed), _make(seed)
        device = make_device(seed, draw.choice((0.0, 0.5)))
        handle = _offload(mine, device, draw, kind)
        streams = _Streams()
        trainings = [_Training(seed, plain, None), _Training(seed, mine, streams)]
        for number in range(4):
            _step(number, *trainings)
        streams.current = 0
        if mine.takes:
            check_late_change(plain, mine)
        if draw.random() < 0.5:  # the copies of the next block's weights are under way at the end
            with torch.no_grad(), contextlib.suppress(InterruptedStepError):
                mine.eval()(torch.randn(4, WIDTH), list(range(len(mine.blocks))), ("forward", 0))
        if draw.random() < 0.5:
            detach_between(plain, mine, handle, draw)
        handle.detach()
        expected = dict(plain.named_parameters())
        for name, parameter in mine.named_parameters():
            assert torch.equal(parameter.cpu(), expected[name].cpu()), f"{name} differs at the end"
        content = trainings[1].content
        del handle, plain, mine, trainings, expected, parameter, streams
        leftovers.check(device)
    return content


def _offload(mine: Net, device: Any, draw: random.Random, kind: str) -> ebbtide.OffloadHandle:
    activations = ebbtide.ActivationPolicy(min_bytes=128) if draw.random() < 0.5 else None
    policy = ebbtide.WeightPolicy(num_layers=draw.choice((None, None, 2)))
    with on_device(device, lambda: make_store(device, kind), draw.choice((0, 2**18))) as built:
        handle = ebbtide.offload(mine, activations=activations, weights=policy)
    built[0].store.on_progress = poll_weakly(built[0])
    weights = handle._engine.weights
    assert weights is not None
    for module, _ in weights._used:
        if isinstance(module, Block):
            module.look.weights = weights
    handle._engine.transfers.offloads.bound_bytes = draw.choice((0, 2**12, 2**20))
    return handle


def _clip_in_order(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """As `clip_grad_norm_`, which adds the norms up device by device, and so rounds differently.

    Only some of the layers have their weights on the host.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = [torch.linalg.vector_norm(gradient.cpu()) for gradient in gradients]
    total = float(torch.tensor(norms, device="cpu").norm())
    for gradient in gradients:
        gradient.mul_(min(1.0, max_norm / (total + 1e-6)))


def _step(number: int, plain: _Training, mine: _Training) -> None:
    plain.step(number)
    mine.step(number)
    drain_autograd()
    expected, got = plain.state(), mine.state()
    assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
    for name, value in got.items():
        assert torch.equal(value.cpu(), expected[name].cpu()), f"{name} differs in step {number}"
