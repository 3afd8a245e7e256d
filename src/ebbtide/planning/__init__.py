"""From the record of a step to a plan within a budget, and the budget that follows it."""
