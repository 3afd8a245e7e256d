"""Megatron's settings for CPU offloading, for any model with repeated blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import nn

from ebbtide.api import OffloadHandle, offload
from ebbtide.errors import PolicyError
from ebbtide.hooks.layers import find_layers, match_layers
from ebbtide.policy import ActivationPolicy, WeightPolicy


@final
@dataclass(frozen=True)
class CPUOffloadingConfig:
    """The settings of Megatron's `ModelParallelConfig` that begin with ``cpu_offloading``.

    ::

        config = CPUOffloadingConfig(cpu_offloading=True, cpu_offloading_num_layers=16)
        handle = config.apply(model)

    It works together with activation recomputation (a recomputed layer saves nothing itself; its
    input, saved around it, stays), and the stages of a pipeline can each be given their own (for
    their activations, see `ebbtide.integrations.pipelining`).

    Args:
        cpu_offloading: False: `apply` offloads nothing.
        cpu_offloading_num_layers: of the first this many layers; from 0 to the number of layers
            less one.
        cpu_offloading_activations: offload what they save for backward.
        cpu_offloading_weights: let their weights rest on the host, and their gradients.
        cpu_offloading_double_buffering: bring the next layer's weights while one works.
        cpu_offloading_retain_pinned_cpu_buffers: without effect: host memory is reused from step
            to step anyway.

    Raises:
        PolicyError: neither activations nor weights are to be offloaded, or a value is of the
            wrong kind.

    Source: Megatron Core, `megatron/core/model_parallel_config.py`, and the checks of
        `megatron/core/transformer/transformer_config.py`.
    """

    cpu_offloading: bool = False
    cpu_offloading_num_layers: int = 0
    cpu_offloading_activations: bool = True
    cpu_offloading_weights: bool = False
    cpu_offloading_double_buffering: bool = False
    cpu_offloading_retain_pinned_cpu_buffers: bool = False

    def __post_init__(self) -> None:
        count = self.cpu_offloading_num_layers
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise PolicyError(
                f"cpu_offloading_num_layers must be a whole number, 0 or more, got {count!r}"
            )
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if name != "cpu_offloading_num_layers" and not isinstance(value, bool):
                raise PolicyError(f"{name} must be True or False, got {value!r}")
        nothing = not (self.cpu_offloading_activations or self.cpu_offloading_weights)
        if self.cpu_offloading and nothing:
            raise PolicyError(
                "cpu_offloading=True offloads activations, weights, or both; set "
                "cpu_offloading_activations or cpu_offloading_weights"
            )

    def apply(
        self,
        model: nn.Module,
        *,
        layers: Sequence[nn.Module | str] | None = None,
        store: str = "auto",
        host_budget: int | str | None = None,
        trace: bool = False,
    ) -> OffloadHandle:
        """Offload a model as the settings say.

        Args:
            model: any model with repeated blocks.
            layers: as for `ebbtide.offload`; patterns such as ``"layers.*.mlp"`` choose by name.
            store: as for `ebbtide.offload`.
            host_budget: as for `ebbtide.offload`.
            trace: as for `ebbtide.offload`.

        Returns:
            As `ebbtide.offload` does.

        Raises:
            PolicyError: the model has too few layers for ``cpu_offloading_num_layers``, or the
                settings do not fit it. The model is as it was.
        """
        count = self.cpu_offloading_num_layers if self.cpu_offloading else 0
        found = find_layers(model) if layers is None else match_layers(model, layers)
        num_layers = len(found.modules) if found.num_calls is None else found.num_calls
        if self.cpu_offloading and count >= max(num_layers, 1):
            raise PolicyError(
                f"cpu_offloading_num_layers={count} must be less than the number of layers, which "
                f"is {num_layers} ({', '.join(found.names[:3])}, ...): the last one's backward "
                f"comes at once"
            )
        moves = self.cpu_offloading_activations and count > 0
        activations = ActivationPolicy(num_layers=count if moves else 0, rebuild=moves)
        weights = None
        if self.cpu_offloading_weights and count:
            double_buffering = self.cpu_offloading_double_buffering
            weights = WeightPolicy(num_layers=count, double_buffering=double_buffering)
        return offload(
            model,
            activations=activations,
            weights=weights,
            layers=layers,
            store=store,
            host_budget=host_budget,
            trace=trace,
        )
