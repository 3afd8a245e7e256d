"""Finds the fastest plan within a budget: candidates, a bound on all of them, improvement."""
