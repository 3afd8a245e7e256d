"""Programs that swap other weights into a model, evaluate, and swap them out again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

WIDTH = 16

Swap = Callable[["Tied", list[Tensor]], contextlib.AbstractContextManager[None]]


class Head(nn.Module):
    """Holds a weight of another module in a list, and so does not register it."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.tied = [weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.tied[0].t()


class Tied(nn.Module):
    """Layers, and a head that is tied to the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )
        self.head = Head(self.blocks[0][0].weight)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@contextlib.contextmanager
def by_data(model: Tied, average: list[Tensor]) -> Iterator[None]:
    held = [p.data for p in model.parameters()]
    for p, value in zip(model.parameters(), average, strict=True):
        p.data = value
    yield
    for p, value in zip(model.parameters(), held, strict=True):
        p.data = value


@contextlib.contextmanager
def by_exchange(model: Tied, average: list[Tensor]) -> Iterator[None]:
    def exchange() -> None:
        for p, value in zip(model.parameters(), average, strict=True):
            p.data, value.data = value.data, p.data

    exchange()
    yield
    exchange()


@contextlib.contextmanager
def by_copies(model: Tied, average: list[Tensor]) -> Iterator[None]:
    held = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p, value in zip(model.parameters(), average, strict=True):
            p.copy_(value)
    yield
    with torch.no_grad():
        for p, value in zip(model.parameters(), held, strict=True):
            p.copy_(value)


@contextlib.contextmanager
def by_load(model: Tied, average: list[Tensor]) -> Iterator[None]:
    held = model.state_dict()

    def load(state: dict[str, Tensor]) -> None:
        model.load_state_dict(state, assign=True)
        model.head.tied[0] = model.blocks[0][0].weight

    load(dict(zip(held, average, strict=True)))
    yield
    load(held)


@contextlib.contextmanager
def by_attribute(model: Tied, average: list[Tensor]) -> Iterator[None]:
    def put(values: Sequence[Tensor]) -> None:
        for (name, _), value in zip(list(model.named_parameters()), values, strict=True):
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, value)
        model.head.tied[0] = model.blocks[0][0].weight

    held = list(model.parameters())
    put([nn.Parameter(value) for value in average])
    yield
    put(held)


@contextlib.contextmanager
def by_dict(model: Tied, average: list[Tensor]) -> Iterator[None]:
    held = [dict(block[0]._parameters) for block in model.blocks]
    values = iter(average)
    for block in model.blocks:
        for name in ("weight", "bias"):
            block[0]._parameters[name] = nn.Parameter(next(values))
    model.head.tied[0] = model.blocks[0][0].weight
    yield
    for block, own in zip(model.blocks, held, strict=True):
        block[0]._parameters.update(own)
    model.head.tied[0] = model.blocks[0][0].weight


@contextlib.contextmanager
def by_vector(model: Tied, average: list[Tensor]) -> Iterator[None]:
    """All weights become views of one vector, which is kept and changed by the program."""
    parameters = list(model.parameters())
    held = nn.utils.parameters_to_vector(parameters).detach()
    vector = torch.cat([value.flatten() for value in average])
    nn.utils.vector_to_parameters(vector, parameters)
    vector.mul_(0.5)
    yield
    nn.utils.vector_to_parameters(held, parameters)


@contextlib.contextmanager
def by_swapping(model: Tied, average: list[Tensor]) -> Iterator[None]:
    """As `model.to` does with `torch.__future__.set_swap_module_params_on_conversion`."""
    others = [nn.Parameter(value) for value in average]

    def swap() -> None:
        for p, other in zip(model.parameters(), others, strict=True):
            torch.utils.swap_tensors(p, other)

    swap()
    yield
    swap()


@contextlib.contextmanager
def by_transposing(model: Tied, average: list[Tensor]) -> Iterator[None]:  # noqa: ARG001
    """The same memory read in another order: no pointer changes."""
    for block in model.blocks:
        block[0].weight.data = block[0].weight.data.t()
    yield
    for block in model.blocks:
        block[0].weight.data = block[0].weight.data.t()


SWAPS: dict[str, Swap] = {
    swap.__name__.removeprefix("by_"): swap
    for swap in (
        by_data,
        by_exchange,
        by_copies,
        by_load,
        by_attribute,
        by_dict,
        by_vector,
        by_swapping,
        by_transposing,
    )
}


WITHOUT_GRAPH = {"copies", "vector", "load", "swapping"}
"""Swaps that may not come between a forward and its backward: torch raises, or a graph loses its
parameters."""


def make(device: torch.device | str = "cpu") -> Tied:
    torch.manual_seed(0)
    model = Tied().to(device)
    model.head.tied[0] = model.blocks[0][0].weight
    return model


def batch(number: int, device: torch.device) -> Tensor:
    draw = torch.Generator().manual_seed(number)
    return torch.randn(4, WIDTH, generator=draw).to(device)


def _step(model: Tied, x: Tensor) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def train_and_swap(
    model: Tied, swap: Swap, device: torch.device, *, trains: bool = False
) -> list[Tensor]:
    """Train with an exponential average, and evaluate with it after each step.

    Args:
        model: the model.
        swap: swaps the average in and out.
        device: where the model computes.
        trains: whether a step is trained with the average, which shares the weights' memory then.

    Returns:
        Losses, results of evaluations, and at the end the weights and their average.
    """
    average = [p.detach().clone() for p in model.parameters()]
    found: list[Tensor] = []
    for step in range(3):
        found.append(_step(model, batch(step, device)))
        with torch.no_grad():
            for value, p in zip(average, model.parameters(), strict=True):
                value.lerp_(p, 0.1)
        with swap(model, average):
            for _ in range(2):
                with torch.no_grad():
                    found.append(model(batch(step + 10, device)))
            if trains:
                found.append(_step(model, batch(step + 20, device)))
        with torch.no_grad():
            found.append(model(batch(step + 10, device)))
    return [*found, *(p.detach().clone() for p in model.parameters()), *average]


def swap_while_a_graph_is_alive(model: Tied, swap: Swap, device: torch.device) -> list[Tensor]:
    """Evaluate with other weights between a forward and its backward."""
    average = [p.detach().clone() * 0.5 for p in model.parameters()]
    found: list[Tensor] = []
    for step in range(2):
        model.zero_grad()
        loss = model(batch(step, device)).square().mean()
        with swap(model, average), torch.no_grad():
            found.append(model(batch(step + 10, device)))
        loss.backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


def differentiate_in_threads(model: Tied, device: torch.device) -> list[tuple[Tensor, ...]]:
    """Threads take gradients of one graph, and all must get the same."""
    parameters = list(model.parameters())
    loss = model(batch(0, device)).square().mean()
    found = [torch.autograd.grad(loss, parameters, retain_graph=True)]

    def differentiate() -> None:
        for _ in range(6):
            found.append(torch.autograd.grad(loss, parameters, retain_graph=True))

    threads = [threading.Thread(target=differentiate) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
