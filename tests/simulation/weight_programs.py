"""Random training with weights at rest on the host, against plain training.

A program is a net of a few modules, some of which share weights, are called twice, or are left out
now and then; and some steps of microbatches in any order, retained and dropped graphs, evaluations,
exceptions half-way, changes of weights by hand, and an optimizer. Some train under autocast, with
the masters of their matrices on the host.
"""

import contextlib
import random
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide.devices import SimulatedDevice
from ebbtide.weights.hooks import AbstractWeights
from harness import check_record, drain_autograd, make_store, without_collector
from loops import on_device
from programs import FailInBackward, InterruptedStepError, any_order

WIDTH = 16


class _Look:
    """Sees that weights are on the device while a block works with them."""

    def __init__(self) -> None:
        self.weights: AbstractWeights | None = None

    def __call__(self, block: nn.Module) -> None:
        if self.weights is None:
            return
        for module in block.modules():
            for name in module._parameters:
                assert getattr(module, name) not in self.weights, (
                    "a weight that a block works with is on the host"
                )


class Block(nn.Module):
    """Some weights, used in a way of their own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.look = _Look()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.lender: tuple[nn.Module, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "checkpoint":
            return checkpoint(self._run, x, use_reentrant=False)
        if self.kind == "twice":
            return self._run(self._run(x).sin())
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        self.look(self)
        y = self.second(torch.tanh(self.first(x)))
        if self.kind == "complex":
            y = torch.view_as_real(torch.fft.fft(y) * self.scale).sum(-1)
        elif self.kind == "functional":  # weights without the module that has them
            y = nn.functional.linear(y, self.second.weight @ self.first.weight) * self.scale.real
        elif self.kind == "borrows":  # a weight of another block, which does not work now
            self._changed_by_hand()
            y = nn.functional.linear(y, self.lender[0].first.weight[:WIDTH])
        return y / WIDTH**0.5

    def _changed_by_hand(self) -> None:
        """As a table is that the forward itself moves."""
        lender = self.lender[0]
        if self.training and not lender.first.bias.requires_grad:
            if lender.kind != "plain":
                with torch.no_grad():
                    lender.first.bias.mul_(0.99)
            if lender.kind != "complex":
                lender.first.bias.data.add_(0.01)


class Net(nn.Module):
    """Blocks in a row, of which a call can leave one out or take another order."""

    def __init__(self, kinds: list[str], tied: list[tuple[int, int]], *, takes: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for kind in kinds)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.takes = takes
        self.is_late = False  # whether a view is changed when its layer has run
        self.masters = False  # whether it computes under autocast
        for one, other in tied:
            self.blocks[other].second.weight = self.blocks[one].second.weight
        for number, block in enumerate(self.blocks):
            block.lender = (self.blocks[(7 * number + 3) % len(kinds)],)

    def forward(self, x: Tensor, order: list[int], accident: tuple[str, int]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.masters):
            return self._run(x, order, accident)

    def _run(self, x: Tensor, order: list[int], accident: tuple[str, int]) -> Tensor:
        taken = self.blocks[order[0]].second.weight if self.takes else None
        moved = self.blocks[order[-1]].first.bias if self.takes else None
        viewed = self.blocks[order[0]].second.bias.detach() if self.is_late else None
        for place, number in enumerate(order):
            if self.takes and self.training and place:
                self.blocks[order[0]].second.bias.detach()[:3].mul_(0.99)
            if moved is not None and self.training and not moved.requires_grad:
                with torch.no_grad():
                    moved.mul_(0.99)
            x = x + self.blocks[number](x)
            if viewed is not None:
                viewed[:3].mul_(0.99)
            if place == accident[1]:
                if accident[0] == "forward":
                    raise InterruptedStepError
                if accident[0] == "backward":
                    x = FailInBackward.apply(x)
        if taken is not None:
            x = x @ taken[:, :WIDTH] + moved[:WIDTH]
        return self.head(x).square().mean()


@dataclass
class Tally:
    """What programs did, all together."""

    content: Counter[str] = field(default_factory=Counter)


def check_weights(seed: int, tally: Tally | None = None, kind: str = "host") -> None:
    """Train plainly and with weights at rest in a kind of store; compare everything."""
    with without_collector(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the system refused to page-lock", RuntimeWarning)
        try:
            content = _check(seed, kind)
        except Exception as error:
            raise AssertionError(f"weights seed {seed}: {type(error).__name__}: {error}") from error
    if tally is not None:
        tally.content += content


def _check(seed: int, kind: str) -> Counter[str]:
    draw = random.Random(seed)
    plain, mine = (_make(seed, masters=has_masters(seed)) for _ in range(2))
    device = SimulatedDevice(seed, eagerness=draw.choice((0.0, 0.1, 0.6)))
    device.pins_host_memory = True
    device.refusals = draw.choice((0.0, 0.5))
    both = draw.random() < 0.5
    activations = ebbtide.ActivationPolicy(min_bytes=128) if both else None
    param_dtype = torch.bfloat16 if mine.masters else None
    policy = ebbtide.WeightPolicy(num_layers=draw.choice((None, None, 2)), param_dtype=param_dtype)
    with on_device(device, lambda: make_store(device, kind), draw.choice((0, 2**18))):
        handle = ebbtide.offload(mine, activations=activations, weights=policy)
    weights = handle._engine.weights
    assert weights is not None
    for module, _ in weights._used:
        if isinstance(module, Block):
            module.look.weights = weights
    handle._engine.transfers.offloads.bound_bytes = draw.choice((0, 2**12, 2**20))
    trainings = [_Training(seed, plain, None), _Training(seed, mine, device)]
    for number in range(4):
        for training in trainings:
            training.step(number)
        drain_autograd()
        for record in (*weights.groups, *handle._engine.transfers.offloads.queue):
            check_record(record)
        expected, got = (training.state() for training in trainings)
        assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
        for name, value in got.items():
            assert torch.equal(value, expected[name]), f"{name} differs in step {number}"
    if mine.takes:
        check_late_change(plain, mine)
    weights.settle()
    device.finish_copies()
    # A module with a tied weight needs the group of the other one, too.
    needed = 2 + sum(len(used) > 1 for _, used in weights._used)
    most = sorted(group.size_bytes for group in weights.groups)[-needed:]
    assert weights.peak_groups <= needed, "too many groups are on the device"
    for _ in range(500):  # autograd's thread may still hold the graph of a backward that raised
        handle.inspect()
        weights.settle()  # a job of the simulated disk runs when somebody waits for it
        if device.allocated_bytes() <= sum(most):
            break
        time.sleep(0.01)
    assert device.allocated_bytes() <= sum(most)
    if draw.random() < 0.5:  # the copies of the next block's weights are under way at the end
        with torch.no_grad(), contextlib.suppress(InterruptedStepError):
            mine.eval()(torch.randn(4, WIDTH), list(range(len(mine.blocks))), ("forward", 0))
    if draw.random() < 0.5:
        detach_between(plain, mine, handle, draw)
    handle.detach()
    device.finish_copies()
    for _ in range(500):  # what a graph still held when the weights went is given back by a thread
        handle.inspect()
        device.finish_jobs()
        if not device.pinned_bytes and not device.allocated_bytes():
            break
        time.sleep(0.01)
    assert device.allocated_bytes() == 0
    assert device.pinned_bytes == 0
    expected = dict(plain.named_parameters())
    for name, parameter in mine.named_parameters():
        assert torch.equal(parameter, expected[name]), f"{name} differs after detach"
    return trainings[1].content


def check_late_change(plain: Net, mine: Net) -> None:
    """A change through a view whose layer has run is kept, or raises an error.

    It is kept if the layer's weights are in the same place still. What the weights are afterwards
    is compared after detach.
    """
    x, order = torch.randn(4, WIDTH), list(range(len(mine.blocks)))
    changed = [net.blocks[0].second.bias for net in (plain, mine)]
    left = changed[0].detach().cpu().clone()
    for net in (mine, plain):
        net.is_late = True
        net.eval()
        try:
            with torch.no_grad():
                net(x, order, ("", 0))
        except ebbtide.PolicyError as error:
            if net is plain or "through a view" not in str(error):
                raise
            for _ in order:  # so many changes may have been kept before one that was not
                if torch.equal(left, changed[1].cpu()):
                    break
                left[:3].mul_(0.99)
            with torch.no_grad():
                changed[0].copy_(left)
            break
    for net in (mine, plain):
        net.is_late = False
        net.train()


def detach_between(
    plain: Net, mine: Net, handle: ebbtide.OffloadHandle, draw: random.Random
) -> None:
    """Detach while graphs are alive; compare what they give after it."""
    drop = draw.random() < 0.5
    asked = draw.random() < 0.5
    x = torch.randn(4, WIDTH)
    found = []
    losses = [_losses(net, x) for net in (plain, mine)]
    handle.detach()
    for block in mine.blocks:
        block.look.weights = None
    for net, (first, second) in zip((plain, mine), losses, strict=True):
        net.zero_grad()
        used = [p for p in net.parameters() if p.requires_grad]
        if asked:
            found.append(torch.autograd.grad(first, used, allow_unused=True))
        else:
            first.backward()
            found.append(tuple(p.grad for p in used))
        if not drop:
            second.backward(inputs=used)
            found[-1] += tuple(p.grad for p in used)
    for expected, got in zip(*found, strict=True):
        assert (expected is None) == (got is None), "a gradient after detach"
        assert expected is None or torch.equal(expected, got), "a gradient after detach differs"


def _losses(net: Net, x: Tensor) -> list[Tensor]:
    order = list(range(len(net.blocks)))
    return [net.eval()(x * number, order, ("", 0)) for number in (1, 2)]


def has_masters(seed: int) -> bool:
    """Whether the net of a seed trains under autocast, with masters on the host."""
    return random.Random(f"{seed} masters").random() < 0.25


def _make(seed: int, *, masters: bool = False) -> Net:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    count = draw.randint(2, 5)
    kinds = ["plain", "plain", "complex", "functional", "checkpoint", "twice", "borrows"]
    if masters:  # not those whose gradients autocast's cache sums in bfloat16
        kinds = ["plain", "complex", "checkpoint"]
    tied = [(0, count - 1)] if draw.random() < 0.3 and not masters else []
    chosen = [draw.choice(kinds) for _ in range(count)]
    net = Net(chosen, tied, takes=draw.random() < 0.3 and not masters)
    net.masters = masters
    if draw.random() < 0.3:
        net.blocks[draw.randrange(count)].first.weight.requires_grad_(False)
    if draw.random() < 0.5:
        for block in net.blocks:
            block.first.bias.requires_grad_(False)
    return net


class _Training:
    """Steps of one net, the same for the same seed."""

    def __init__(self, seed: int, net: Net, device: SimulatedDevice | None) -> None:
        self.net = net
        self.device = device
        self.draw = random.Random(seed + 1)
        self.seed = seed
        self.content: Counter[str] = Counter()
        self.losses: list[Tensor] = []
        self.held: list[tuple[Tensor, Tensor]] = []  # gradients that the user keeps, and copies
        self.backward_stream = self.draw.random() < 0.3
        chosen = self.draw.choice(("sgd", "adamw", "fused"))
        # Not by torch's choice, which depends on the device, and rounds differently.
        one_by_one = {"foreach": False}
        if chosen == "sgd":
            self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, **one_by_one)
        else:
            real = [p for p in net.parameters() if not p.is_complex()]
            some = real if chosen == "fused" else net.parameters()
            self.optimizer = torch.optim.AdamW(some, lr=0.01, fused=chosen == "fused", **one_by_one)

    def state(self) -> dict[str, Tensor]:
        """Everything that must be the same."""
        found = {f"loss {n}": loss for n, loss in enumerate(self.losses)}
        found |= {name: p.detach().clone() for name, p in self.net.named_parameters()}
        grads = {n: p.grad for n, p in self.net.named_parameters() if p.grad is not None}
        found |= {f"{name}.grad": grad.clone() for name, grad in grads.items()}
        for number, state in enumerate(self.optimizer.state.values()):
            tensors = {k: v for k, v in state.items() if isinstance(v, Tensor)}
            found |= {f"{number}.{key}": value.clone() for key, value in tensors.items()}
        for grad, copy in self.held:
            assert torch.equal(grad, copy), "a gradient that somebody holds was overwritten"
        return found

    def step(self, number: int) -> None:
        draw = self.draw
        torch.manual_seed(self.seed * 31 + number)
        if draw.random() < 0.8:
            self.optimizer.zero_grad(set_to_none=draw.random() < 0.7)
        waiting: dict[int, Tensor] = {}
        for action, microbatch in any_order(draw, draw.randint(1, 3)):
            if action == "forward":
                loss = self._forward(alone=not waiting)
                if loss is not None:
                    waiting[microbatch] = loss
            elif microbatch in waiting:
                self._backward(waiting.pop(microbatch))
        waiting.clear()
        if draw.random() < 0.3:
            for p in self.net.parameters():
                if p.grad is not None:
                    self.held.append((p.grad, p.grad.clone()))
            self.net.zero_grad()
            self.content["held gradients"] += 1
        if draw.random() < 0.3:
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        self.optimizer.step()
        if draw.random() < 0.2:
            self.content["changed by hand"] += 1
            for p in self.net.parameters():
                p.data = p.data * 0.9 if draw.random() < 0.5 else p.data.mul_(0.9)

    def _forward(self, *, alone: bool) -> Tensor | None:
        draw, count = self.draw, len(self.net.blocks)
        order = list(range(count))
        if draw.random() < 0.4:
            self.content["another order"] += 1
            draw.shuffle(order)
            del order[draw.randint(1, count) :]
        accident = draw.choice(("", "", "", "forward", "backward")), draw.randrange(len(order))
        x = torch.randn(4, WIDTH, requires_grad=draw.random() < 0.5)
        if self.device is not None:
            self.device.current = 0
        try:
            if draw.random() < 0.2:
                self.content["evaluated"] += 1
                with torch.no_grad():
                    self.losses.append(self.net(x, order, ("", 0)))
                if alone and draw.random() < 0.5:
                    self.content["written after an evaluation"] += 1
                    with torch.no_grad():
                        for p in self.net.parameters():
                            if self.content["written after an evaluation"] % 2:
                                p.mul_(0.99)
                            elif p.dim() > 1:  # few values, of which nothing tells
                                p.data[..., 3:4].mul_(0.9)
            loss = self.net(x, order, accident)
        except InterruptedStepError:
            self.content["interrupted forward"] += 1
            return None
        finally:
            if self.device is not None:
                self.device.current = int(self.backward_stream)
        self.losses.append(loss.detach().clone())
        return loss

    def _backward(self, loss: Tensor) -> None:
        how = self.draw.random()
        try:
            if how < 0.1:
                self.content["dropped"] += 1
            elif how < 0.25:
                self.content["retained"] += 1
                loss.backward(retain_graph=True)
                loss.backward()
            elif how < 0.35:
                self.content["asked for"] += 1
                some = list(self.net.head.parameters())
                some += [p for p in self.net.blocks.parameters() if p.requires_grad]
                found = torch.autograd.grad(loss, some, allow_unused=True)
                self.losses += [g.clone() for g in found if g is not None]
            else:
                self.content["backward"] += 1
                loss.backward()
        except InterruptedStepError:
            self.content["interrupted backward"] += 1
            for p in self.net.parameters():  # what of it was added, nobody can say
                p.grad = None
