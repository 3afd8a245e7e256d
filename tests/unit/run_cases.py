"""What the tests of `ebbtide run` share: a small model, and a session that watches it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ebbtide import ActivationPolicy
from ebbtide.handle import OffloadHandle
from ebbtide.runtime.forward import OffloadedForward
from ebbtide.tools.found_models import RunOptions
from ebbtide.tools.run import MainScript, RunSession

SMALL = ActivationPolicy(min_bytes=1, rebuild=False)
WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(depth: int = 3) -> Net:
    torch.manual_seed(0)
    return Net(depth)


def batch(rows: int = 16) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """One step of gradient descent; the loss and the gradients are returned."""
    model.zero_grad()
    loss = (call or model)(batch()).square().mean()
    loss.backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.01)
    return [loss.detach(), *found]


class Watched:
    """A session that runs.

    Attributes:
        session: the session.
        printed: what it has printed.
    """

    def __init__(self, session: RunSession, printed: io.StringIO) -> None:
        self.session, self.printed = session, printed

    @property
    def names(self) -> list[str]:
        return [model.name for model in self.session.finder.found]

    @property
    def steps(self) -> list[int]:
        for model in self.session.finder.found:
            assert model.last_step is None or model.num_steps  # it is waited for
        return [model.num_steps for model in self.session.finder.found]

    @property
    def left_alone(self) -> list[str | None]:
        return [model.left_alone for model in self.session.finder.found]

    def handle(self, number: int = 0) -> OffloadHandle:
        handle = self.session.finder.found[number].handle
        assert handle is not None
        return handle


def session_of(
    printed: io.StringIO | None = None,
    *,
    report: Path | None = None,
    **options: Any,
) -> RunSession:
    """A session of `ebbtide run` for this script."""
    here = MainScript(__file__, (), is_module=False)
    return RunSession(here, RunOptions(**options), page=report, err=printed)


@contextlib.contextmanager
def watching(**options: Any) -> Iterator[Watched]:
    """Watch what the block trains, as `ebbtide run` does, and detach all models after it."""
    planned = ActivationPolicy(min_bytes=1)
    options.setdefault("activations", planned if "budget" in options else SMALL)
    printed = io.StringIO()
    session = session_of(printed, **options)
    session.begin()
    try:
        yield Watched(session, printed)
    finally:
        session.end()
        for model in session.finder.found:
            if model.is_offloaded:
                model.detach("the test is over")


def is_offloaded(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), OffloadedForward)
