"""Says which of several models may plan its steps now.

[Note: one budget for several models] A budget bounds the memory of the device, or of the process on
a CPU, whatever model it is for. Two models that both look for a plan would both count on the same
free memory. So they plan one after the other. A model that waits for its turn offloads all that can
leave. What is measured of a step includes the memory of all models, so each plan leaves room for
the models before it. A model that has not been called for a while keeps no other one waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from ebbtide.running.found_model import FoundModel

_IDLE_CALLS: Final = 20  # calls of other models after which one is taken to be done with


@final
class BudgetTurns:
    """Says whose turn it is. See [Note: one budget for several models].

    Args:
        models: all models, in the order in which they were found; it grows.
    """

    def __init__(self, models: Sequence[FoundModel]) -> None:
        self._models = models

    def is_next(self, model: FoundModel) -> bool:
        """Whether a model may plan now."""
        newest = max((each.last_call for each in self._models), default=0)
        for other in self._models:
            if other is model:
                return True  # those that were found later wait for this one
            if other.handle is None or newest - other.last_call > _IDLE_CALLS:
                continue
            if other.waits_for_turn or not _is_settled(other):
                return False
        return True


def _is_settled(model: FoundModel) -> bool:
    """Whether a model keeps its plan, or could not be planned from its first step."""
    plan = model.plan
    return model.num_steps > 1 if plan is None else plan.settled
