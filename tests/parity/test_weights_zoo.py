"""Whatever the model: with its weights at rest on the host, training ends in the same bits."""

import bisect
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ebbtide
from ebbtide import ActivationPolicy, OffloadHandle, WeightPolicy
from ebbtide.devices import SimulatedDevice
from ebbtide.stores import PinnedStore
from loops import on_device
from zoo import ENTRIES, Entry, Snapshot, assert_bitwise_equal, deterministic, tensors_in

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
}
LAYERS = {  # where a model repeats nothing: what to offload
    "recurrent": ["block", "head"],
    "mixture_of_experts": ["mixtures.*.experts.*", "mixtures.*.router", "head"],
    "unet": ["enter", "down1", "down2", "up1", "up2", "lift1", "leave"],
    "llama_tied": ["model.layers.*", "model.embed_tokens", "lm_head"],
}
NAMED = {entry.name: entry for entry in ENTRIES}
SEVERAL_STEPS = ("fno_2d", "tfno", "llama_tied", "mixture_of_experts", "recurrent")


class Train:
    """Some steps on one model, and everything that must come out the same."""

    def __init__(self, entry: Entry, optimizer: str, device: torch.device | str = "cpu") -> None:
        self.entry = entry
        self.model, self.inputs = entry.build(device=device)
        self.losses: list[Tensor] = []
        self.before = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.chosen = optimizer
        self.watch: Callable[[], AbstractContextManager] = nullcontext

    def steps(self, count: int) -> Snapshot:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        real = [p for p in trained if not p.is_complex()]
        rest = [p for p in trained if p.is_complex()] if self.chosen == "fused" else []
        groups = [(self.chosen, real if rest else trained), ("adamw", rest)]  # fused is real alone
        self.optimizers = [OPTIMIZERS[name](params) for name, params in groups if params]
        with deterministic():
            for seed in range(count):
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
                with self.watch():
                    loss = self.entry.loss(self.model, self.inputs, seed)
                    loss.backward()
                self.losses.append(loss.detach().clone())
                for optimizer in self.optimizers:
                    optimizer.step()
        return self.state()

    def state(self) -> Snapshot:
        found: Snapshot = {f"loss {n}": loss for n, loss in enumerate(self.losses)}
        found |= {f"gradient of input {n}": x.grad for n, x in self.inputs.items()}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach().clone()
            found[f"{name}.grad"] = None if parameter.grad is None else parameter.grad.clone()
            if not self.entry.without_gradient(name):
                assert parameter.grad is not None, f"{name} has no gradient"
                before = self.before[name].to(parameter.device)
                assert not torch.equal(parameter, before), f"{name} did not change"
            for optimizer in self.optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        found[f"{name}.{key}"] = value.clone()
        return found | {f"buffer {n}": b.clone() for n, b in self.model.named_buffers()}


class NothingAtRestComputes(TorchDispatchMode):
    """Fails where an operation takes a weight at rest: a real device cannot compute with it.

    The simulated device is a CPU, for which it would be a tensor like any other.
    """

    MOVES = (
        "aten.copy_",
        "aten.set_",
        "aten.detach",
        "aten.as_strided",
        "aten.slice",
        "aten.empty",
    )

    def __init__(self, handle: OffloadHandle) -> None:
        super().__init__()
        parameters = sorted(handle.inspect().parameters, key=lambda each: each.address)
        self.begins = [each.address for each in parameters]
        self.ends = [each.address + each.size_bytes for each in parameters]

    @classmethod
    @functools.cache
    def _moves(cls, function) -> bool:
        return str(function).startswith(cls.MOVES)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not self._moves(function):
            for tensor in tensors_in((*args, *(kwargs or {}).values())):
                if tensor.layout is torch.strided:
                    address = tensor.data_ptr()
                    before = bisect.bisect(self.begins, address)
                    at_rest = before > 0 and address < self.ends[before - 1]
                    assert not at_rest, f"{function} takes a weight at rest"
        return function(*args, **(kwargs or {}))


@contextmanager
def offloaded(
    train: Train, seed: int, activations: ActivationPolicy | None = None
) -> Iterator[tuple[OffloadHandle, SimulatedDevice]]:
    """Within, the weights of the model's layers rest on the host; after, nothing is left of it."""
    device = SimulatedDevice(seed, eagerness=(0.0, 0.1, 0.6)[seed % 3])
    with on_device(device, lambda: PinnedStore(device)):
        handle = ebbtide.offload(
            train.model,
            weights=WeightPolicy(),
            activations=activations,
            layers=LAYERS.get(train.entry.name),
        )
    yield handle, device
    device.finish_copies()
    handle.inspect()
    groups = handle._engine.weights.groups
    assert len(groups) > 1
    largest = sorted(group.size_bytes for group in groups)[-2:]
    if activations is None and handle.inspect().in_flight.peak_weight_groups <= 2:
        assert device.allocated_bytes() <= sum(largest)
    handle.detach()
    device.finish_copies()
    handle.inspect()
    assert device.allocated_bytes() == 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", SEVERAL_STEPS)
def test_steps_are_bit_identical(name: str, optimizer: str) -> None:
    expected = Train(NAMED[name], optimizer).steps(4)
    train = Train(NAMED[name], optimizer)
    with offloaded(train, seed=len(name)) as (handle, _):
        assert_bitwise_equal(train.steps(4), expected)
        assert len(handle.inspect().parameters) > 4
    assert_bitwise_equal(train.state(), expected)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_model_trains_identically(entry: Entry) -> None:
    """And never computes with a weight that is on the host."""
    expected = Train(entry, "adamw").steps(2)
    train = Train(entry, "adamw")
    small = ActivationPolicy(min_bytes="4KiB", max_inflight_bytes="1MiB")
    both = small if len(entry.name) % 2 else None
    with offloaded(train, 1, both) as (handle, _):
        train.watch = lambda: NothingAtRestComputes(handle)
        assert_bitwise_equal(train.steps(2), expected)
