"""Fixtures that several test files use."""

from collections.abc import Iterator

import pytest

from ebbtide.devices import LaneEvent


@pytest.fixture
def ready(request: pytest.FixtureRequest) -> Iterator[LaneEvent]:
    """For a source that is not written yet. Reached before the store closes, which waits for it."""
    request.getfixturevalue("store")
    ready = LaneEvent()
    yield ready
    if not ready.query():
        ready.finish()
