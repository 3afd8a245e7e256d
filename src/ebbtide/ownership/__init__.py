"""Whose the memory of a training step is that is not saved tensors."""
