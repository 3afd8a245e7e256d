"""Megatron's settings for CPU offloading, applied to any model with repeated blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import nn

from ebbtide.api import offload
from ebbtide.errors import PolicyError
from ebbtide.handle import OffloadHandle
from ebbtide.policy import ActivationPolicy, WeightPolicy, check_model, check_switch, parse_number
from ebbtide.runtime.layers import find_layers, match_layers


@final
@dataclass(frozen=True)
class CPUOffloadingConfig:
    """The settings of Megatron's `ModelParallelConfig` that begin with ``cpu_offloading``.

    ::

        config = CPUOffloadingConfig(cpu_offloading=True, cpu_offloading_num_layers=16)
        handle = config.apply(model)

    Offloading works together with activation recomputation: a recomputed layer saves nothing
    itself, and its input, which is saved outside the layer, stays on the device. Each stage of a
    pipeline can have its own settings (to schedule the activations of stages, see
    `ebbtide.interop.pipelining`).

    Args:
        cpu_offloading: whether `apply` offloads anything.
        cpu_offloading_num_layers: number of layers to offload, counted from the first; at most the
            number of layers less one.
        cpu_offloading_activations: whether to offload the activations that these layers save for
            backward.
        cpu_offloading_weights: whether to keep the weights and gradients of these layers on the
            host.
        cpu_offloading_double_buffering: whether to load the next layer's weights while a layer
            computes.
        cpu_offloading_retain_pinned_cpu_buffers: has no effect, because host memory is always
            reused from step to step.

    Raises:
        PolicyError: offloading is on for neither activations nor weights, or a value has the wrong
            type.

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
        parse_number("cpu_offloading_num_layers", self.cpu_offloading_num_layers)
        for name in self.__dataclass_fields__:
            if name != "cpu_offloading_num_layers":
                check_switch(name, getattr(self, name))
        nothing = not (self.cpu_offloading_activations or self.cpu_offloading_weights)
        if self.cpu_offloading and nothing:
            raise PolicyError(
                "cpu_offloading=True must offload activations, weights, or both; set "
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
        """Offload a model according to the settings.

        Args:
            model: any model with repeated blocks.
            layers: as for `ebbtide.offload`; patterns such as ``"layers.*.mlp"`` select by name.
            store: as for `ebbtide.offload`.
            host_budget: as for `ebbtide.offload`.
            trace: as for `ebbtide.offload`.

        Returns:
            The handle, as `ebbtide.offload` returns it.

        Raises:
            PolicyError: the model has too few layers for ``cpu_offloading_num_layers``, or the
                settings do not fit it. The model is left unchanged.
        """
        check_model(model)
        count = self.cpu_offloading_num_layers if self.cpu_offloading else 0
        found = find_layers(model) if layers is None else match_layers(model, layers)
        num_layers = len(found.modules) if found.num_calls is None else found.num_calls
        if self.cpu_offloading and count >= max(num_layers, 1):
            raise PolicyError(
                f"cpu_offloading_num_layers={count} must be less than the number of layers, which "
                f"is {num_layers} ({', '.join(found.names[:3])}, ...): the last layer stays, as "
                f"its backward follows its forward at once"
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
