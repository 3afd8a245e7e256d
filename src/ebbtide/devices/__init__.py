"""Devices: the only code that uses torch's streams and events directly."""
