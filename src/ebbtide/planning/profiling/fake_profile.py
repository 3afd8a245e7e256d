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
  has resident then: see [Note: positions] in `planning.step_profile`. That of a recomputed layer's
  passes is found in a second step, in which all layers that may be recomputed are.

Not modelled: workspaces inside operators, rounding by the allocator, what a fused optimizer
allocates, storages that are saved again after they were changed in place, packing, recipes that do
not give the same bits here, views that are gathered before they are offloaded (their storage counts
whole), layers inside a reentrant checkpoint or another `torch.autograd.Function`, whose backward
counts with what comes before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from ebbtide.errors import PolicyError
from ebbtide.interface.arguments import check_model, check_modules, parse_number, refuse
from ebbtide.planning.hardware import Hardware
from ebbtide.planning.profiling.fake_recomputation import recompute_calls
from ebbtide.planning.profiling.fake_step import Batch, FakeStep, Loss
from ebbtide.planning.profiling.profile_assembly import StepAssembly, StepFindings
from ebbtide.planning.profiling.recomputed_passes import with_recomputation, without_recomputation
from ebbtide.planning.profiling.saved_storages import SavedStorages, unpack, without_graph
from ebbtide.planning.step_profile import StepProfile
from ebbtide.policy import DEFAULT_MIN_BYTES


def profile_with_fake_tensors(
    model: nn.Module,
    batch: Batch,
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
        batch: what the model is called with: one tensor, a sequence of positional arguments, or a
            mapping of arguments by name. Only shapes and types matter.
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
    step = FakeStep(model, batch, hardware)
    saved = SavedStorages(
        step.ledger, step.device, step.state, parse_number("min_bytes", min_bytes)
    )
    saved.know_frozen(step.model.parameters())
    step.calls.listener = saved.enter
    step.calls.hook(step.model, names)
    step.run(loss, saved.pack, unpack)
    if not step.calls.calls:
        raise PolicyError("the model called none of its layers; name modules that it calls")
    found = StepFindings(
        ledger=step.ledger,
        saved=saved,
        calls=step.calls.calls,
        changing=step.calls.changing,
        seconds=step.watch.seconds,
        owners=step.watch.owners,
        parameters={step.ledger.key_of(each) for each in step.model.parameters()},
        gradients=step.gradients,
        inputs=step.inputs,
        between=between,
    )
    assembly = StepAssembly(found, hardware, optimizer_states)
    profile = dataclasses.replace(assembly.profile(), min_bytes=saved.min_bytes)
    again = FakeStep(model, batch, hardware)
    again.calls.hook(again.model, names)
    recompute_calls(again.model, names, again.calls, assembly.recomputable)
    try:
        again.run(loss, without_graph, unpack)
    except PolicyError:  # what cannot run again here is not planned to
        return without_recomputation(profile)
    passes = assembly.recomputed_passes(again.peaks(), again.watch.seconds)
    return with_recomputation(profile, hardware, passes)


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
