"""Random programs: what training code does to autograd, drawn from a seed.

A program is run twice, plainly and with its saved tensors offloaded, and must give the same bits,
or the same kind of error. It is a few steps of: forwards of several microbatches, in a random order
with their backwards; retained and dropped graphs; exceptions half-way; `no_grad` in between.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

WIDTH = 32
Run = Callable[[Callable[[], Tensor]], Tensor]
"""Runs one forward, with hooks or without."""

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": torch.nn.functional.gelu,
    "relu": torch.relu,
    "softmax": lambda x: torch.softmax(x, -1),
    "square": torch.square,
    "transpose twice": lambda x: x.t().contiguous().t(),
    "flatten": lambda x: (x.flatten() * x.reshape(-1)).view_as(x),
    "small slice": lambda x: x * x[1:2].sin(),
    "large slice": lambda x: torch.cat([x[:1], x[1:].sin()]),
    "column": lambda x: x * x[:, 3:5].square().sum(),
    "expand": lambda x: x[:1].expand_as(x) * x,
    "mask": lambda x: torch.where(x > 0, x, x.square()),
    "complex": lambda x: torch.view_as_real(
        torch.view_as_complex(x.contiguous().view(-1, WIDTH // 2, 2)).conj() ** 2
    ).view_as(x),
    "spectrum": lambda x: torch.fft.irfft(torch.fft.rfft(x)[:, :9].square(), n=WIDTH),
    "windows": lambda x: x * x.flatten().unfold(0, 8, 4).sum(),
    "double": lambda x: x.double().sin().float(),
    "checkpoint": lambda x: checkpoint(lambda y: y.sin() * y, x, use_reentrant=False),
    "reentrant checkpoint": lambda x: checkpoint(lambda y: y.sin() * y, x, use_reentrant=True),
}

BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "multiply": torch.mul,
    "matmul": lambda x, y: x @ y.t() @ y / WIDTH,
    "cat": lambda x, y: torch.cat([x, y], 1)[:, ::2] * 1.5,
    "hypot": torch.hypot,
}


class InterruptedStepError(Exception):
    """What a program raises in the middle of a forward or a backward."""


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # noqa: ARG004
        raise InterruptedStepError


@dataclass
class Outcome:
    """What a program computed: losses, gradients, and the names of the errors it met."""

    tensors: list[Tensor] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Program:
    """The program of one seed; `run` repeats exactly the same one.

    Args:
        seed: draws everything.
        switch: called within forwards with whether what follows is to be offloaded.
    """

    def __init__(self, seed: int, switch: Callable[[bool], None] = lambda _: None) -> None:
        self._seed = seed
        self._switch = switch

    def run(self, run: Run) -> Outcome:
        draw = random.Random(self._seed)
        torch.manual_seed(self._seed)
        outcome = Outcome()
        weights = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(2)]
        for _ in range(draw.randint(1, 3)):
            self._step(draw, run, weights, outcome)
            outcome.tensors += [w.grad.clone() for w in weights if w.grad is not None]
            if draw.random() < 0.3:
                with torch.no_grad():
                    for weight in weights:
                        weight.mul_(0.9)
        return outcome

    def _step(self, draw: random.Random, run: Run, weights: list[Tensor], outcome: Outcome) -> None:
        """A random order of the forwards and backwards of a few microbatches."""
        waiting: list[Tensor] = []
        x = torch.randn(16, WIDTH)
        for _ in range(draw.randint(1, 4)):
            if draw.random() < 0.2 and not x.requires_grad:
                x.mul_(0.7)  # the input buffer is filled again; a graph may still refer to it
            else:
                x = torch.randn(draw.choice((8, 16, 48)), WIDTH, requires_grad=draw.random() < 0.5)
            plan = random.Random(draw.random())
            try:
                waiting.append(run(lambda plan=plan, x=x: self._forward(plan, x, weights)))
            except InterruptedStepError:
                outcome.errors.append("interrupted forward")
            while waiting and draw.random() < 0.5:
                self._backward(draw, waiting.pop(draw.randrange(len(waiting))), outcome)
        while waiting:
            self._backward(draw, waiting.pop(draw.randrange(len(waiting))), outcome)

    def _forward(self, plan: random.Random, x: Tensor, weights: list[Tensor]) -> Tensor:
        pool = [x, x @ plan.choice(weights) / WIDTH**0.5]
        self._switch(True)
        for _ in range(plan.randint(2, 10)):
            choice = plan.random()
            self._switch(plan.random() < 0.85)
            if choice < 0.55:
                pool.append(UNARY[plan.choice(list(UNARY))](plan.choice(pool)))
            elif choice < 0.8:
                a = plan.choice(pool)
                b = plan.choice([t for t in pool if t.shape == a.shape])
                pool.append(BINARY[plan.choice(list(BINARY))](a, b))
            elif choice < 0.9:
                pool.append(plan.choice(pool) @ plan.choice(weights).t() / WIDTH**0.5)
            elif choice < 0.93:
                with torch.no_grad():
                    plan.choice(pool[1:]).mul_(0.5)
            elif choice < 0.96 and len(pool) > 2:
                del pool[plan.randrange(2, len(pool))]
            elif choice < 0.97:
                raise InterruptedStepError
            elif choice < 0.98:
                pool.append(_FailInBackward.apply(plan.choice(pool)))
            else:
                with torch.no_grad():
                    pool[-1].sin()
        self._switch(True)
        return torch.stack([t.square().mean() for t in pool]).sum()

    def _backward(self, draw: random.Random, loss: Tensor, outcome: Outcome) -> None:
        outcome.tensors.append(loss.detach().clone())
        how = draw.random()
        if how < 0.1:
            return  # dropped
        try:
            if how < 0.25:
                loss.backward(retain_graph=True)
            loss.backward()
        except InterruptedStepError:
            outcome.errors.append("interrupted backward")
        except RuntimeError as error:
            if "modified" not in str(error):
                raise
            outcome.errors.append("modified in place")
