"""Predicts the seconds and bytes of a step under a plan, by arithmetic."""
