"""A browser for tests: playwright drives the Chromium that the system has."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def open_browser() -> Iterator[Any]:
    """Open a browser, or skip the test. ``EBBTIDE_BROWSER`` may name the file of one."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright, which drives the browser, is not installed"
    )
    found = os.environ.get("EBBTIDE_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"there is no {NAMES[0]} on this machine")
    with playwright.sync_playwright() as driver:
        # Containers of CI have no user namespaces, without which Chromium has no sandbox.
        running = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()
