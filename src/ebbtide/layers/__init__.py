"""Finds the layers of a model."""
