"""From the record of a step to a plan within a budget, and the budget that follows it."""

from ebbtide.devices.hardware import Hardware
from ebbtide.planning.contest import keep_all, offload_first, rule_plans
from ebbtide.planning.follow import place
from ebbtide.planning.plan import LayerMode, LayerPlan, Plan
from ebbtide.planning.planned_step import PlannedStep
from ebbtide.planning.prediction import (
    CautiousTiming,
    PlanBudget,
    Prediction,
    StepTiming,
    StorageUses,
    open_windows,
)
from ebbtide.planning.profile import LayerProfile, SavedStorage, StepAhead, StepProfile, StorageId
from ebbtide.planning.search import find_frugal, search
from ebbtide.runtime.handles import Decision

__all__ = [
    "CautiousTiming",
    "Decision",
    "Hardware",
    "LayerMode",
    "LayerPlan",
    "LayerProfile",
    "Plan",
    "PlanBudget",
    "PlannedStep",
    "Prediction",
    "SavedStorage",
    "StepAhead",
    "StepProfile",
    "StepTiming",
    "StorageId",
    "StorageUses",
    "find_frugal",
    "keep_all",
    "offload_first",
    "open_windows",
    "place",
    "rule_plans",
    "search",
]
