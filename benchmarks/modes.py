"""What is compared: no offload, its peers, and ebbtide in each of its modes.

A mode changes how a `Stack` keeps what autograd saves, and nothing else. Each runs in a process of
its own, so no mode can hide or cause another's errors.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, final

import torch
from torch.utils.checkpoint import checkpoint

import ebbtide
from benchmarks.models import Stack

Context = Callable[[], contextlib.AbstractContextManager[Any]]


class AbstractMode(ABC):
    """One way to train.

    Args:
        name: in tables.
        note: what it is, in a few words.
    """

    def __init__(self, name: str, note: str) -> None:
        self.name = name
        self.note = note

    def missing(self, device: torch.device) -> str | None:  # noqa: ARG002
        """Why the mode cannot run here; None if it can."""
        return None

    @abstractmethod
    def attach(self, model: Stack) -> Context:
        """Change the model; returns what every forward runs in."""

    def figures(self) -> dict[str, Any]:
        """What the mode knows of its last step."""
        return {}


@final
class Plain(AbstractMode):
    def attach(self, model: Stack) -> Context:  # noqa: ARG002
        return contextlib.nullcontext


@final
class SaveOnCpu(AbstractMode):
    """torch's own: every save is copied on the compute stream."""

    def attach(self, model: Stack) -> Context:
        pinned = next(model.parameters()).device.type != "cpu"
        return functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=pinned)


@final
class Checkpoint(AbstractMode):
    """Every block is computed again in backward.

    Args:
        saved: what the inputs of blocks are saved with; None: they stay.
    """

    def __init__(self, name: str, note: str, saved: AbstractMode | None = None) -> None:
        super().__init__(name, note)
        self._saved = saved

    def attach(self, model: Stack) -> Context:
        context = contextlib.nullcontext if self._saved is None else self._saved.attach(model)
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        return context

    def figures(self) -> dict[str, Any]:
        return {} if self._saved is None else self._saved.figures()


@final
class Library(AbstractMode):
    """A context manager of another library.

    Args:
        module: that has `get_act_offloading_ctx_manager`.
        arguments: of that function, after the model.
    """

    def __init__(self, name: str, note: str, module: str, **arguments: Any) -> None:
        super().__init__(name, note)
        self._module = module
        self._arguments = arguments

    def missing(self, device: torch.device) -> str | None:
        excuse = _cannot_import(self._module)
        if excuse is not None:
            return excuse
        return None if device.type == "cuda" else "needs an accelerator"

    def attach(self, model: Stack) -> Context:
        module = importlib.import_module(self._module)
        # One manager for all steps, as their trainers have.
        manager = module.get_act_offloading_ctx_manager(model, **self._arguments)
        return lambda: manager


@final
class MegatronFineGrained(AbstractMode):
    """Megatron-core's fine-grained offload, which works inside its own layers only."""

    _MODULE = "megatron.core.pipeline_parallel.fine_grained_activation_offload"

    def missing(self, device: torch.device) -> str | None:  # noqa: ARG002
        own = "works inside Megatron-core's own layers only; this model has none"
        return _cannot_import(self._MODULE) or own

    def attach(self, model: Stack) -> Context:
        raise NotImplementedError(self.missing(next(model.parameters()).device))


@final
class Fsdp2Offload(AbstractMode):
    """FSDP2 on one rank: parameters, gradients and optimizer state rest on the host."""

    def missing(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "needs an accelerator"
        return None if torch.distributed.is_available() else "torch has no distributed package"

    def attach(self, model: Stack) -> Context:
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        if not torch.distributed.is_initialized():
            os.environ.setdefault("MASTER_ADDR", "localhost")
            os.environ.setdefault("MASTER_PORT", "29511")
            torch.distributed.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
        for block in model.blocks:
            fully_shard(block, offload_policy=CPUOffloadPolicy())
        fully_shard(model, offload_policy=CPUOffloadPolicy())
        return contextlib.nullcontext


@final
class Ebbtide(AbstractMode):
    """ebbtide.

    Args:
        policy: of activations.
        accelerator_store: where bytes go from an accelerator; from a CPU they go to disk.
        host_budget: for `accelerator_store`.
        weights: of weights; None: they stay.
    """

    def __init__(
        self,
        name: str,
        note: str,
        policy: ebbtide.ActivationPolicy | None = None,
        accelerator_store: str = "auto",
        host_budget: str | None = None,
        weights: ebbtide.WeightPolicy | None = None,
    ) -> None:
        super().__init__(name, note)
        self._policy = policy
        self._weights = weights
        self._store = accelerator_store
        self._budget = host_budget
        self._handle: ebbtide.api.OffloadHandle | None = None

    def attach(self, model: Stack) -> Context:
        on_cpu = next(model.parameters()).device.type == "cpu"
        self._handle = ebbtide.offload(
            model,
            activations=self._policy,
            weights=self._weights,
            layers=list(model.blocks),
            store="auto" if on_cpu else self._store,
            host_budget=None if on_cpu else self._budget,
        )
        return contextlib.nullcontext

    def figures(self) -> dict[str, Any]:
        assert self._handle is not None
        stats = self._handle.stats
        return {name: getattr(stats, name) for name in stats.__dataclass_fields__}


def _cannot_import(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # a package that is there, and not made for this torch
        return f"{module} cannot be imported ({type(error).__name__}: {error})"
    return None


def all_modes() -> dict[str, AbstractMode]:
    """Every mode by name, baseline first; new ones each time, for they keep state."""
    modes: tuple[AbstractMode, ...] = (
        Plain("none", "nothing is offloaded"),
        SaveOnCpu("save_on_cpu", "torch.autograd.graph.save_on_cpu(pin_memory=True)"),
        Checkpoint("checkpoint", "torch.utils.checkpoint on every block, not reentrant"),
        Checkpoint(
            "checkpoint+save_on_cpu",
            "the same inside save_on_cpu",
            SaveOnCpu("save_on_cpu", ""),
        ),
        Library(
            "torchtune",
            "OffloadActivations with streams",
            "torchtune.training",
            enable_activation_offloading=True,
        ),
        # Its warning about a missing head wants accelerate's state, which only its trainers make.
        Library(
            "trl",
            "OffloadActivations with streams",
            "trl.models.activation_offloading",
            warn_if_no_head=False,
        ),
        MegatronFineGrained("megatron", "fine-grained activation offload"),
        Fsdp2Offload("fsdp2", "fully_shard on one rank with CPUOffloadPolicy"),
        Ebbtide("ebbtide", "all that pays"),
        Ebbtide("ebbtide-keep-1", "all layers but the last", ebbtide.ActivationPolicy(keep_last=1)),
        Checkpoint(
            "checkpoint+ebbtide", "checkpoint on every block, inputs offloaded", Ebbtide("", "")
        ),
        Ebbtide("ebbtide-tiered", "host memory up to 4 GiB, disk below", None, "tiered", "4GiB"),
        Ebbtide(
            "ebbtide-weights",
            "activations, and weights, gradients and optimizer on the host",
            ebbtide.ActivationPolicy(),
            weights=ebbtide.WeightPolicy(),
        ),
    )
    return {mode.name: mode for mode in modes}
