"""Random training whose optimizer steps inside backward, against the loop that clips and steps.

Both loops train with the same offload. A program is a small net with frozen, unused, tied and
complex parameters, an optimizer with some parameter groups, and steps of some microbatches. Between
backward and step it does what programs do there: it clips by value, changes options, weights or
state, looks at gradients, skips the step. Gradients can be infinite, and backwards can raise.
"""

import copy
import random
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.devices import SimulatedDevice
from harness import drain_autograd, make_store, without_collector
from loops import on_device
from programs import FailInBackward, InterruptedStepError

WIDTH = 12
STEPS = 9

Offload = Callable[[nn.Module], ebbtide.OffloadHandle]

REAL: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True, maximize=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, foreach=False),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
}
COMPLEX: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": REAL["sgd"],
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adagrad": REAL["adagrad"],
}


class _Block(nn.Module):
    def __init__(self, *, is_complex: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.unused = nn.Parameter(torch.randn(3))
        if is_complex:
            self.scale = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.tanh(self.first(x)))
        if hasattr(self, "scale"):
            y = torch.view_as_real(torch.fft.fft(y) * self.scale).sum(-1)
        return x + y / WIDTH


class _Net(nn.Module):
    def __init__(self, draw: random.Random, *, is_complex: bool) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            _Block(is_complex=is_complex and draw.random() < 0.6) for _ in range(draw.randint(2, 4))
        )
        if draw.random() < 0.3:
            self.blocks[-1].second.weight = self.blocks[0].second.weight
        if draw.random() < 0.4:
            self.blocks[draw.randrange(len(self.blocks))].first.weight.requires_grad_(False)
        self.calls_twice = draw.random() < 0.3

    def forward(self, x: Tensor, fails_at: int) -> Tensor:
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            x = block(block(x)) if self.calls_twice else block(x)
            if number == fails_at:
                x = FailInBackward.apply(x)
        return x.square().mean()


class _Loop:
    """One of the two loops. They draw the same numbers.

    Args:
        seed: of the program.
        offload: how the model is offloaded.
        overlaps: whether the optimizer steps inside backward.
    """

    def __init__(self, seed: int, offload: Offload, *, overlaps: bool) -> None:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        is_complex = draw.random() < 0.3
        self.net = _Net(draw, is_complex=is_complex)
        self.handle = offload(self.net)
        self.home = self.net.enter.weight.device  # it never rests
        name = draw.choice(sorted(COMPLEX if is_complex else REAL))
        trained = [p for p in self.net.parameters() if p.requires_grad or draw.random() < 0.5]
        cut = draw.randint(1, len(trained)) if draw.random() < 0.5 else 0
        groups = [{"params": trained[cut:]}, {"params": trained[:cut], "lr": 0.02}]
        made = [group for group in groups if group["params"]]
        self.optimizer = (COMPLEX if is_complex else REAL)[name](made)
        self.max_norm = draw.choice((None, 1e-3, 1.0, 3.0, 10.0, 1e6))
        budget = draw.choice((2**30, 2**30, 4096))
        self.overlaps = overlaps
        if overlaps:
            self.optimizer = self.handle.overlap(
                self.optimizer, max_norm=self.max_norm, shadow_budget=budget
            )
        self.microbatches = draw.choice((1, 1, 2, 3))
        self.draw = draw
        self.norms: list[Tensor] = []
        self.content: Counter[str] = Counter()

    def step(self) -> None:
        draw = self.draw
        zero = self.optimizer.zero_grad if draw.random() < 0.7 else self.net.zero_grad
        zero(set_to_none=draw.random() < 0.7)
        for _ in range(self.microbatches + (draw.random() < 0.1)):
            self._backward()
        event = draw.choice((*self._EVENTS, *[""] * 2 * len(self._EVENTS)))
        self.content[event] += 1
        if event == "skipped":
            return
        if event:
            self._EVENTS[event](self)
        clips_first, changes_options = draw.random() < 0.3, draw.random() < 0.2
        if draw.random() < 0.1:
            self.optimizer.step(self._closure)
        else:
            if not self.overlaps:
                self._clip()
            elif clips_first and self.max_norm is not None:
                self.optimizer.clip_grad_norm_()
            if changes_options:
                self._change_options()
            self.optimizer.step()
        if self.overlaps and self.max_norm is not None:
            self.norms.append(self.optimizer.grad_norm)
        if draw.random() < 0.1:
            for group in self.optimizer.param_groups:
                group["lr"] = 0.9 * group["lr"]

    def _backward(self) -> None:
        draw = self.draw
        x = torch.randn(4, WIDTH).to(self.home)
        by = draw.choice((0.1, 1.0, 1.0, 10.0)) if draw.random() > 0.02 else float("inf")
        fails_at = draw.randrange(len(self.net.blocks)) if draw.random() < 0.03 else -1
        self.content["failed" if fails_at >= 0 else "infinite" if by > 10 else "finite"] += 1
        try:
            (self.net(x, fails_at) * by).backward()
        except InterruptedStepError:
            if self.home.type != "cpu":  # how far autograd's other thread has come is open
                drain_autograd()
                self.net.zero_grad()

    def _closure(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.net(torch.ones(4, WIDTH).to(self.home), -1)
        loss.backward()
        if not self.overlaps:
            self._clip()
        return loss

    def _clip(self) -> None:
        if self.max_norm is not None:
            clip = torch.nn.utils.clip_grad_norm_
            self.norms.append(clip(self.net.parameters(), self.max_norm))

    def _with_gradients(self) -> list[nn.Parameter]:
        return [p for p in self.net.parameters() if p.grad is not None]

    def _clip_by_value(self) -> None:
        for parameter in self._with_gradients():
            if not parameter.is_complex():
                parameter.grad.clamp_(-0.01, 0.01)

    def _replace_gradients(self) -> None:
        for parameter in self._with_gradients()[::2]:
            parameter.grad = parameter.grad * 0.5

    def _look(self) -> None:
        for parameter in self._with_gradients():
            parameter.grad.abs().sum().item()

    def _change_options(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.5 * group["lr"]

    def _change_weights(self) -> None:
        with torch.no_grad():
            self.net.blocks[0].first.bias.mul_(0.5)

    def _load_state(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def _one_more_backward(self) -> None:
        self.net(torch.ones(2, WIDTH).to(self.home), -1).backward()

    _EVENTS: ClassVar = {
        "clipped by value": _clip_by_value,
        "replaced gradients": _replace_gradients,
        "looked at": _look,
        "changed options": _change_options,
        "changed weights": _change_weights,
        "loaded state": _load_state,
        "one more backward": _one_more_backward,
        "skipped": _look,
    }

    def state(self) -> dict[str, Tensor]:
        """Everything that must be the same."""
        found = {f"norm {number}": norm for number, norm in enumerate(self.norms)}
        for name, parameter in self.net.named_parameters():
            found[name] = parameter
            if parameter.grad is not None:
                found[f"{name}.grad"] = parameter.grad
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[f"{name}.{key}"] = value
        return {name: bits(value) for name, value in found.items()}


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in the order of its elements: -0.0 is not 0.0."""
    return tensor.detach().cpu().contiguous().reshape(-1).clone().view(torch.uint8)


def check_loops(
    seed: int, offload: Offload, settle: Callable[[], None] = lambda: None
) -> Counter[str]:
    """Train twice, with and without an optimizer that overlaps; compare everything.

    Returns:
        What the programs did, and what stepped ahead.
    """
    plain = _Loop(seed, offload, overlaps=False)
    mine = _Loop(seed, offload, overlaps=True)
    for number in range(STEPS):
        for loop in (plain, mine):
            torch.manual_seed(1000 * seed + number)
            loop.step()
        settle()
        expected, got = plain.state(), mine.state()
        assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
        for name, value in got.items():
            assert torch.equal(value, expected[name]), f"{name} differs in step {number}"
    stats = mine.optimizer.overlap
    content = mine.content
    content += Counter(
        ahead=stats.num_overlapped, again=stats.num_redone, clipped=stats.num_clipped
    )
    assert torch.optim.Optimizer in type(mine.optimizer).__mro__
    for loop in (mine, plain):
        loop.handle.detach()
    assert type(mine.optimizer) is type(plain.optimizer)
    return content


def check_overlap(seed: int, content: Counter[str] | None = None) -> None:
    """Train with weights at rest on the simulated device, whose worker is early or late."""

    def offload(net: nn.Module) -> ebbtide.OffloadHandle:
        device = SimulatedDevice(seed, eagerness=random.Random(seed).choice((0.0, 0.1, 0.6)))
        device.pins_host_memory = True
        with on_device(device, lambda: make_store(device, "host"), 2**18):
            return ebbtide.offload(net, weights=ebbtide.WeightPolicy())

    with without_collector(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = check_loops(seed, offload)
        except Exception as error:
            raise AssertionError(f"overlap seed {seed}: {type(error).__name__}: {error}") from error
    if content is not None:
        content += found
