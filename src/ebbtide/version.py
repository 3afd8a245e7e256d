"""The version, where the build can read it without importing torch."""

__version__ = "0.1.0.dev0"
