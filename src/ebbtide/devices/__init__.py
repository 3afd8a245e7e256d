"""Streams, events and copies: the only place that touches a stream."""
