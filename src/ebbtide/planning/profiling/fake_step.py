"""One training step of a copy of a model with fake tensors, whose storages are followed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

from ebbtide.errors import PolicyError
from ebbtide.interface.arguments import refuse
from ebbtide.planning.hardware import Hardware
from ebbtide.planning.profiling.fake_copies import FakeCopies
from ebbtide.planning.profiling.layer_calls import LayerCalls
from ebbtide.planning.profiling.operator_costs import OperatorCosts
from ebbtide.planning.profiling.operator_watch import OperatorWatch
from ebbtide.planning.profiling.storage_ledger import StorageLedger
from ebbtide.tensors.random_numbers import note_random_numbers

Batch = Sequence[Any] | Mapping[str, Any] | Tensor
"""What a model is called with."""

Loss = Callable[[Any], Tensor]
"""Computes the loss from what the model returns."""


@final
class FakeStep:
    """A step that runs once, with fake tensors, on a copy of a model.

    The model and its gradients stay as they are, and so do random number generators.

    Args:
        model: the model; it may be on the meta device.
        batch: what the model is called with.
        hardware: the machine whose seconds are estimated.

    Attributes:
        model: the copy.
        device: the device that the model is on, or is taken to be on.
        ledger: follows the storages.
        calls: numbers the calls of layers.
        watch: sees the operators.
        state: keys of the storages of parameters and buffers.
        inputs: keys of all storages that there were before the step: those and the batch.

    Raises:
        PolicyError: the model cannot be copied.
    """

    def __init__(self, model: nn.Module, batch: Batch, hardware: Hardware) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._trained = model
        self.device = _device_of(model)
        copies = FakeCopies(self._mode, self.device)
        with explained(model):
            self.model, self._arguments = copies.model(model), copies.batch(batch)
        self.ledger = StorageLedger()
        tensors = [*self.model.parameters(), *self.model.buffers()]
        leaves = tree_leaves((tensors, self._arguments))
        self.inputs = {self.ledger.key_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        self.state = {self.ledger.key_of(tensor) for tensor in tensors}
        self.calls = LayerCalls(self.ledger)
        self.watch = OperatorWatch(self.ledger, self.calls, OperatorCosts(hardware), self.state)

    def run(
        self, loss: Loss | None, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> None:
        """Run the forward, the loss and the backward.

        Args:
            loss: computes the loss from what the model returns.
            pack: what becomes of each tensor that autograd saves.
            unpack: returns what was packed.

        Raises:
            PolicyError: the model cannot run with fake tensors.
        """
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        with (
            _numbers_put_back(),
            torch.enable_grad(),
            explained(self._trained),
            self._mode,
            self.watch,
        ):
            with hooks:
                # Training loops hold the output during backward.
                output = _call(self.model, self._arguments)
                value = _default_loss(output) if loss is None else loss(output)
            self.calls.close()
            _run_backward(value)

    @property
    def gradients(self) -> list[tuple[int, int]]:
        """Keys of the storages of each parameter that has a gradient, and of the gradient."""
        key_of = self.ledger.key_of
        trained = (each for each in self.model.parameters() if each.grad is not None)
        return [(key_of(each), key_of(each.grad)) for each in trained if each.grad is not None]

    def peaks(self) -> dict[Any, int]:
        """Return the most bytes alive in each part of the step, but for gradients of parameters."""
        return self.ledger.peaks({gradient for _, gradient in self.gradients})


@contextlib.contextmanager
def _numbers_put_back() -> Iterator[None]:
    """Leave the states of the host's random numbers as they were before the block."""
    put_back = note_random_numbers(())
    try:
        yield
    finally:
        put_back()


def _device_of(model: nn.Module) -> torch.device:
    """Return the device that a model's tensors are on, or are taken to be on."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")


@contextlib.contextmanager
def explained(model: nn.Module) -> Iterator[None]:
    """Turn what goes wrong while the model runs into a `PolicyError`."""
    try:
        yield
    except PolicyError:
        raise
    except Exception as error:
        raise PolicyError(
            f"{type(model).__name__} could not be trained for a step with fake tensors, which have "
            f"no values ({type(error).__name__}: {error}). If the step runs with real tensors, the "
            f"model's code looks at values: ebbtide.offload(model, budget=...) plans such a model "
            f"from its first training step"
        ) from error


def _call(model: nn.Module, arguments: Any) -> Any:
    if isinstance(arguments, Mapping):
        return model(**arguments)
    return model(arguments) if isinstance(arguments, Tensor) else model(*arguments)


def _default_loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    sums = [
        leaf.sum()
        for leaf in tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not sums:
        raise PolicyError("the model returns no tensor that depends on a parameter; give loss=")
    return torch.stack([each.real for each in sums]).sum() if len(sums) > 1 else sums[0].real


def _run_backward(value: Any) -> None:
    """Run the backward of a loss.

    Raises:
        PolicyError: it is not one number that depends on parameters.
    """
    if not isinstance(value, Tensor) or not value.requires_grad or value.numel() != 1:
        refuse("what loss returns", "one number that depends on the parameters", value)
    value.backward()  # type: ignore[no-untyped-call]
