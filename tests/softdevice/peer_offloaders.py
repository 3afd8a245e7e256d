"""Other libraries' offloading on the accelerator in software, and models that meet its defects.

As a program, it verifies the file of a library that holds its `OffloadActivations`, of any version,
as it is but for the name of the device:

    pip download --no-deps trl==1.13.0 && unzip -q trl-1.13.0-*.whl
    PYTHONPATH=src:tests/softdevice python tests/softdevice/peer_offloaders.py \
        trl/models/activation_offloading.py gates
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import softdevice
from ebbtide import VerifyReport
from ebbtide.tools.models import default_loss
from ebbtide.tools.verify import (
    POISON,
    FreedMemoryPoison,
    Provocation,
    Trial,
    Values,
    choose_order,
    deterministic_kernels,
    find_sleep,
    sgd,
    verify_runs,
)

WIDTH = 64
Made = Callable[[nn.Module], AbstractContextManager[object]]

# ---- Models


class Gate(nn.Module):
    """Saves two slices of a tensor that nothing else holds."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        u, v = self.both(x).chunk(2, dim=-1)
        return x + u * v


class FusedSum(torch.autograd.Function):
    """Computes its gradient in forward, as fused losses do, and returns it in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.cos(x))
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return ctx.saved_tensors[0]


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + FusedSum.apply(self.map(x))


def build(layer: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    """Make a model of eight layers, and its batch."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer() for _ in range(8)]).to("softdevice")
    return model, torch.randn(16, 32, WIDTH).to("softdevice")


MODELS = {"gates": Gate, "fused": Fused}


# ---- Libraries that are installed


def save_on_cpu(_: nn.Module) -> AbstractContextManager[object]:
    return torch.autograd.graph.save_on_cpu(pin_memory=True)


def trl(model: nn.Module) -> AbstractContextManager[object]:
    manager = pytest.importorskip("trl.models.activation_offloading").OffloadActivations()
    manager.update_model_params(model)  # it leaves out what it finds to be parameters
    return manager


# ---- What the issues describe


class Offloader(torch.autograd.graph.saved_tensors_hooks):
    """Copies every saved tensor down and up, beside compute, and is right as it stands.

    Each flag takes out what one of the issues found missing.

    Args:
        waits_for_own_copy: a copy up waits for the copy down of its bytes; Megatron-LM #7398.
        reads_strides: a tensor is read in the layout that it has; ms-swift #10157.
        waits_outside: compute waits for a copy up, and not the copy stream for itself;
            torchtitan #2581.
        holds_source: a tensor lives until its copy down has ended; TRL #7195.
    """

    def __init__(
        self,
        *,
        waits_for_own_copy: bool = True,
        reads_strides: bool = True,
        waits_outside: bool = True,
        holds_source: bool = True,
    ) -> None:
        super().__init__(self._pack, self._unpack)
        self._down, self._up = torch.Stream(), torch.Stream()
        self._waits_for_own_copy = waits_for_own_copy
        self._reads_strides = reads_strides
        self._waits_outside = waits_outside
        self._holds_source = holds_source

    def _pack(self, tensor: Tensor) -> tuple[Tensor, torch.Event, tuple[int, ...]]:
        source = tensor.detach()
        if self._reads_strides:
            source = source.contiguous()
        self._down.wait_stream(torch.accelerator.current_stream())
        with torch.softdevice.stream(self._down):
            host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            if not self._reads_strides and source.numel() == source.untyped_storage().nbytes() // 4:
                source = source.as_strided(source.shape, host.stride())
            host.copy_(source, non_blocking=True)
        copied = self._down.record_event()
        if self._holds_source:
            source.record_stream(self._down)
        return host, copied, tensor.stride()

    def _unpack(self, packed: tuple[Tensor, torch.Event, tuple[int, ...]]) -> Tensor:
        host, copied, _ = packed
        compute = torch.accelerator.current_stream()
        tensor = torch.empty(host.shape, dtype=host.dtype, device="softdevice")
        self._up.wait_stream(compute)
        if self._waits_for_own_copy:
            self._up.wait_event(copied)
        with torch.softdevice.stream(self._up):
            tensor.copy_(host, non_blocking=True)
        waiting = compute if self._waits_outside else self._up
        waiting.wait_stream(self._up)
        tensor.record_stream(self._up)
        return tensor


def without(flaw: str) -> Made:
    """Return an offloader that lacks what a flag is about; "" for none."""

    @functools.cache
    def make(_: nn.Module) -> Offloader:
        return Offloader(**({flaw: False} if flaw else {}))

    return make


# ---- Verifies what offloads by torch's copies, whatever it is


def verify(
    model: nn.Module, batch: Tensor, offloader: Made, *, steps: int = 3, orders: int = 7
) -> VerifyReport:
    """Verify other offloading as `ebbtide.verify` does its own, as far as that is possible outside.

    Args:
        model: the model.
        batch: what it is called with.
        offloader: called with the model for each step; returns what surrounds its passes.
        steps: training steps in each run.
        orders: how many provocations are tried.
    """
    trial = Trial(model, batch, default_loss, steps, 1, sgd, {})

    def run(
        offloaded: bool, provocation: Provocation | None, deterministic: bool
    ) -> tuple[Values, str, int]:
        if not offloaded:
            return trial.run(False, None, deterministic)
        order = choose_order(trial.device, provocation)
        late = None if provocation is None else draw(provocation.seed)
        copies = ProvokedCopies(trial.device, late)

        @contextlib.contextmanager
        def surround() -> Iterator[None]:
            with copies, offloader(model):
                yield

        with deterministic_kernels(deterministic):
            values = trial.train(surround)
        return values, order, copies.down_bytes

    try:
        return verify_runs(run, model, range(orders), steps=steps)
    finally:
        trial.restore()
        trial.give_back_gradients()


def draw(seed: int) -> Provocation:
    """Copies and kernels can be late; the rest cannot be provoked from outside."""
    chance = random.Random(seed)
    some, most = chance.uniform(0.1, 0.4), chance.uniform(0.5, 0.9)
    late = ("copies late", "compute late", "copies and compute late")[seed % 3]
    copies, compute = ("copies" in late) * most, ("compute" in late) * some
    return Provocation(seed=seed, name=late, late_copies=copies, late_compute=compute)


class ProvokedCopies(TorchDispatchMode):
    """Within the block, copies between device and host are late, and so are kernels.

    Whoever offloads copies with torch, so its copies can be provoked without knowing it. A copy is
    made twice: after the first one its target is overwritten, and time passes on the stream of the
    copy. Whoever waits for the copy does not see that.

    Args:
        device: the accelerator on which the model computes.
        provocation: what is provoked; None: nothing, copies are only counted.

    Attributes:
        down_bytes: copied from the device to the host.
    """

    def __init__(self, device: torch.device, provocation: Provocation | None) -> None:
        super().__init__()
        self.down_bytes = 0
        self._device = device
        self._provocation = provocation
        self._choices = random.Random(provocation.seed if provocation else 0)
        self._freed = FreedMemoryPoison()
        self._sleep = find_sleep(device)
        self._poison = torch.full((), POISON, dtype=torch.uint8, device=device)
        self._module = torch.get_device_module(device)
        self._compute = self._module.current_stream()
        self._streams = {self._compute}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._provocation is not None:
            self._freed.poison(*self._streams)
            if self._happens(self._provocation.late_compute):
                self._sleep()
        result = func(*args, **(kwargs or {}))
        current = self._module.current_stream()
        self._streams.add(current)
        if current != self._compute:
            for leaf in tree_leaves((args, result)):
                if isinstance(leaf, Tensor) and leaf.device == self._device:
                    self._freed.watch(leaf)
        copies = {_ATEN.copy_: args[:2], _ATEN._to_copy: (result, *args[:1])}
        target, source = copies.get(func.overloadpacket, (None, None))
        if isinstance(source, Tensor) and target.device.type != source.device.type:
            self.down_bytes += target.nbytes * (target.device.type == "cpu")
            if self._provocation is not None:
                self._copy_again(target, source, self._provocation.late_copies)
        return result

    def _copy_again(self, target: Tensor, source: Tensor, late: float) -> None:
        """Copy into a target that was overwritten, as if the first copy had taken so long."""
        storage = target.untyped_storage()
        if storage.nbytes() == target.nbytes:
            bits = torch.empty(0, dtype=torch.uint8, device=target.device).set_(storage)
            bits.copy_(self._poison.expand(bits.shape), non_blocking=True)
        for _ in range(self._choices.randint(1, 8) * self._happens(late)):
            self._sleep()
        target.copy_(source, non_blocking=True)
        if self._happens(late):
            self._sleep()

    def _happens(self, chance: float) -> bool:
        return self._choices.random() < chance


_ATEN = torch.ops.aten


# ---- A library's file


class _Absent(types.ModuleType):
    """Stands for a package that the file imports and does not need here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__new__": lambda *_, **__: None})


def load(file: Path) -> Made:
    """Return the offloading of a library's file, which names CUDA, for this device."""
    source = file.read_text().replace("torch.cuda", "torch.softdevice")
    torch.softdevice.default_stream = torch.softdevice.current_stream
    names = ["torchao", "torchao.dtypes", "torchao.dtypes.nf4tensor"]
    names += ["torchtune", "torchtune.modules", "torchtune.utils", "torchtune.utils._logging"]
    for name in names:
        sys.modules.setdefault(name, _Absent(name))
    module = types.ModuleType(file.stem)
    exec(compile(source.replace('"cuda"', '"softdevice"'), file, "exec"), module.__dict__)
    step, manager = 0, None

    def make(model: nn.Module) -> AbstractContextManager[object]:
        nonlocal step, manager
        if step % STEPS == 0:  # a run begins
            manager = module.OffloadActivations()
            if hasattr(manager, "update_model_params"):
                manager.update_model_params(model)
        step += 1
        return manager

    make.__qualname__ = str(file)
    return make


STEPS = 3

if __name__ == "__main__":
    softdevice.load()
    model, batch = build(MODELS[sys.argv[2]])
    offloader = load(Path(sys.argv[1]))
    print(verify(model, batch, offloader, steps=STEPS, orders=14))
