"""Checks that a policy fits the layers of a model."""

from __future__ import annotations

from torch import nn

from ebbtide.errors import PolicyError
from ebbtide.hooks.layers import LayerModules, warn_of_one_region
from ebbtide.policy import ActivationPolicy


def check_layer_counts(policy: ActivationPolicy, layers: LayerModules) -> None:
    """Check that a model has the layers that a policy counts or recomputes.

    Raises:
        PolicyError: it has not.
    """
    if not policy.counts_layers and not policy.recomputes:
        return
    if not layers.modules:
        raise PolicyError(
            f"the policy {'recomputes' if policy.recomputes else 'counts'} layers, and the model "
            f"has no repeated blocks; name its layers, such as "
            f"layers=[model.encoder, model.decoder]"
        )
    for name, wanted in (("num_layers", policy.num_layers), ("keep_last", policy.keep_last)):
        if wanted is not None and layers.num_calls is not None and wanted > layers.num_calls:
            raise PolicyError(
                f"{name}={wanted} is out of range: the model has {layers.num_calls} layers "
                f"({', '.join(layers.names[:3])}{', ...' if len(layers.names) > 3 else ''}); if "
                f"they are called more than once in a forward, each call is a layer: name them, "
                f"layers={layers.names[:2]}"
            )


def check_regions(model: nn.Module, policy: ActivationPolicy) -> bool:
    """Return whether the whole model is compiled as one region, and warn of that.

    Raises:
        PolicyError: it is, and the policy recomputes layers.
    """
    if not _is_one_region(model):
        return False
    if policy.recomputes:
        raise PolicyError(
            "the whole model is compiled as one region, in which no layer can be recomputed; "
            "compile its layers one by one instead (layer.compile()), and offload the model that "
            "holds them"
        )
    warn_of_one_region()
    return True


def _is_one_region(model: nn.Module) -> bool:
    """Whether the whole model is compiled, by any of torch's three ways."""
    return (
        hasattr(model, "_orig_mod")
        or hasattr(model.forward, "_torchdynamo_orig_callable")
        or model._compiled_call_impl is not None
    )
