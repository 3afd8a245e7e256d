"""Offload inside other projects' training loops, one module for each; import the one you need."""
