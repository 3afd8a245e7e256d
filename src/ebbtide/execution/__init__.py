"""Executes a schedule on the activations of a model, pass by pass."""
