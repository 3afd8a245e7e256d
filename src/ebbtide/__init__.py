"""Offload training state from accelerator memory, and bring it back in time."""

import logging

from ebbtide import schedule
from ebbtide.api import offload, wrap_forward_with_offload
from ebbtide.errors import (
    BudgetError,
    EbbtideError,
    ForkedProcessError,
    PolicyError,
    SavedTensorModifiedError,
    ScheduleError,
    StoreFullError,
)
from ebbtide.handle import OffloadHandle
from ebbtide.observe.explain import Explanation, Finding
from ebbtide.observe.inspection import Inspection
from ebbtide.observe.trace import Trace
from ebbtide.planning.planned_step import PlannedStep
from ebbtide.policy import ActivationPolicy, WeightPolicy
from ebbtide.runtime.events import TraceEvent
from ebbtide.runtime.record import RebuildRecipe, register_rebuild
from ebbtide.runtime.stats import StepStats
from ebbtide.schedule import Schedule
from ebbtide.session import OffloadSession
from ebbtide.tools.rehearsal import rehearse
from ebbtide.tools.verify import VerifyReport, verify
from ebbtide.version import __version__
from ebbtide.weights.overlap import OverlapStats

__all__ = [
    "ActivationPolicy",
    "BudgetError",
    "EbbtideError",
    "Explanation",
    "Finding",
    "ForkedProcessError",
    "Inspection",
    "OffloadHandle",
    "OffloadSession",
    "OverlapStats",
    "PlannedStep",
    "PolicyError",
    "RebuildRecipe",
    "SavedTensorModifiedError",
    "Schedule",
    "ScheduleError",
    "StepStats",
    "StoreFullError",
    "Trace",
    "TraceEvent",
    "VerifyReport",
    "WeightPolicy",
    "__version__",
    "offload",
    "register_rebuild",
    "rehearse",
    "schedule",
    "verify",
    "wrap_forward_with_offload",
]

# Without a handler of its own, a program that configures no logging would print the records.
logging.getLogger(__name__).addHandler(logging.NullHandler())
