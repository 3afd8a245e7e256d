"""Offloaded weights: parameters that are in fast memory only while their layer runs."""
