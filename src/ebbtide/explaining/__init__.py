"""Explains in words why memory is as high as it is in a step, and what to change."""
