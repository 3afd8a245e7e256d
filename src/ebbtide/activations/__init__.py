"""Activations: a record for every storage that autograd saves, and what becomes of it."""
