"""Optimizer steps over weights at rest."""
