"""Profiles a training step with fake tensors: no memory, no accelerator, no arithmetic.

[Note: fake profile] The step runs on tensors without values. Operators are seen one by one, so the
bytes that autograd saves and the bytes that are alive at any time are those of a real step.
Seconds are estimates: see [Note: roofline] in `operator_costs`.

- What is saved outside layers, or too small to be offloaded, is no layer's. It counts as working
  memory of all passes in which it is alive.
- Work after one layer and before the next counts with the layer before it.
- A parameter belongs to the layer whose call reads it first; others count as fixed.
- Gradients count as there throughout the step.
- A pass's working memory is the peak of what is alive in it, less what a plan that keeps everything
  has resident then: see [Note: positions] in `planning.step_profile`.

Not modelled: workspaces inside operators, rounding by the allocator, what a fused optimizer
allocates, storages that are saved again after they were changed in place, packing, recipes that do
not give the same bits here, views that are gathered before they are offloaded (their storage counts
whole), layers inside a reentrant checkpoint or another `torch.autograd.Function`, whose backward
counts with what comes before it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

from ebbtide.errors import PolicyError
from ebbtide.interface.arguments import check_model, check_modules, parse_number, refuse
from ebbtide.planning.hardware import Hardware
from ebbtide.planning.profiling.fake_copies import FakeCopies
from ebbtide.planning.profiling.layer_calls import LayerCalls
from ebbtide.planning.profiling.operator_costs import OperatorCosts
from ebbtide.planning.profiling.operator_watch import OperatorWatch
from ebbtide.planning.profiling.profile_assembly import StepFindings, assemble
from ebbtide.planning.profiling.saved_storages import SavedStorages, unpack
from ebbtide.planning.profiling.storage_ledger import StorageLedger
from ebbtide.planning.step_profile import StepProfile
from ebbtide.policy import DEFAULT_MIN_BYTES
from ebbtide.tensors.random_numbers import note_random_numbers


class CallArguments(NamedTuple):
    """All arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Loss = Callable[[Any], Tensor]
"""Computes the loss from what the model returns."""


def profile_with_fake_tensors(
    model: nn.Module,
    batch: Sequence[Any] | Mapping[str, Any] | Tensor,
    hardware: Hardware,
    *,
    layers: Iterable[nn.Module],
    loss: Loss | None = None,
    min_bytes: int = DEFAULT_MIN_BYTES,
    optimizer_states: int = 2,
    between: bool = False,
) -> StepProfile:
    """Profile one training step of a model without running it. See [Note: fake profile].

    The model and its gradients stay as they are, and so do random number generators. The model may
    be on the meta device; it is then taken to be on the CPU.

    Args:
        model: the model, in training mode if its training is meant.
        batch: what the model is called with: one tensor, a sequence of positional arguments, a
            mapping of arguments by name, or `CallArguments`. Only shapes and types matter.
        hardware: the machine whose seconds are estimated.
        layers: the modules whose calls are layers, such as
            ``ebbtide.layers.search.find_layers(model).modules``.
        loss: computes the loss from what the model returns; may use tensors that it closes over.
            None means the attribute ``loss`` of what the model returns, or else the sum of all
            floating-point tensors in it.
        min_bytes: the same as the policy's; smaller storages are not numbered.
        optimizer_states: tensors of the weights' size that the optimizer keeps: 2 for Adam, 1 for
            SGD with momentum, 0 for plain SGD.
        between: whether work between layers that saves something is a layer of its own. Otherwise
            what it saves is working memory of the passes in which it is alive.

    Returns:
        The profile.

    Raises:
        PolicyError: an argument is wrong, no layer was called, or the model cannot run with fake
            tensors because its code looks at values.
    """
    # Many arguments: a step has that many parts, and most of them have defaults.
    names = _layer_names(model, hardware, layers)
    optimizer_states = parse_number("optimizer_states", optimizer_states)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = device_of(model)
    copies = FakeCopies(mode, device)
    with explained(model):
        fake, arguments = copies.model(model), copies.batch(batch)
    state = [*fake.parameters(), *fake.buffers()]
    ledger = StorageLedger()
    inputs = {
        ledger.key_of(leaf) for leaf in tree_leaves((state, arguments)) if isinstance(leaf, Tensor)
    }
    kept = {ledger.key_of(tensor) for tensor in state}
    saved = SavedStorages(ledger, device, kept, parse_number("min_bytes", min_bytes))
    saved.know_frozen(fake.parameters())
    calls = LayerCalls(ledger, saved.enter)
    calls.hook(fake, names)
    watch = OperatorWatch(ledger, calls, OperatorCosts(hardware), kept)
    hooks = torch.autograd.graph.saved_tensors_hooks(saved.pack, unpack)
    with _numbers_put_back(), torch.enable_grad(), explained(model), mode, watch:
        with hooks:
            value, _output = compute_loss(fake, arguments, loss)
        calls.close()
        run_backward(value)
    if not calls.calls:
        raise PolicyError("the model called none of its layers; name modules that it calls")
    found = StepFindings(
        ledger=ledger,
        saved=saved,
        calls=calls.calls,
        changing=calls.changing,
        seconds=watch.seconds,
        owners=watch.owners,
        parameters={ledger.key_of(each) for each in fake.parameters()},
        gradients=[
            (ledger.key_of(each), ledger.key_of(each.grad))
            for each in fake.parameters()
            if each.grad is not None
        ],
        inputs=inputs,
        between=between,
    )
    return assemble(found, hardware, optimizer_states)


@contextlib.contextmanager
def _numbers_put_back() -> Iterator[None]:
    """Leave the states of the host's random numbers as they were before the block."""
    put_back = note_random_numbers(())
    try:
        yield
    finally:
        put_back()


def _layer_names(model: nn.Module, hardware: Hardware, layers: Iterable[nn.Module]) -> list[str]:
    """Return the names of the layers, in model order.

    Raises:
        PolicyError: an argument is wrong.
    """
    check_model(model)
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise PolicyError(  # a copy of it shares its parameters
            f"{type(model).__name__} contains a script module, which cannot be copied to run with "
            f"fake tensors; plan for the model before torch.jit scripts or traces a part of it"
        )
    if not isinstance(hardware, Hardware):
        refuse("hardware", "a Hardware", hardware, 'such as Hardware.named("h100")')
    layers = [*layers] if isinstance(layers, Iterator) else layers
    check_modules("layers", layers)
    wanted = {id(module) for module in layers}
    names = [name for name, module in model.named_modules() if id(module) in wanted]
    if not wanted or len(names) < len(wanted):
        missing = len(wanted) - len(names)
        raise PolicyError(
            f"layers must name modules of the model; got {len(wanted)}, of which {missing} are not "
            f"part of it"
        )
    return names


def device_of(model: nn.Module) -> torch.device:
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


def compute_loss(model: nn.Module, arguments: Any, loss: Loss | None) -> tuple[Any, Any]:
    """Run a model's forward and its loss.

    Returns:
        The loss, and the model's output, which training loops hold during backward.
    """
    output = _call(model, arguments)
    return (_default_loss(output) if loss is None else loss(output)), output


def _call(model: nn.Module, arguments: Any) -> Any:
    if isinstance(arguments, CallArguments):
        return model(*arguments.args, **arguments.kwargs)
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


def run_backward(value: Any) -> None:
    """Run the backward of a loss.

    Raises:
        PolicyError: it is not one number that depends on parameters.
    """
    if not isinstance(value, Tensor) or not value.requires_grad or value.numel() != 1:
        refuse("what loss returns", "one number that depends on the parameters", value)
    value.backward()  # type: ignore[no-untyped-call]


def profile_activations(
    model: nn.Module,
    layers: Sequence[nn.Module],
    call: CallArguments,
    hardware: Hardware,
    min_bytes: int,
) -> StepProfile:
    """Profile a step without its parameters, which are in use whatever the plan is.

    Args:
        model: the model.
        layers: the modules whose calls are its layers.
        call: what the model is called with.
        hardware: the machine whose seconds are estimated.
        min_bytes: smaller storages stay where they are.

    Raises:
        PolicyError: the model cannot run with fake tensors.
    """
    profile = profile_with_fake_tensors(
        model,
        call,
        hardware,
        layers=layers,
        min_bytes=min_bytes,
        optimizer_states=0,
        between=True,
    )
    without = tuple(
        dataclasses.replace(each, weight_bytes=0, gradient_bytes=0, host_update_s=0.0)
        for each in profile.layers
    )
    return dataclasses.replace(profile, layers=without)
