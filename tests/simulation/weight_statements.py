"""Random loops with weights at rest: between any two statements, anything.

A loop is a list of statements, carried out with two equal nets. One trains plainly. The other has
weights at rest while its handle lives, and between any two statements may detach or be offloaded
again. Nothing waits for the device before the loop looks at its results.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import random
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.devices import SimulatedDevice
from harness import drain_autograd, make_store, without_collector
from loops import on_device
from programs import InterruptedStepError
from weight_programs import WIDTH, Net, _Look, _make, has_masters

NUM_STATEMENTS = 30

OffloadAgain = Callable[[Net, random.Random], ebbtide.OffloadHandle]
"""Offloads a net with a policy that the second argument draws."""


class Interrupt(BaseException):
    """What Ctrl-C raises, wherever the program is."""


class _InterruptedLook(_Look):
    """Raises when so many blocks have begun to work, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.left: int | None = None

    def __call__(self, block: nn.Module) -> None:
        super().__call__(block)
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Interrupt


class Loop:
    """One net and what a program has in its variables.

    Args:
        seed: of the net and the loop.
        offload: offloads the net; None for the loop that trains plainly.
    """

    def __init__(self, seed: int, offload: OffloadAgain | None) -> None:
        self.net = _make(seed, masters=has_masters(seed))
        self.look = _InterruptedLook()
        for block in self.net.blocks:
            block.look = self.look
        self.offload = offload
        self.handle: ebbtide.OffloadHandle | None = None
        self.average = [p.detach().clone() for p in self.net.parameters()]
        self.graphs: list[Tensor] = []
        self.seen: list[Tensor] = []
        self.content: Counter[str] = Counter()
        self.optimizer = self._make_optimizer()

    def run(self, name: str, seed: int) -> None:
        """Carry out one statement. The same seed draws the same for both loops."""
        torch.manual_seed(seed)
        self.content[name] += 1
        STATEMENTS[name](self, random.Random(seed))

    def results(self) -> dict[str, Tensor]:
        """Everything that must be the same."""
        found = {f"value {n}": value for n, value in enumerate(self.seen)}
        found |= {f"average {n}": value for n, value in enumerate(self.average)}
        for name, p in self.net.named_parameters():
            found[name] = p
            if p.grad is not None:
                found[f"{name}.grad"] = p.grad
        return {name: value.detach().cpu().clone() for name, value in found.items()}

    def end(self) -> None:
        """Detach, and drop what the program has in variables, but not the net."""
        self.graphs.clear()
        self.detach(random.Random(0))

    # ---- statements -----------------------------------------------------------------------------

    def forward(self, draw: random.Random) -> None:
        loss = self._call(draw, draw.choice(("", "", "", "backward")))
        self.graphs.append(loss)
        self.seen.append(loss.detach().clone())

    def backward(self, draw: random.Random) -> None:
        if not self.graphs:
            return
        loss = self.graphs.pop(draw.randrange(len(self.graphs)))
        try:
            if draw.random() < 0.2:
                loss.backward(retain_graph=True)
            loss.backward()
        except InterruptedStepError:
            self._forget_gradients()

    def ask_for_gradients(self, draw: random.Random) -> None:
        if not self.graphs:
            return
        loss = self.graphs.pop(draw.randrange(len(self.graphs)))
        some = [p for p in self.net.parameters() if p.requires_grad]
        with contextlib.suppress(InterruptedStepError):
            found = torch.autograd.grad(loss, some, allow_unused=True)
            self.seen += [gradient.clone() for gradient in found if gradient is not None]

    def drop(self, draw: random.Random) -> None:
        if self.graphs:
            del self.graphs[draw.randrange(len(self.graphs))]

    def step(self, draw: random.Random) -> None:
        self.graphs.clear()  # torch would raise in their backward
        if draw.random() < 0.3:
            _clip(self.net)
        self.optimizer.step()
        if draw.random() < 0.8:
            self.optimizer.zero_grad(set_to_none=draw.random() < 0.7)

    def evaluate(self, draw: random.Random) -> None:
        with draw.choice((torch.no_grad, torch.inference_mode))():
            value = self._call(draw)
        self.seen.append(value.clone())

    def evaluate_in_a_thread(self, draw: random.Random) -> None:
        device = torch.get_default_device()  # which a thread does not inherit

        def work() -> None:
            with device, torch.no_grad():
                self.seen.append(self._call(draw).clone())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    def search_by_evolution(self, draw: random.Random) -> None:
        self.graphs.clear()
        for factor in (1.01, 0.98):
            self._write(lambda p, factor=factor: p.mul_(factor))
            with torch.no_grad():
                self.seen.append(self._call(random.Random(draw.random())))

    def write(self, draw: random.Random) -> None:
        self.graphs.clear()
        factor = draw.choice((0.9, 1.1))
        kind = draw.randrange(4)
        if kind == 0:
            self._write(lambda p: p.mul_(factor))
        elif kind == 1:
            self._write(lambda p: p.data.mul_(factor))
        elif kind == 2:
            for p in self.net.parameters():
                p.data = p.data * factor
        else:
            values = {name: value * factor for name, value in self.net.state_dict().items()}
            self.net.load_state_dict(values)

    def write_too_late(self, draw: random.Random) -> None:
        """Between a forward and its backward: both loops say so, or neither."""
        self.graphs.clear()
        if self.net.masters:
            return  # under autocast torch saves a cast of the weight, and says nothing
        loss = self._call(draw)
        with torch.no_grad():
            self.net.blocks[0].second.weight.mul_(0.99)
        try:
            loss.backward()
        except RuntimeError:
            self.content["said so"] += 1
            self._forget_gradients()
        if self.net.takes:
            # A weight that the model took out of a layer before the layer ran is saved with memory
            # of its own, so its graph is valid, although torch alone refuses it.
            self._forget_gradients()
        else:
            self.seen.append(torch.tensor(float(self.content["said so"])))

    def swap_average(self, draw: random.Random) -> None:
        self.graphs.clear()
        for n, p in enumerate(self.net.parameters()):
            now = p.detach().clone()
            p.data.copy_(self.average[n])
            self.average[n] = now
        if draw.random() < 0.5:
            self.evaluate(draw)

    def swap_by_pointer(self, draw: random.Random) -> None:
        """The program keeps the memory of the weights, and gives it back."""
        self.graphs.clear()  # a layer may change a weight in the evaluation, which is refused then
        parameters = list(self.net.parameters())
        held = [p.data for p in parameters]
        keeps = draw.random() < 0.5
        for p, average in zip(parameters, self.average, strict=True):
            p.data = average if keeps else average.clone()
        self.evaluate(draw)
        for p, values in zip(parameters, held, strict=True):
            p.data = values

    def follow_average(self, draw: random.Random) -> None:
        for n, p in enumerate(self.net.parameters()):
            by = draw.choice((0.1, 0.2))
            self.average[n] = torch.lerp(self.average[n].to(p.device), p.detach(), by)

    def interrupt(self, draw: random.Random) -> None:
        self.look.left = draw.randrange(2 * len(self.net.blocks))
        try:
            if draw.random() < 0.5:
                with torch.no_grad():
                    self._call(draw)
            else:
                self._call(draw).backward()  # a recomputation may be interrupted, too
        except Interrupt:
            self.content["interrupted"] += 1
            self._forget_gradients()
        self.look.left = None

    def copy(self, draw: random.Random) -> None:
        if draw.random() < 0.5:
            state = copy.deepcopy(self.net.state_dict())
        else:
            file = io.BytesIO()
            torch.save(self.net.state_dict(), file)
            file.seek(0)
            state = torch.load(file)
        self.seen += [value.clone() for value in state.values()]

    def detach(self, draw: random.Random) -> None:
        if draw.random() < 0.3:
            self.graphs.clear()
        if self.handle is not None:
            self.handle.detach()
            self.handle = self.look.weights = None
        self._start_anew()

    def offload_again(self, draw: random.Random) -> None:
        self.graphs.clear()  # parameters move, as with `model.to(...)`: graphs lose them
        self.detach(draw)
        if self.offload is not None:
            self.handle = self.offload(self.net, draw)
            weights = self.handle._engine.weights
            assert weights is not None
            self.look.weights = weights
        self._start_anew()

    # ---- what they are made of ------------------------------------------------------------------

    def _call(self, draw: random.Random, accident: str = "") -> Tensor:
        order = list(range(len(self.net.blocks)))
        if draw.random() < 0.3:
            draw.shuffle(order)
            del order[draw.randint(1, len(order)) :]
        x = torch.randn(4, WIDTH, requires_grad=draw.random() < 0.5)
        return self.net(x, order, (accident, draw.randrange(len(order))))

    def _write(self, change: Callable[[Tensor], object]) -> None:
        with torch.no_grad():
            for p in self.net.parameters():
                change(p)

    def _forget_gradients(self) -> None:
        """What of them was added before an error, nobody can say."""
        for p in self.net.parameters():
            p.grad = None

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9, foreach=False)

    def _start_anew(self) -> None:
        """Parameters may have moved: so has what was made for them."""
        self._forget_gradients()
        self.optimizer = self._make_optimizer()
        self.average = [
            average.to(p.device)
            for average, p in zip(self.average, self.net.parameters(), strict=True)
        ]


def _clip(net: nn.Module) -> None:
    """As `clip_grad_norm_`, which adds the norms up device by device, and so rounds differently."""
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    norms = [torch.linalg.vector_norm(gradient.cpu()) for gradient in gradients]
    total = float(torch.tensor(norms, device="cpu").norm())
    for gradient in gradients:
        gradient.mul_(min(1.0, 0.5 / (total + 1e-6)))


STATEMENTS: dict[str, Callable[[Loop, random.Random], None]] = {
    name: getattr(Loop, name.replace(" ", "_"))
    for name in (
        *("forward", "backward", "ask for gradients", "drop", "step", "evaluate"),
        *("evaluate in a thread", "search by evolution", "write", "write too late"),
        *(
            "swap average",
            "swap by pointer",
            "follow average",
            "interrupt",
            "copy",
            "detach",
            "offload again",
        ),
    )
}
WEIGHTS = {"forward": 6, "backward": 5, "step": 3, "evaluate": 2}
"""Of statements that come more often than others."""


def statements(seed: int) -> Iterator[tuple[str, int]]:
    """A loop: names of statements, each with a seed of its own."""
    draw = random.Random(seed)
    yield "offload again", draw.randrange(2**31)
    names = list(STATEMENTS)
    chosen = draw.choices(names, [WEIGHTS.get(name, 1) for name in names], k=NUM_STATEMENTS)
    for name in chosen:
        yield name, draw.randrange(2**31)


def check_same(plain: Loop, mine: Loop, where: str) -> None:
    """Compare all results of two loops."""
    expected, got = plain.results(), mine.results()
    assert got.keys() == expected.keys(), f"{got.keys() ^ expected.keys()} {where}"
    for name, value in got.items():
        assert torch.equal(value, expected[name]), f"{name} differs {where}"


def check_statements(seed: int, kind: str = "host") -> Counter[str]:
    """Carry out a loop on the simulated device, plainly and with weights at rest; compare.

    Args:
        seed: of the loop, and of the device.
        kind: of the store.
    """
    with without_collector(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the system refused to page-lock", RuntimeWarning)
        try:
            if seed % 10 == 0:
                _check_dropped(seed, kind)
            return _check(seed, kind)
        except Exception as error:
            raise AssertionError(
                f"statements seed {seed}: {type(error).__name__}: {error}"
            ) from error


def _check_dropped(seed: int, kind: str) -> None:
    """Drop a model, its graph and its handle while copies are under way: their memory stays."""
    device = SimulatedDevice(seed, eagerness=0.0)
    device.pins_host_memory = True
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
    with on_device(device, lambda: make_store(device, kind)):
        handle = ebbtide.offload(model, activations=ebbtide.ActivationPolicy(min_bytes=1))
    loss = model(torch.rand(32, 64)).sum()
    assert handle.inspect().in_flight.offload_bytes
    del handle, model, loss
    gc.collect()
    device.finish_jobs()
    device.finish_copies()
    assert device.allocated_bytes() == 0


def _check(seed: int, kind: str) -> Counter[str]:
    draw = random.Random(seed)
    device = SimulatedDevice(seed, eagerness=draw.choice((0.0, 0.1, 0.6)))
    device.pins_host_memory = True
    device.refusals = draw.choice((0.0, 0.5))

    def offload(net: Net, draw: random.Random) -> ebbtide.OffloadHandle:
        with on_device(device, lambda: make_store(device, kind), draw.choice((0, 2**18))):
            return offload_weights(net, draw)

    plain, mine = Loop(seed, None), Loop(seed, offload)
    done = []
    # After an interrupt a forward builds the engine anew, on the same device.
    with on_device(device, lambda: make_store(device, kind)):
        for name, statement_seed in statements(seed):
            done.append(name)
            for loop in (plain, mine):
                loop.run(name, statement_seed)
            if random.Random(statement_seed).random() < 0.2:
                drain_autograd()
                check_same(plain, mine, f"after {done}")
        drain_autograd()
        check_same(plain, mine, f"after {done}")
        for loop in (plain, mine):
            loop.end()
    drain_autograd()
    check_same(plain, mine, f"at the end, after {done}")
    device.finish_copies()
    for _ in range(3):  # what a job lets go of may leave jobs of its own
        if device.pinned_bytes or device.allocated_bytes():
            gc.collect()  # an error may refer to the engine
        device.finish_jobs()
    assert device.allocated_bytes() == 0
    assert device.pinned_bytes == 0
    return mine.content


def offload_weights(net: Net, draw: random.Random) -> ebbtide.OffloadHandle:
    """Offload a net's weights, and perhaps its activations, with a policy that is drawn."""
    activations = ebbtide.ActivationPolicy(min_bytes=128) if draw.random() < 0.5 else None
    policy = ebbtide.WeightPolicy(
        num_layers=draw.choice((None, None, 2)),
        double_buffering=draw.random() < 0.7,
        param_dtype=torch.bfloat16 if net.masters else None,
    )
    return ebbtide.offload(net, activations=activations, weights=policy)
