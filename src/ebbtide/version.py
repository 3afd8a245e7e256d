"""The version, where the build can read it without importing torch."""

__version__ = "0.1.0"

TESTED_TORCH = ("2.11", "2.15")
"""The oldest and the newest torch that `make versions` tests."""
