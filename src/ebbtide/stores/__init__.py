"""Stores: where bytes rest in a lower tier, and how they get there and back."""
