"""Offload inside other projects' training loops. Each has a module; import the one you need."""
