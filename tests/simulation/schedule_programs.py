"""Random steps under random schedules: followed to the letter, or departed from.

A step is some microbatches of a chain of layers with skip connections, in any order of forwards and
backwards. Its schedule moves random layers at random anchors of exactly that order; then the
step may do something else after all. A layer may write to its saved tensor in backward: where the
tensor is also the output of the layer before, backward raises, plainly and offloaded alike, and the
rest of its passes never come.
"""

import random
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import ebbtide
from ebbtide import schedule
from ebbtide.runtime.executor import ScheduleExecutor
from ebbtide.runtime.handles import UnitRecords
from ebbtide.runtime.record import State
from ebbtide.schedule import Action, Pass, Schedule, Unit, Verb, parse_pass
from harness import Knobs, Simulation, drain_autograd, without_collector
from loops import on_device
from programs import BINARY, UNARY, WIDTH, InterruptedStepError, any_order

KINDS = [name for name in UNARY if "checkpoint" not in name]


@dataclass
class Step:
    """What one program does, and what its schedule thinks that it does.

    Args:
        layers: the operation of each layer, and the earlier layer that it looks back to.
        order: of forwards and backwards of microbatches, as it really comes.
        plan: the schedule.
        labels: whether the loop numbers its layers itself.
        departure: what it does other than its schedule; "" for nothing.
    """

    layers: list[tuple[str, str, int]]
    order: list[tuple[str, int]]
    plan: Schedule
    labels: bool
    departure: str

    @classmethod
    def draw(cls, draw: random.Random) -> "Step":
        num_layers, microbatches = draw.randint(1, 5), draw.randint(1, 4)
        layers = []
        for place in range(num_layers):
            binary = draw.choice(list(BINARY)) if draw.random() < 0.5 else ""
            layers.append((draw.choice(KINDS), binary, draw.randint(0, place)))
        order = any_order(draw, microbatches)
        rounds = draw.random() < 0.3  # each microbatch a round of its own
        plan = (
            _draw_schedule(draw, num_layers, [("forward", 0), ("backward", 0)])
            if rounds
            else (_draw_schedule(draw, num_layers, order))
        )
        departures = ["", "", "", "swapped", "dropped", "interrupted", "shortened", "retained"]
        labels = draw.random() < 0.5 and not rounds
        return cls(layers, order, plan, labels, draw.choice(departures))


def unit_order(num_layers: int, order: list[tuple[str, int]]) -> list[Pass]:
    """The passes of the layers."""
    passes = []
    for action, number in order:
        numbers = range(num_layers) if action == "forward" else reversed(range(num_layers))
        passes += [parse_pass(f"{action[0].upper()}{layer}.m{number}") for layer in numbers]
    return passes


def _draw_schedule(draw: random.Random, num_layers: int, order: list[tuple[str, int]]) -> Schedule:
    passes = unit_order(num_layers, order)
    actions = []
    for place, each in enumerate(passes):
        use = (
            next(p for p, other in enumerate(passes) if other.unit == each.unit and p > place)
            if (each.is_forward)
            else 0
        )
        if not each.is_forward or use - place < 3 or draw.random() < 0.25:
            continue
        begin = place if draw.random() < 0.7 else draw.randint(place, use - 3)
        out = draw.randint(begin + 1, use - 1)
        back = draw.randint(out + 1, use)
        for verb, at in zip(Verb, (begin, out, back), strict=True):
            actions.append((passes[at], Action(verb, each.unit)))
    return Schedule(passes, actions).check()


@dataclass
class Tally:
    """What programs did, all together."""

    content: Counter[str] = field(default_factory=Counter)

    def check(self, programs: int) -> None:
        assert self.content["followed"] > programs // 4
        assert self.content["moved"] > programs
        assert self.content["said so"] > programs // 20
        assert self.content["raised"] > 0
        for departure in ("swapped", "dropped", "interrupted", "shortened", "retained"):
            assert self.content[departure] > programs // 30, departure


def check_schedule(
    seed: int,
    tally: Tally | None = None,
    make_bench: Callable[[int, Knobs], Simulation] = Simulation,
) -> None:
    """Run a step under its schedule, thrice, and compare with plain autograd.

    Args:
        seed: of the program and its bench.
        tally: counts what the program did.
        make_bench: makes what it runs on.
    """
    draw = random.Random(seed)
    step = Step.draw(draw)
    knobs = Knobs(
        device_seed=seed,
        bound_bytes=draw.choice((0, 4096, 2**18)),
        eagerness=draw.choice((0.0, 0.1, 0.6)),
        backward_stream=draw.random() < 0.3,
        closes_early=draw.random() < 0.5,
        store=draw.choice(("host", "disk", "tiered")),
        slow_copies=draw.choice((0.0, 0.3)),
        rebuild=draw.random() < 0.5,
    )
    with without_collector():
        try:
            content = _check(seed, step, make_bench(seed, knobs))
        except Exception as error:
            raise AssertionError(
                f"schedule seed {seed}: {type(error).__name__}: {error}"
            ) from error
    if tally is not None:
        tally.content += content


def _check(seed: int, step: Step, simulation: Simulation) -> Counter[str]:
    knobs = simulation.knobs
    policy = ebbtide.ActivationPolicy(min_bytes=512, rebuild=knobs.rebuild)
    with on_device(simulation.device, lambda: simulation.store, knobs.bound_bytes) as built:
        loop = ebbtide.OffloadSession(schedule=step.plan, activations=policy)
    simulation.transfers = built[0]  # its own have done nothing yet
    executor = loop._engine.executor
    assert executor is not None
    simulation.activations = executor.activations
    # Rounds share the transposed weight: where they overlap, or one of them departs, it asks for
    # what another has sent away.
    overlapping = step.plan.num_microbatches < len(step.order) // 2
    watch = _Watch(executor, looks=not overlapping and step.departure in ("", "retained"))
    content = Counter([step.departure] if step.departure else [])
    raised = 0
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(3):
            plain, offloaded = _Run(seed, step, None, None), _Run(seed, step, loop, simulation)
            expected, got = plain.run(), offloaded.run()
            assert offloaded.raised == plain.raised, "backwards that raise"
            raised += len(plain.raised)
            assert len(got) == len(expected)
            for mine, theirs in zip(got, expected, strict=True):
                assert torch.equal(mine, theirs), f"step {number} differs from plain autograd"
            del got, offloaded
            drain_autograd()
            if step.departure in ("", "retained") and not raised:
                simulation.check_account()
    departures = [str(w.message) for w in said if "departs from its schedule" in str(w.message)]
    assert len(departures) <= 1, "it says so once"
    if not step.departure and not raised:
        assert not departures, departures[0]
    assert not watch.wrong, watch.wrong[0]
    content["followed"] += not departures
    content["said so"] += len(departures)
    content["raised"] += raised > 0
    content["moved"] += watch.released
    executor.abandon()
    simulation.check_at_rest()
    return content


class _Watch:
    """After each anchor, what it released has no memory, until it is reloaded."""

    def __init__(self, executor: ScheduleExecutor, *, looks: bool) -> None:
        self.wrong: list[str] = []
        self.released = 0
        act, begin = executor.do, executor.begin

        def watched_act(records: UnitRecords, verb: Verb) -> None:
            act(records, verb)
            self.released += verb is Verb.RELEASE
            for record in records.records:
                if verb is Verb.RELEASE and record.state is State.RETAINED:
                    self.wrong.append(f"{records.unit} holds memory after its release")
                if verb is Verb.RELOAD and record.source is None and record.buffer is None:
                    self.wrong.append(f"{records.unit} has no memory after its reload")

        def watched_begin(current: object, each: Pass) -> None:
            begin(current, each)
            if looks and not current.departed:
                self._look(current.units, each)

        executor.do, executor.begin = watched_act, watched_begin

    def _look(self, units: dict[Unit, UnitRecords], each: Pass) -> None:
        for records in units.values():
            away = Verb.RELEASE in records.done and Verb.RELOAD not in records.done
            for record in records.records:
                if away and (record.source is not None or record.buffer is not None):
                    self.wrong.append(f"{records.unit} is there at {each}, and should be away")


class _Run:
    """One step, plainly or offloaded."""

    def __init__(
        self,
        seed: int,
        step: Step,
        loop: ebbtide.OffloadSession | None,
        simulation: Simulation | None,
    ) -> None:
        self.step = step
        self.loop = loop
        self.simulation = simulation
        self.draw = random.Random(seed + 1)
        torch.manual_seed(seed)
        self.weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
        self.inputs = [torch.randn(16, WIDTH, requires_grad=True) for _ in range(4)]
        self.raised: list[int] = []  # the microbatches whose backward met a modified tensor

    def run(self) -> list[Tensor]:
        order = list(self.step.order)
        odd = self.draw.randrange(len(order))
        if self.step.departure == "swapped":
            backwards = [place for place, (action, _) in enumerate(order) if action == "backward"]
            first, second = self.draw.choice(backwards), self.draw.choice(backwards)
            order[first], order[second] = order[second], order[first]
        losses: dict[int, Tensor] = {}
        result = []
        for place, (action, number) in enumerate(order):
            departure = self.step.departure if place == odd else ""
            if action == "forward":
                try:
                    losses[number] = self._forward(number, departure)
                except InterruptedStepError:
                    continue
                result.append(losses[number].detach().clone())
            elif number in losses:
                loss = losses.pop(number)
                try:
                    self._backward(loss, departure)
                except RuntimeError as error:
                    if "modified" not in str(error):
                        raise
                    self.raised.append(number)
                del loss
                if number in self.raised:
                    drain_autograd()
        losses.clear()
        result += [x.grad for x in (self.weight, *self.inputs) if x.grad is not None]
        return result

    def _backward(self, loss: Tensor, departure: str) -> None:
        if departure == "retained":
            loss.backward(retain_graph=True)
        if departure != "dropped":
            loss.backward()

    def _forward(self, number: int, departure: str) -> Tensor:
        pool = [self.inputs[number] @ self.weight / WIDTH**0.5]
        layers = self.step.layers
        if departure == "shortened":
            layers = layers[: self.draw.randint(0, len(layers) - 1)]
        stop = self.draw.randrange(len(layers)) if departure == "interrupted" and layers else -1
        for place, layer in enumerate(layers):
            if self.loop is None or self.simulation is None:
                pool.append(self._layer(layer, pool, place == stop))
                continue
            self.simulation.device.current = 0
            label = (place,) if self.step.labels else ()
            kwargs = {"microbatch": number} if self.step.labels else {}
            with self.loop.layer(*label, **kwargs):
                pool.append(self._layer(layer, pool, place == stop))
            pool[-1] = self.loop.sync(pool[-1])
        if self.simulation is not None:
            self.simulation.device.current = int(self.simulation.knobs.backward_stream)
        return pool[-1].square().mean()

    def _layer(self, layer: tuple[str, str, int], pool: list[Tensor], stops: bool) -> Tensor:
        unary, binary, back = layer
        y = UNARY[unary](pool[-1]) @ self.weight.t() / WIDTH**0.5
        if stops:
            raise InterruptedStepError
        if binary and pool[back].shape == y.shape:
            y = BINARY[binary](y, pool[back])
        return y.tanh()


__all__ = ["Step", "Tally", "check_schedule", "schedule", "unit_order"]
