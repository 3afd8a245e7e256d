"""Layers whose forward changes what is outside of modules: a second forward leaves no trace."""

from __future__ import annotations

import array
import ctypes
import functools
import itertools
import multiprocessing
import queue
import threading
import types
import weakref
from collections import ChainMap, OrderedDict, UserList, UserString, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ebbtide

centres: dict[str, Any] = {}
calls = 0
log: list[int] = []
draws = torch.Generator()
numbers = np.random.default_rng(0)
scale = torch.ones(1)
window: deque[float] = deque(maxlen=3)
means = np.zeros(16, np.float32)
norms = [nn.BatchNorm1d(16)]
settings = types.SimpleNamespace(calls=0)
cycle = itertools.cycle([1.0, 1.5, 0.5])
nested = {"inner": {"calls": 0}}
factor = 1.0


class Layer(nn.Module):
    """A layer with an activation that is worth recomputing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.change(self.linear(x)))

    def change(self, y: Tensor) -> Tensor:
        return y


class Centre(Layer):
    def change(self, y: Tensor) -> Tensor:
        centres["centre"] = centres["centre"] * 0.9 + y.detach().mean(0) * 0.1
        return y - centres["centre"]


class CentreInPlace(Layer):
    def change(self, y: Tensor) -> Tensor:
        centres["centre"].mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y - centres["centre"].clone()


def count() -> int:
    global calls
    calls += 1
    return calls


class Count(Layer):
    def change(self, y: Tensor) -> Tensor:
        return y / count()


class CountOfClass(Layer):
    calls: ClassVar[int] = 0

    def change(self, y: Tensor) -> Tensor:
        type(self).calls += 1
        return y / self.calls


class CountOnWeight(Layer):
    """As Opacus counts in a hook how often a forward uses a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.uses = 0

    def change(self, y: Tensor) -> Tensor:
        self.linear.weight.uses += 1
        return y / self.linear.weight.uses


class Log(Layer):
    def change(self, y: Tensor) -> Tensor:
        log.append(len(log))
        return y


class Draws(Layer):
    def change(self, y: Tensor) -> Tensor:
        return y + torch.randn(16, generator=draws) * numbers.standard_normal()


class Window(Layer):
    def change(self, y: Tensor) -> Tensor:
        window.append(float(y.detach().mean()))
        means[:] = 0.9 * means + y.detach().mean(0).numpy()
        return y - sum(window) + torch.from_numpy(means.copy())


class State:
    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> int:
        self.calls += 1
        return self.calls

    def __next__(self) -> int:
        return self.count()

    def __call__(self) -> int:
        return self.count()

    @property
    def counted(self) -> int:
        return self.count()


state = State()


class Implicit(Layer):
    def change(self, y: Tensor) -> Tensor:
        return y / (next(state) + state() + state.counted)


class Attribute(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.own = State()

    def change(self, y: Tensor) -> Tensor:
        return y / next(self.own)


class Object(Layer):
    def change(self, y: Tensor) -> Tensor:
        return y / state.count()


class Named(Layer):
    """Modules that it does not own are updated as it names them."""

    def change(self, y: Tensor) -> Tensor:
        return norms[0](y)


class Namespace(Layer):
    def change(self, y: Tensor) -> Tensor:
        settings.calls += 1
        return y / settings.calls


class Nested(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.own = {"inner": {"calls": 0}}

    def change(self, y: Tensor) -> Tensor:
        nested["inner"]["calls"] += 1
        self.own["inner"]["calls"] += 1
        return y / (nested["inner"]["calls"] + self.own["inner"]["calls"])


class Cycle(Layer):
    """An iterator that nothing sets back: the layer is not recomputed, nor verified."""

    def change(self, y: Tensor) -> Tensor:
        return y * next(cycle)


class Generating(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.own = (1 / (1 + number) for number in range(100))

    def change(self, y: Tensor) -> Tensor:
        return y * next(self.own)


class Scale(Layer):
    def change(self, y: Tensor) -> Tensor:
        scale.mul_(0.9)
        return y * scale.clone()


class Factor(Layer):
    def change(self, y: Tensor) -> Tensor:
        return y * factor


def _counting() -> Callable[[Any, Tensor], Tensor]:
    number = 0

    def change(_: Any, y: Tensor) -> Tensor:
        nonlocal number
        number += 1
        return y / number

    return change


class Closure(Layer):
    change = _counting()


class Held(Layer):
    """Calls a function and an object that only its attributes name."""

    def __init__(self) -> None:
        super().__init__()
        self.function = functools.partial(_counting(), None)
        self.states = [State()]

    def change(self, y: Tensor) -> Tensor:
        return self.function(y) / self.states[0].count()


class OwnForward(Layer):
    """Has a forward of its own, in the place of that of its class."""

    def __init__(self) -> None:
        super().__init__()
        count = _counting()
        self.forward = lambda x: torch.tanh(count(None, self.linear(x)))


class Around(nn.Sequential):
    """A model that counts in a hook on what is inside its layers."""

    calls = 0

    def __init__(self) -> None:
        super().__init__(Layer(), Layer(), nn.Linear(16, 16))
        for layer in [*self][:2]:
            layer.linear.register_forward_hook(self.count)

    def count(self, *call: Any) -> Tensor:
        self.calls += 1
        return call[-1] / self.calls


class Defaults(Layer):
    def change(self, y: Tensor, seen: list[int] = [], *, sums: dict[str, int] = {}) -> Tensor:  # noqa: B006
        seen.append(1)
        sums["calls"] = sums.get("calls", 0) + 1
        return y / (len(seen) + sums["calls"])


def _defaults() -> tuple[list[int], dict[str, int]]:
    function: Any = Defaults.change
    return function.__defaults__[0], function.__kwdefaults__["sums"]


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    yield
    _start()


def _start() -> None:
    global calls, numbers, factor, cycle
    cycle = itertools.cycle([1.0, 1.5, 0.5])
    centres["centre"] = torch.zeros(16)
    calls, CountOfClass.calls, factor = 0, 0, 1.0
    log.clear()
    window.clear()
    means.fill(0)
    state.calls = settings.calls = nested["inner"]["calls"] = 0
    norms[0] = nn.BatchNorm1d(16)
    scale.fill_(1)
    draws.manual_seed(5)
    numbers = np.random.default_rng(0)
    Closure.change = _counting()
    for each in _defaults():
        each.clear()


def _train(kind: type[nn.Module], **offload: Any) -> list[Any]:
    """Return what four steps lead to: gradients, and all that is outside of modules."""
    global factor
    _start()
    torch.manual_seed(0)
    model = kind() if kind is Around else nn.Sequential(kind(), kind(), nn.Linear(16, 16))
    handle = ebbtide.offload(model, **offload) if offload else None
    found: list[Any] = []
    for number in range(4):
        loss = model(torch.randn(8, 16)).square().mean()
        factor = 1.0 + number
        loss.backward()
        found += [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]
        found.append((calls, CountOfClass.calls, factor, tuple(log), tuple(window), state.calls))
        found.append([vars(p).copy() for p in model.parameters()])
        found.append((means.tobytes(), settings.calls, str(nested), str(_defaults())))
        found += [each.numpy().tobytes() for each in norms[0].buffers()]
        found += [each.numpy().tobytes() for each in (centres["centre"], scale)]
        found += [draws.get_state().numpy().tobytes(), str(numbers.bit_generator.state)]
    if handle is not None:
        handle.detach()
    return found


@pytest.mark.parametrize("kind", [*Layer.__subclasses__(), Around], ids=lambda kind: kind.__name__)
def test_a_second_forward_leaves_nothing_outside(kind: type[nn.Module]) -> None:
    policy = ebbtide.ActivationPolicy(mode="recompute", min_bytes=1)
    assert _train(kind, activations=policy, layers=["0", "1"]) == _train(kind)


# ---- Things that hold values in some other way --------------------------------------------------


class Slots:
    __slots__ = ("__weakref__", "number")

    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> int:
        self.number += 1
        return self.number


class OwnDict(OrderedDict[str, int]):
    """As the outputs of Transformers: its own methods do more, or refuse."""

    def __setitem__(self, name: str, number: int) -> None:
        super().__setitem__(name, number)
        self.latest = number

    def update(self, *_: Any) -> None:  # type: ignore[override]
        raise TypeError


class OwnTuple(tuple[Any, ...]):
    """As the representations of e3nn, which have no length."""

    def __len__(self) -> int:
        raise NotImplementedError


def _in_own_tuple() -> Callable[[], float]:
    held = OwnTuple([[0]])

    def count() -> float:
        held[0].append(1)
        return float(sum(held[0]))

    return count


def _in_own_dict() -> Callable[[], float]:
    held = OwnDict()
    held["number"] = 0

    def count() -> float:
        held["number"] += 1
        return held["number"] + held.latest

    return count


def _growing(
    held: Any, add: Callable[[Any], object], measure: Callable[[Any], float] = sum
) -> Callable[[], float]:
    def count() -> float:
        add(held)
        return float(measure(held))

    return count


class OwnList(list[int]):
    pass


class OwnSet(set[int]):
    pass


def _behind(make: Callable[[Slots], Callable[[], Slots]]) -> Callable[[], float]:
    target = Slots()
    _alive.append(target)
    find = make(target)
    return lambda: find()()


_alive: list[Slots] = []
_of_thread = threading.local()
_of_context: ContextVar[int] = ContextVar("number", default=0)


def _in_thread() -> Callable[[], float]:
    _of_thread.number = 0

    def count() -> float:
        _of_thread.number += 1
        return float(_of_thread.number)

    return count


def _in_context() -> Callable[[], float]:
    _of_context.set(0)

    def count() -> float:
        _of_context.set(_of_context.get() + 1)
        return float(_of_context.get())

    return count


def _add_to_first(held: Any) -> None:
    held[0] += 1


def _add_in_chain(held: Any) -> None:
    held[len(held)] = 1


def _add_to_text(held: Any) -> None:
    held.data += "a"


def _in_frozenset() -> Callable[[], float]:
    (counter,) = held = frozenset([Slots()])
    return lambda: sum(each() for each in held) if counter in held else 0.0


class ByOwner:
    """A descriptor that holds the value of each owner by itself."""

    def __init__(self) -> None:
        self.values: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __get__(self, owner: Any, _: type) -> int:
        return self.values.get(owner, 0)

    def __set__(self, owner: Any, value: int) -> None:
        self.values[owner] = value


class Described:
    number = ByOwner()

    def __call__(self) -> float:
        self.number += 1
        return float(self.number)


def _in_semaphore() -> Callable[[], float]:
    held = threading.Semaphore(100)

    def count() -> float:
        held.acquire()
        return float(held._value)

    return count


HOLDERS: dict[str, Callable[[], Callable[[], float]]] = {
    "chain": lambda: _growing(ChainMap({}, {0: 1}), _add_in_chain),
    "UserString": lambda: _growing(UserString(""), _add_to_text, len),
    "frozenset": _in_frozenset,
    "descriptor": Described,
    "semaphore": _in_semaphore,
    "C array": lambda: _growing((ctypes.c_int * 1)(), _add_to_first),
    "shared array": lambda: _growing(multiprocessing.Array("i", 1), _add_to_first),
    "slots": Slots,
    "own dict": _in_own_dict,
    "own tuple": _in_own_tuple,
    "own list": lambda: _growing(OwnList(), lambda held: held.append(1)),
    "own set": lambda: _growing(OwnSet(), lambda held: held.add(len(held) + 1)),
    "UserList": lambda: _growing(UserList(), lambda held: held.append(1)),
    "queue": lambda: _growing(queue.Queue(), lambda held: held.put(1), queue.Queue.qsize),
    "bytes": lambda: _growing(bytearray(1), _add_to_first),
    "array": lambda: _growing(array.array("i", [0]), _add_to_first),
    "weak reference": lambda: _behind(weakref.ref),
    "proxy": lambda: _behind(lambda target: functools.partial(_same, weakref.proxy(target))),
    "thread": _in_thread,
    "context": _in_context,
}


def _same(value: Any) -> Any:
    return value


class Holding(nn.Module):
    def __init__(self, count: Callable[[], float]) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(16, 16), count

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * (1 + 0.1 * self.count())).tanh()


@pytest.mark.filterwarnings("ignore:.*not recomputed")
@pytest.mark.parametrize("name", HOLDERS)
def test_a_second_forward_leaves_no_trace_in_what_holds_values_otherwise(name: str) -> None:
    """Some are put back; a layer that names one of the others is not recomputed."""
    policy = ebbtide.ActivationPolicy(mode="recompute", min_bytes=1)
    found: list[list[Tensor]] = []
    for options in ({}, {"activations": policy, "layers": ["0", "1"]}):
        torch.manual_seed(0)
        model = nn.Sequential(*(Holding(HOLDERS[name]()) for _ in range(2)), nn.Linear(16, 16))
        handle = ebbtide.offload(model, **options) if options else None
        for _ in range(4):
            model(torch.randn(8, 16)).square().mean().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
        if handle is not None:
            handle.detach()
    assert all(map(torch.equal, *found))
