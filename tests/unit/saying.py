"""What ebbtide warns of. Each kind of warning has a name, which its text ends with."""

from contextlib import AbstractContextManager

import pytest


def warned(name: str) -> AbstractContextManager[pytest.WarningsRecorder]:
    """Check that a warning of this name comes within the block."""
    return pytest.warns(Warning, match=rf"\[ebbtide: {name}\]")
