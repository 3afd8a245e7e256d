"""Random programs: what training code does to autograd, drawn from a seed or from a tape.

A program is run twice, plainly and with its saved tensors offloaded, and must give the same bits,
or the same kind of error. It is a few steps of: forwards of several microbatches of two networks,
in the order of some schedule with their backwards; layers absent in some forwards; retained
and dropped graphs; gradients of gradients; exceptions half-way; changes in place.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo  # checkpoint imports it on first use, and that keeps the caller's frame alive
from torch import Tensor
from torch.utils.checkpoint import checkpoint

WIDTH = 32
Source = int | Sequence[int]
"""What a program is drawn from: a seed, or the numbers of a tape."""
Apply = Callable[..., Tensor]
Run = Callable[[Callable[[], Any]], Any]
"""Runs one forward, with hooks or without."""

WRITING = "written in backward"
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
    "rrelu": lambda x: torch.ops.aten.rrelu(x, 0.1, 0.3, True, torch.Generator()),
    WRITING: lambda x: _WritesInBackward.apply(x),
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


class FailInBackward(torch.autograd.Function):
    """Raises in the middle of a backward."""

    @staticmethod
    def forward(ctx, x):  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # noqa: ARG004
        raise InterruptedStepError


class _WritesInBackward(torch.autograd.Function):
    """Changes its saved tensor in place when backward has given it the tensor."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            x.mul_(0.5)
        return gradient * x.detach()


@dataclass
class Outcome:
    """What a program computed and met.

    Attributes:
        tensors: losses and gradients.
        errors: the names of the errors, in order.
        content: how often the program did what.
        num_steps: finished, or raised.
    """

    tensors: list[Tensor] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    content: Counter[str] = field(default_factory=Counter)
    num_steps: int = 0


class Tape(random.Random):
    """Choices read from a list of numbers, which hypothesis can generate and shrink.

    Zeros follow when it is used up, and zeros mean a short, simple program.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(0)
        self._numbers = iter(numbers)

    def random(self) -> float:
        return self.getrandbits(8) / 256

    def getrandbits(self, k: int) -> int:
        return next(self._numbers, 0) % (1 << k)


@dataclass(frozen=True)
class Layer:
    """One operation of a network on the pool of tensors so far; zeros are the simplest one."""

    kind: str
    name: str
    first: int
    second: int
    offloaded: bool


Network = list[Layer]
Action = tuple[str, int]


def draw_network(draw: random.Random, unary: Sequence[str]) -> Network:
    layers = []
    for _ in range(draw.randint(2, 8)):
        choice = draw.random()
        if choice < 0.58:
            kind, name = "unary", draw.choice(unary)
        elif choice < 0.83:
            kind, name = "binary", draw.choice(list(BINARY))
        elif choice < 0.93:
            kind, name = "linear", ""
        else:
            kind, name = ("forget", "") if choice < 0.97 else ("without gradient", "")
        places = draw.getrandbits(4), draw.getrandbits(4)
        layers.append(Layer(kind, name, *places, offloaded=draw.random() < 0.85))
    return layers


def one_forward_one_backward(microbatches: int, warmup: int) -> list[Action]:
    """Some forwards to warm up, then one forward and one backward in turn, then what is left."""
    actions = [("forward", number) for number in range(warmup)]
    for number in range(warmup, microbatches):
        actions += [("forward", number), ("backward", number - warmup)]
    return actions + [("backward", n) for n in range(microbatches - warmup, microbatches)]


def any_order(draw: random.Random, microbatches: int) -> list[Action]:
    actions: list[Action] = []
    waiting: list[int] = []
    for number in range(microbatches):
        actions.append(("forward", number))
        waiting.append(number)
        while waiting and draw.random() < 0.5:
            actions.append(("backward", waiting.pop(draw.randrange(len(waiting)))))
    while waiting:
        actions.append(("backward", waiting.pop(draw.randrange(len(waiting)))))
    return actions


class Program:
    """The program of one source; `run` repeats exactly the same one.

    Args:
        source: draws everything: a seed, or the numbers of a tape.
        switch: called within forwards with whether what follows is to be offloaded.
        unary: the functions that networks are drawn from.
        starts_over: a backward that raises leaves no gradients, and one over a tensor modified in
            place is asked for all of them. Where inputs are read for a rebuild, it raises earlier,
            and also where plain autograd would not have needed that input (docs/guides/rebuild.md).
        apply: called with a function and tensors; applies the one to the others.
        changes: tensors are changed in place, in forward or in backward. A recomputed layer needs
            its input where plain autograd does not, so it would raise where that does not; and it
            does not need its output where plain autograd does.
        after_error: called when a backward has raised.
    """

    def __init__(
        self,
        source: Source,
        switch: Callable[[bool], None] = lambda _: None,
        unary: Sequence[str] = tuple(UNARY),
        *,
        starts_over: bool = False,
        apply: Apply = lambda function, *tensors: function(*tensors),
        changes: bool = True,
        after_error: Callable[[], None] = lambda: None,
    ) -> None:
        self._how = _How(switch, apply, starts_over, changes, after_error)
        self._source = source
        self._unary = [name for name in unary if changes or name != WRITING]

    def run(self, run: Run, after_step: Callable[[Outcome], None] = lambda _: None) -> Outcome:
        """Run it.

        Args:
            run: runs each forward.
            after_step: called when all graphs of a step are gone.
        """
        seeded = isinstance(self._source, int)
        draw = random.Random(self._source) if seeded else Tape(self._source)
        torch.manual_seed(self._source if seeded else 0)
        outcome = Outcome()
        weights = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(2)]
        networks = [draw_network(draw, self._unary) for _ in range(2)]
        for _ in range(draw.randint(1, 3)):
            step = _Step(draw, run, self._how, weights, networks, outcome)
            step.run()
            outcome.tensors += [w.grad.clone() for w in weights if w.grad is not None]
            outcome.num_steps += 1
            after_step(outcome)
            if draw.random() > 0.7:
                with torch.no_grad():
                    for weight in weights:
                        weight.mul_(0.9)
        return outcome


@dataclass(frozen=True)
class _How:
    """How a program is run; see `Program`."""

    switch: Callable[[bool], None]
    apply: Apply
    starts_over: bool
    changes: bool
    after_error: Callable[[], None]


@dataclass
class _Microbatch:
    """A graph that waits for its backward, and its output if the caller has kept that."""

    loss: Tensor
    output: Tensor | None
    changed: bool


@dataclass
class _Step:
    draw: random.Random
    how_to_run: Run
    how: _How
    weights: list[Tensor]
    networks: list[Network]
    outcome: Outcome

    def run(self) -> None:
        waiting: dict[int, _Microbatch] = {}
        x = torch.randn(16, WIDTH)
        for action, number in self._schedule():
            if action == "forward":
                x = self._input(x)
                before = self._refill_unseen(x) if self.draw.random() > 0.8 else None
                microbatch = self._try_forward(x)
                del before
                if microbatch is not None:
                    waiting[number] = microbatch
                del microbatch
            elif number in waiting:
                self._backward(waiting.pop(number))

    def _schedule(self) -> list[Action]:
        microbatches = self.draw.randint(1, 4)
        if microbatches > 1:
            self.outcome.content["several microbatches"] += 1
            if self.draw.random() < 0.4:
                self.outcome.content["1F1B"] += 1
                return one_forward_one_backward(
                    microbatches, self.draw.randint(1, microbatches - 1)
                )
        return any_order(self.draw, microbatches)

    def _input(self, x: Tensor) -> Tensor:
        if self.draw.random() > 0.8 and not x.requires_grad:
            self.outcome.content["input refilled"] += 1
            if not self.how.changes:
                return x * 0.7
            return x.mul_(0.7)  # a graph may still refer to it
        size = self.draw.choice((8, 16, 48))
        return torch.randn(size, WIDTH, requires_grad=self.draw.random() >= 0.5)

    def _refill_unseen(self, x: Tensor) -> _Microbatch | None:
        """Refill the input so that no version tells, while a graph that nobody needs is alive."""
        if x.requires_grad:
            return None
        self.outcome.content["input refilled unseen"] += 1
        before = self._try_forward(x)
        x.data.mul_(0.7)
        return before

    def _try_forward(self, x: Tensor) -> _Microbatch | None:
        layers = list(self.networks[self.draw.random() > 0.8])
        exits = self.draw.random()
        if exits > 0.85:
            self.outcome.content["early exit"] += 1
            del layers[self.draw.randint(1, len(layers)) :]
        elif exits > 0.7:
            self.outcome.content["layer absent"] += 1
            del layers[self.draw.randrange(len(layers))]
        accident, at = self.draw.random(), self.draw.randrange(len(layers))
        keeps_output = self.draw.random() > 0.7
        try:
            return self.how_to_run(lambda: self._forward(x, layers, accident, at, keeps_output))
        except InterruptedStepError:
            self.outcome.errors.append("interrupted forward")
            return None
        except OSError:
            self.outcome.errors.append("store failed")
            return None

    def _forward(
        self, x: Tensor, layers: Network, accident: float, at: int, keeps_output: bool
    ) -> _Microbatch:
        unneeded = None
        if 0.7 < accident <= 0.79 and self.how.changes and not x.requires_grad:
            x = x.clone()  # the caller's stays as it is if the store fails
            unneeded = x @ self.weights[1]  # saves x as it was before
            x.mul_(0.9)
        pool = [x, x @ self.weights[0] / WIDTH**0.5]
        for place, layer in enumerate(layers):
            self.how.switch(layer.offloaded)
            self._apply(layer, pool)
            if place == at:
                self._meet(accident, pool)
        del unneeded
        self.how.switch(True)
        loss = torch.stack([t.square().mean() for t in pool]).sum()
        output = pool[-1].detach() if keeps_output else None
        writes = any(layer.name == WRITING for layer in layers)
        return _Microbatch(loss, output, changed=writes or 0.79 < accident <= 0.91)

    def _apply(self, layer: Layer, pool: list[Tensor]) -> None:
        a = pool[layer.first % len(pool)]
        if layer.kind == "unary":
            pool.append(self.how.apply(UNARY[layer.name], a))
        elif layer.kind == "binary":
            same = [t for t in pool if t.shape == a.shape]
            b = same[layer.second % len(same)]
            pool.append(self.how.apply(BINARY[layer.name], a, b))
        elif layer.kind == "linear":
            weight = self.weights[layer.second % 2]
            pool.append(self.how.apply(lambda a, weight: a @ weight.t() / WIDTH**0.5, a, weight))
        elif layer.kind == "forget" and len(pool) > 2:
            del pool[2 + layer.first % (len(pool) - 2)]
        else:
            with torch.no_grad():
                a.sin()

    def _meet(self, accident: float, pool: list[Tensor]) -> None:
        if accident > 0.95:
            raise InterruptedStepError
        if accident > 0.91:
            pool.append(FailInBackward.apply(pool[-1]))
        elif accident > 0.79 and self.how.changes:
            with torch.no_grad():
                pool[-1].mul_(0.5)

    def _backward(self, microbatch: _Microbatch) -> None:
        self.outcome.tensors.append(microbatch.loss.detach().clone())
        changes = microbatch.output is not None and self.draw.random() > 0.7
        if changes and self.how.changes:
            assert microbatch.output is not None
            self.outcome.content["output changed"] += 1
            with torch.no_grad():
                microbatch.output.mul_(0.5)  # its bytes may be in the store, it itself is not
            microbatch.changed = True
        how = self.draw.random()
        try:
            if self.how.starts_over and microbatch.changed:
                how = min(how, 0.5)
            self._differentiate(microbatch.loss, how)
        except InterruptedStepError:
            self.outcome.errors.append("interrupted backward")
            self._start_over()
        except OSError:
            self.outcome.errors.append("store failed")
            self.how.after_error()
        except RuntimeError as error:
            known = {"modified": "modified in place", "use_reentrant": "reentrant within grad"}
            names = [name for word, name in known.items() if word in str(error)]
            if not names:
                raise
            self.outcome.errors.append(names[0])
            self._start_over()

    def _start_over(self) -> None:
        self.how.after_error()
        if self.how.starts_over:
            for weight in self.weights:
                weight.grad = None

    def _differentiate(self, loss: Tensor, how: float) -> None:
        content = self.outcome.content
        if how > 0.92:
            content["dropped"] += 1
        elif how > 0.8:
            content["retained"] += 1
            loss.backward(retain_graph=True)
            loss.backward()
        elif how > 0.72:
            content["double backward"] += 1
            (loss + self._penalty(loss)).backward()
        elif how > 0.66:
            content["double backward, hooked"] += 1
            (loss + self.how_to_run(lambda: self._penalty(loss))).backward()
        elif how > 0.62:
            content["some gradients only"] += 1
            torch.autograd.grad(loss, self.weights[:1])
        else:
            content["backward"] += 1
            loss.backward()

    def _penalty(self, loss: Tensor) -> Tensor:
        """A number that depends on gradients, as physics-informed losses do."""
        gradients = torch.autograd.grad(loss, self.weights, create_graph=True, allow_unused=True)
        return torch.stack([g.square().mean() for g in gradients if g is not None]).sum()
