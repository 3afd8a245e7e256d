"""Runs a training script as it is, and offloads the models that it trains."""
