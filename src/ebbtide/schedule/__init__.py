"""Schedules, which say what moves when: their text form, builders and checks. Pure Python."""

from ebbtide.schedule.builders import default, find_order, from_table
from ebbtide.schedule.pipeline import from_pipeline
from ebbtide.schedule.schedule import (
    Action,
    Direction,
    Pass,
    Schedule,
    Unit,
    Verb,
    first_use,
    parse_action,
    parse_pass,
)

__all__ = [
    "Action",
    "Direction",
    "Pass",
    "Schedule",
    "Unit",
    "Verb",
    "default",
    "find_order",
    "first_use",
    "from_pipeline",
    "from_table",
    "parse_action",
    "parse_pass",
]
