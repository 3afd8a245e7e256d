"""Host memory and files on disk: their allocation, and the budget that limits it."""
