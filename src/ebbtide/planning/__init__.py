"""Predicts training steps and chooses what to offload: machines, profiles, plans."""
