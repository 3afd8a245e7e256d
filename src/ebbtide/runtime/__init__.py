"""One training step: where torch calls ebbtide, and what becomes of each storage."""
