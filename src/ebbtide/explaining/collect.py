"""Collects the evidence for an explanation from an offload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from ebbtide.engine import Engine
from ebbtide.explaining.evidence import Evidence
from ebbtide.hooks.forward import OffloadedForward
from ebbtide.memory.measured_memory import memory_of
from ebbtide.planning.plan import Plan
from ebbtide.tracing.step_memory import Owner


class AbstractPlanned(Protocol):
    """A plan that an offload follows."""

    @property
    def plan(self) -> Plan:
        """What becomes of each layer, and the predicted peak."""


def collect_evidence(
    engine: Engine,
    forward: OffloadedForward | None,
    layers: Sequence[str],
    planned: AbstractPlanned | None,
) -> Evidence:
    """Collect what is known of the last finished step.

    Args:
        engine: the parts of the offload.
        forward: the offloaded forward.
        layers: names of the layers.
        planned: the plan that is followed, if there is one.
    """
    stats = engine.stats
    memory = engine.trace.memory if engine.is_traced else None
    account = engine.transfers.account
    held = account.watch.owners.held if account.watch is not None else None
    seen = memory is not None and any(Owner.REFERENCED in each.owned for each in memory.samples)
    on_cpu = engine.torch_device.type == "cpu"
    counts = engine.transfers.device.has_memory
    moved = stats.offloaded_bytes + stats.rebuilt_bytes + stats.recomputed_bytes
    return Evidence(
        stats=stats,
        num_steps=engine.num_steps,
        inspection=engine.inspect(),
        memory=memory,
        policy=engine.policy,
        min_bytes=engine.placement.min_bytes,
        follows_schedule=engine.schedule is not None,
        wanted_again=len(engine.activations.wanted_again),
        num_unrecorded=0 if forward is None else forward.num_unrecorded,
        replaced_by="" if forward is None else forward.replaced_by,
        compiled=tuple(_compiled_around(engine.modules, layers)),
        on_cpu=on_cpu,
        total_bytes=memory_of(engine.torch_device).total_bytes if counts else 0,
        held=held if held is not None and seen else (),
        offloads_weights=engine.weights is not None,
        plan_keeps_all=planned is not None and not moved,
        plan_peak_bytes=None if planned is None else planned.plan.peak_bytes,
    )


def _compiled_around(modules: Sequence[nn.Module], layers: Sequence[str]) -> Iterator[str]:
    """Yield the names of compiled modules that contain layers, and are none themselves."""
    for model in modules:
        for name, module in model.named_modules():
            compiled = getattr(module, "_compiled_call_impl", None) is not None
            inside = [layer for layer in layers if layer.startswith(f"{name}." if name else "")]
            if (compiled or _is_optimized(module)) and any(layer != name for layer in inside):
                yield name or "the model"


def _is_optimized(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` has returned a module."""
    return type(module).__name__ == "OptimizedModule" and isinstance(
        getattr(module, "_orig_mod", None), torch.nn.Module
    )
