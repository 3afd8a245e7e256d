"""A forked child that sends back what a function returns, and the models that the tests train."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import ebbtide

WIDTH = 128
# Each saved tensor has 32 KiB, so that nearly all of them must come back from the file.
SMALL = ebbtide.ActivationPolicy(min_bytes=1024, max_inflight_bytes=64 * 1024)
LIMIT_S = 120


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])


def batch(number: int) -> Tensor:
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(number))


def train(model: nn.Module, first: int, steps: int = 3) -> list[Tensor]:
    """Train with some batches. Returns the gradients of the last step and the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(number)).square().sum().backward()
        optimizer.step()
    return [t.detach().clone() for p in model.parameters() for t in (p.grad, p)]


class Child:
    """A forked process that runs a function and sends back what that returns or raises."""

    def __init__(self, function: Callable[[], Any]) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(writing)
            self._answer = os.fdopen(reading, "rb")
            return
        signal.alarm(LIMIT_S)  # a child that hangs is killed
        try:
            torch.set_num_threads(1)  # the threads of OpenMP were not forked
            try:
                answer = function()
            except BaseException as error:
                traceback.print_exc()
                answer = error
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(answer, pipe)
        finally:
            os._exit(0)

    def result(self) -> Any:
        with self._answer as pipe:
            answer = pipe.read()
        os.waitpid(self.pid, 0)
        assert answer, "the child hung or crashed"
        return pickle.loads(answer)


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    assert all(map(torch.equal, got, expected))
    assert len(got) == len(expected)


def trained() -> nn.Sequential:
    """The same without offload."""
    plain = make()
    train(plain, 0)
    return plain
