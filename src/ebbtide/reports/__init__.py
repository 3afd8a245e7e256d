"""Reports on a step: what became of each storage."""
