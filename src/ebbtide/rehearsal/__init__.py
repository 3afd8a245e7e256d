"""Runs a schedule on the engine in virtual time."""

from ebbtide.rehearsal.rehearsed_step import rehearse

__all__ = ["rehearse"]
