"""Offload training state from accelerator memory, and bring it back in time."""

from ebbtide.api import OffloadHandle, offload, wrap_forward_with_offload
from ebbtide.errors import EbbtideError, PolicyError, SavedTensorModifiedError, StoreFullError
from ebbtide.policy import ActivationPolicy
from ebbtide.runtime.recipes import RebuildRecipe, register_rebuild
from ebbtide.runtime.stats import StepStats
from ebbtide.tracing.events import Trace, TraceEvent
from ebbtide.version import __version__

__all__ = [
    "ActivationPolicy",
    "EbbtideError",
    "OffloadHandle",
    "PolicyError",
    "RebuildRecipe",
    "SavedTensorModifiedError",
    "StepStats",
    "StoreFullError",
    "Trace",
    "TraceEvent",
    "__version__",
    "offload",
    "register_rebuild",
    "wrap_forward_with_offload",
]
