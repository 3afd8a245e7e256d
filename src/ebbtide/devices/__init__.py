"""Streams, events and copies: of an accelerator, of a CPU, and simulated."""
