"""The version, where the build can read it without importing torch."""

__version__ = "0.1.0"

TESTED_TORCH = ("2.11", "2.15")
"""The oldest and the newest torch that `make versions` tests."""

TESTED_FRAMEWORKS = {"transformers": "5.23", "accelerate": "1.15", "lightning": "2.6"}
"""The newest of each that `make clients` trains with."""
