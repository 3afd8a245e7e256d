"""Reads what a step recorded and changes nothing: traces, memory, reports."""
