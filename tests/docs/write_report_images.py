"""Draws docs/images/report.png and report-lanes.png: the page of made-up runs in a browser.

    PYTHONPATH=src:tests/unit python tests/docs/write_report_images.py

It needs playwright and a Chromium. The run is the one of `tests/unit/report_cases.py`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from browsers import open_browser
from ebbtide.observe.page import write_page
from report_cases import make_record

IMAGES = Path(__file__).parents[2] / "docs" / "images"
_DRAWN_MS = 300  # charts are drawn by then
RUNS = ("nothing offloaded", 0), ("6 of 8 layers offloaded", 6)


def main() -> None:
    """Draw the top of the page with both runs, and the lanes of one with the pointer in them."""
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        path = Path(folder) / "run.html"
        write_page(path, [make_record(title, 8, number) for title, number in RUNS])
        page = browser.new_page(viewport={"width": 1280, "height": 1680}, color_scheme="light")
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]")
        page.wait_for_timeout(_DRAWN_MS)
        page.screenshot(path=IMAGES / "report.png")
        page.get_by_role("radio", name=RUNS[1][0]).check()
        lanes = page.locator(".lanes >> visible=true")
        lanes.locator(".u-over").hover(position={"x": 474, "y": 75})
        page.wait_for_timeout(_DRAWN_MS)
        lanes.screenshot(path=IMAGES / "report-lanes.png")


if __name__ == "__main__":
    main()
