"""How `ebbtide run` offloads the models that it finds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from ebbtide.budgeting.budget_size import parse_budget_bytes
from ebbtide.budgeting.fixed_plan import load_plan
from ebbtide.errors import PolicyError
from ebbtide.interface.arguments import check_budgeted
from ebbtide.layers.covering import covering_layers
from ebbtide.memory.host_limit import parse_host_budget
from ebbtide.memory.measured_memory import memory_of
from ebbtide.policy import DEFAULT_MIN_BYTES, ActivationPolicy, WeightPolicy
from ebbtide.stores.build import parse_store
from ebbtide.units import format_size

_LARGEST_BYTES = 2**60  # a share of it can be read before there is a device


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What `ebbtide.offload` is called with for each model.

    Args:
        activations: what is offloaded where there is no budget; of it, a budget takes `min_bytes`.
        budget: the most memory that training may take, as text; None: no budget.
        plan: file of a plan that is followed; None: none.
        store: where offloaded bytes go.
        host_budget: the most host memory to take, or all ranks of a host (``"96GiB/node"``), as
            text; None: all that is free.
        layers: patterns of the names of layers; empty: the model's repeated blocks.
        weights: whether the weights rest in host memory, too.
        trace: whether each step is recorded.

    Raises:
        PolicyError: one of them cannot be read, or they do not go together.
        OSError: the file of the plan cannot be read.
    """

    activations: ActivationPolicy = dataclasses.field(default_factory=ActivationPolicy)
    budget: str | None = None
    plan: Path | None = None
    store: str = "auto"
    host_budget: str | None = None
    layers: tuple[str, ...] = ()
    weights: bool = False
    trace: bool = False

    def __post_init__(self) -> None:
        if self.budget is not None and self.plan is not None:
            raise PolicyError("--budget makes a plan and --plan follows one; leave one of them out")
        parse_store(self.store)
        if self.host_budget is not None:
            parse_host_budget(self.host_budget, name="--host-budget")
        if self.budget is not None:
            parse_budget_bytes(self.budget, _LARGEST_BYTES)
        if self.plan is not None:
            load_plan(self.plan)
            if self.layers:
                raise PolicyError(
                    "a plan names the layers that it was made for; leave out --layers"
                )
        if self.is_planned and _but_for_sizes(self.activations) != ActivationPolicy():
            raise PolicyError(
                "a plan says itself what leaves; leave out --num-layers, --keep-last and --mode"
            )

    @property
    def is_planned(self) -> bool:
        """Whether a plan decides what is offloaded."""
        return self.budget is not None or self.plan is not None

    @property
    def min_bytes(self) -> int:
        """Smaller saved tensors stay on the device."""
        return int(self.activations.min_bytes)

    def arguments(self, model: nn.Module, *, frugal: bool) -> dict[str, Any]:
        """Return the arguments of `ebbtide.offload` for a model.

        Args:
            model: the model.
            frugal: whether the model follows no plan although there is a budget; all that can leave
                then leaves.
        """
        arguments: dict[str, Any] = {
            "activations": self.activations,
            "store": self.store,
            "host_budget": self.host_budget,
            "layers": list(self.layers) or None,
            "weights": WeightPolicy() if self.weights else None,
            "trace": self.trace,
        }
        if frugal:
            arguments["activations"] = check_budgeted(self.activations, None, given_twice=False)
            arguments["layers"] = list(self.layers) or covering_layers(model)
        elif self.is_planned:
            arguments.update(budget=self.budget, plan=self.plan)
        return arguments

    def budget_bytes(self, device: torch.device) -> int | None:
        """Return the budget in bytes; None without one."""
        if self.budget is None:
            return None
        return parse_budget_bytes(self.budget, memory_of(device).total_bytes)

    def describe(self) -> str:
        """Say in a line what is done where no plan decides."""
        policy = self.activations
        which = "activations" if policy.num_layers is None else f"{policy.num_layers} layers"
        if policy.keep_last:
            which += f" but the last {policy.keep_last} layers"
        what = {
            "offload": f"{which} of {format_size(self.min_bytes)} or more leave",
            "recompute": f"{which} computed again in backward",
            "recompute+offload": f"{which} computed again in backward, inputs leave",
        }[policy.mode]
        return what + (", and so do weights" if self.weights else "")


def _but_for_sizes(policy: ActivationPolicy) -> ActivationPolicy:
    return dataclasses.replace(policy, min_bytes=DEFAULT_MIN_BYTES)
