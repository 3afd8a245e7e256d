"""The modes that are compared: no offload, ebbtide's peers, and ebbtide in several configurations.

A mode changes only how a `Stack` keeps what autograd saves. Each mode runs in a process of its own,
so that it can neither hide nor cause errors of another.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
        name: name of the mode in tables.
        note: description in a few words.
    """

    def __init__(self, name: str, note: str) -> None:
        self.name = name
        self.note = note

    def missing(self, device: torch.device) -> str | None:  # noqa: ARG002
        """Return why the mode cannot run on this device; None if it can."""
        return None

    @abstractmethod
    def attach(self, model: Stack) -> Context:
        """Change the model and return a factory of the context in which every forward must run."""

    @property
    def settling_steps(self) -> int:
        """How many steps more than others the mode takes before its steps are alike."""
        return 0

    def figures(self) -> dict[str, Any]:
        """Return the mode's own figures of its last step."""
        return {}

    def fit_below(self, plain_peak_bytes: int) -> None:  # noqa: ARG002
        """Take the peak of a step without offload, of which budgets are shares."""
        return

    def move_from(self, min_bytes: int) -> None:  # noqa: ARG002
        """Set the size from which ebbtide moves tensors; other libraries keep their own."""
        return


@final
class Plain(AbstractMode):
    def attach(self, model: Stack) -> Context:  # noqa: ARG002
        return contextlib.nullcontext


@final
class SaveOnCpu(AbstractMode):
    """torch's own offload, which copies every saved tensor on the compute stream."""

    def attach(self, model: Stack) -> Context:
        pinned = next(model.parameters()).device.type != "cpu"
        return functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=pinned)


@final
class Checkpoint(AbstractMode):
    """Activation checkpointing, which recomputes every block in backward.

    Args:
        saved: mode that offloads the inputs of the blocks; None keeps them on the device.
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

    def move_from(self, min_bytes: int) -> None:
        if self._saved is not None:
            self._saved.move_from(min_bytes)


@final
class Library(AbstractMode):
    """The offloading context manager of another library.

    Args:
        module: module that has `get_act_offloading_ctx_manager`.
        only: type of the devices that the library is written for; None if any accelerator will do.
        arguments: arguments of that function after the model.
    """

    def __init__(
        self, name: str, note: str, module: str, *, only: str | None = None, **arguments: Any
    ) -> None:
        super().__init__(name, note)
        self._module = module
        self._only = only
        self._arguments = arguments

    def missing(self, device: torch.device) -> str | None:
        excuse = _cannot_import(self._module)
        if excuse is not None:
            return excuse
        if device.type == "cpu":
            return "needs an accelerator"
        if self._only not in (None, device.type):
            return f"works on {self._only} only"
        return None

    def attach(self, model: Stack) -> Context:
        module = importlib.import_module(self._module)
        # The libraries' own trainers also use one manager for all steps.
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
    """FSDP2 on one rank, with parameters, gradients and optimizer state on the host."""

    def missing(self, device: torch.device) -> str | None:
        if device.type == "cpu":
            return "needs an accelerator"
        if not torch.distributed.is_available():
            return "torch has no distributed package"
        if device.type not in torch.distributed.Backend.default_device_backend_map:
            return f"torch has no process group for {device.type}"
        return None

    def attach(self, model: Stack) -> Context:
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        if not torch.distributed.is_initialized():
            os.environ.setdefault("MASTER_ADDR", "localhost")
            os.environ.setdefault("MASTER_PORT", "29511")
            device_type = next(model.parameters()).device.type
            backend = torch.distributed.get_default_backend_for_device(device_type)
            backends = f"cpu:gloo,{device_type}:{backend}"
            torch.distributed.init_process_group(backends, rank=0, world_size=1)
        for block in model.blocks:
            fully_shard(block, offload_policy=CPUOffloadPolicy())
        fully_shard(model, offload_policy=CPUOffloadPolicy())
        return contextlib.nullcontext


@final
class Ebbtide(AbstractMode):
    """ebbtide in one configuration.

    Args:
        policy: policy of the activations.
        accelerator_store: store for bytes from an accelerator; bytes from a CPU go to disk.
        host_budget: host memory that `accelerator_store` may use.
        weights: policy of the weights; None keeps them on the device.
    """

    def __init__(
        self,
        name: str,
        note: str,
        policy: ebbtide.ActivationPolicy,
        accelerator_store: str = "auto",
        host_budget: str | None = None,
        weights: ebbtide.WeightPolicy | None = None,
    ) -> None:
        super().__init__(name, note)
        self._policy = policy
        self._weights = weights
        self._store = accelerator_store
        self._budget = host_budget
        self._min_bytes: int | None = None
        self._handle: ebbtide.api.OffloadHandle | None = None

    def move_from(self, min_bytes: int) -> None:
        self._min_bytes = min_bytes

    def attach(self, model: Stack) -> Context:
        on_cpu = next(model.parameters()).device.type == "cpu"
        self._handle = ebbtide.offload(
            model,
            activations=_with_min_bytes(self._policy, self._min_bytes),
            weights=self._weights,
            layers=list(model.blocks),
            store="auto" if on_cpu else self._store,
            host_budget=None if on_cpu else self._budget,
        )
        return contextlib.nullcontext

    def figures(self) -> dict[str, Any]:
        return _figures_of(self._handle)


def _figures_of(handle: ebbtide.api.OffloadHandle | None) -> dict[str, Any]:
    assert handle is not None
    stats = handle.stats
    return {name: getattr(stats, name) for name in stats.__dataclass_fields__}


def _with_min_bytes(
    policy: ebbtide.ActivationPolicy, min_bytes: int | None
) -> ebbtide.ActivationPolicy:
    return policy if min_bytes is None else dataclasses.replace(policy, min_bytes=min_bytes)


@final
class Planned(AbstractMode):
    """ebbtide with a budget, which decides about activations, weights and optimizer state.

    Args:
        percent: the budget in percent of the peak of a step without offload; None: what
            `ebbtide.offload` does by itself.
    """

    def __init__(self, name: str, note: str, percent: int | None = None) -> None:
        super().__init__(name, note)
        self._percent = percent
        self._budget_bytes: int | None = None
        self._handle: ebbtide.api.OffloadHandle | None = None

    def missing(self, device: torch.device) -> str | None:
        if device.type == "cpu":
            return "needs an accelerator"
        if self._percent is not None and self._budget_bytes is None:
            return "the peak without offload, of which the budget is a share, is not known"
        return None

    @property
    def settling_steps(self) -> int:
        return 5

    def fit_below(self, plain_peak_bytes: int) -> None:
        if self._percent is not None:
            self._budget_bytes = self._percent * plain_peak_bytes // 100

    def attach(self, model: Stack) -> Context:
        self._handle = ebbtide.offload(model, budget=self._budget_bytes)
        return contextlib.nullcontext

    def figures(self) -> dict[str, Any]:
        assert self._handle is not None
        about = {
            "budget_bytes": self._budget_bytes,
            "handle": repr(self._handle),
            "plan": str(self._handle.plan).splitlines(),
        }
        return about | _figures_of(self._handle)


def _cannot_import(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # such as a package that does not work with this torch
        return f"{module} cannot be imported ({type(error).__name__}: {error})"
    return None


def all_modes() -> dict[str, AbstractMode]:
    """Return new objects of every mode by name, the baseline first; modes keep state."""
    modes: tuple[AbstractMode, ...] = (
        Plain("none", "nothing is offloaded"),
        SaveOnCpu("save_on_cpu", "torch.autograd.graph.save_on_cpu(pin_memory=True)"),
        Checkpoint("checkpoint", "torch.utils.checkpoint on every block, not reentrant"),
        Checkpoint(
            "checkpoint+save_on_cpu",
            "checkpoint on every block, inside save_on_cpu",
            SaveOnCpu("save_on_cpu", ""),
        ),
        Library(
            "torchtune",
            "OffloadActivations with streams",
            "torchtune.training",
            only="cuda",
            enable_activation_offloading=True,
        ),
        # TRL's warning about a missing head needs accelerate's state, which only TRL's trainers
        # create.
        Library(
            "trl",
            "OffloadActivations with streams",
            "trl.models.activation_offloading",
            warn_if_no_head=False,
        ),
        MegatronFineGrained("megatron", "fine-grained activation offload"),
        Fsdp2Offload("fsdp2", "fully_shard on one rank with CPUOffloadPolicy"),
        Ebbtide("ebbtide", "everything whose offload pays", ebbtide.ActivationPolicy()),
        Ebbtide("ebbtide-keep-1", "all layers but the last", ebbtide.ActivationPolicy(keep_last=1)),
        Checkpoint(
            "checkpoint+ebbtide",
            "checkpoint on every block, inputs offloaded",
            Ebbtide("", "", ebbtide.ActivationPolicy()),
        ),
        Ebbtide(
            "ebbtide-tiered",
            "host memory up to 4 GiB, disk below",
            ebbtide.ActivationPolicy(),
            "tiered",
            "4GiB",
        ),
        Ebbtide(
            "ebbtide-weights",
            "activations offloaded; weights, gradients and optimizer state on the host",
            ebbtide.ActivationPolicy(),
            weights=ebbtide.WeightPolicy(),
        ),
        Planned("ebbtide-default", "offload(model): what fits stays"),
        *(
            Planned(f"ebbtide-{percent}%", f"a budget of {percent}% of the peak of `none`", percent)
            for percent in (80, 60, 40)
        ),
    )
    return {mode.name: mode for mode in modes}
