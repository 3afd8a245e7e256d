"""The page of a report in a browser: it zooms, answers to mouse, keys and fingers, and is quiet."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browsers import open_browser
from report_cases import empty_record, make_record, page_of

pytestmark = pytest.mark.slow

BEFORE, AFTER = "nothing offloaded", "6 of 8 layers offloaded"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as running:
        yield running


class Quiet:
    """Opens pages, and at the end fails if one of them complained or asked for anything."""

    def __init__(self, browser: Any, folder: Path) -> None:
        self._browser, self._folder = browser, folder
        self._contexts: list[Any] = []
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def open(self, *records: Any, width: int = 1280, **options: Any) -> Any:
        path = self._folder / "run.html"
        path.write_text(page_of(*records))
        return self.open_file(path, width=width, **options)

    def open_file(self, path: Path, *, width: int = 1280, **options: Any) -> Any:
        viewport = {"width": width, "height": 900}
        context = self._browser.new_context(viewport=viewport, **options)
        self._contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", timeout=20_000)
        return page

    def close(self) -> None:
        for context in self._contexts:
            context.close()


@pytest.fixture
def quiet(browser: Any, tmp_path: Path) -> Iterator[Quiet]:
    pages = Quiet(browser, tmp_path)
    yield pages
    pages.close()
    assert pages.complaints == []
    assert all(url.startswith(("file://", "data:")) for url in pages.requests), pages.requests


def made_up() -> Any:
    return make_record(AFTER, 8, 6)


FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def range_of(page: Any, chart: str = "lanes") -> str:
    page.evaluate(FRAMES)  # what was asked for is drawn with the next one
    return page.locator(f".{chart} .range >> visible=true").first.inner_text()


def length_ms(page: Any) -> float:
    """The length of what is shown, in milliseconds."""
    return float(re.search(r"([\d.]+) ms$", range_of(page))[1])  # type: ignore[index]


def pixels(page: Any, chart: str) -> str:
    """What a chart shows now, to be compared with what it shows at another time."""
    page.evaluate(FRAMES)
    return page.evaluate(
        "name => document.querySelector(`.run:not([hidden]) [data-chart=${name}] canvas`)"
        ".toDataURL()",
        chart,
    )


def point(page: Any, chart: str, across: float, down: float) -> tuple[float, float]:
    """A place in a chart, by its share of the canvas."""
    canvas = page.locator(f".{chart} canvas >> visible=true").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    return box["x"] + across * box["width"], box["y"] + down * box["height"]


def test_a_request_and_an_error_are_noticed(browser: Any, tmp_path: Path) -> None:
    """The tests below look for both, so both must be visible to them."""
    page = tmp_path / "loud.html"
    page.write_text(
        "<html data-ready><img src='http://127.0.0.1:9/x.png'><script>throw Error('loud')</script>"
    )
    pages = Quiet(browser, tmp_path)
    pages.open_file(page).wait_for_timeout(200)
    pages.close()
    assert any("loud" in each for each in pages.complaints)
    assert "http://127.0.0.1:9/x.png" in pages.requests


def test_the_page_itself_may_load_nothing(browser: Any, tmp_path: Path) -> None:
    """Even if something were injected, the page's policy would not let it out."""
    pages = Quiet(browser, tmp_path)
    page = pages.open(made_up())
    page.evaluate("fetch('http://127.0.0.1:9/x').catch(() => {})")
    page.wait_for_timeout(200)
    pages.close()
    assert any("Content Security Policy" in each for each in pages.complaints)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_wide_and_narrow_screens(quiet: Quiet, width: int, scheme: str) -> None:
    page = quiet.open(made_up(), width=width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator("canvas").count() == 2
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(16, 23, 30)") is (scheme == "dark")


def test_dragging_zooms_both_charts_and_a_double_click_shows_all(quiet: Quiet) -> None:
    page = quiet.open(made_up())
    whole, before = range_of(page), pixels(page, "memory")
    page.mouse.move(*point(page, "lanes", 0.3, 0.3))
    page.mouse.down()
    page.mouse.move(*point(page, "lanes", 0.5, 0.3), steps=4)
    page.mouse.up()
    # The lanes are about 91% of the canvas wide: a fifth of it is about 22% of the 261 ms.
    assert 50 < length_ms(page) < 64
    assert range_of(page, "memory") == range_of(page)
    assert pixels(page, "memory") != before
    page.mouse.dblclick(*point(page, "lanes", 0.5, 0.3))
    page.mouse.move(5, 5)
    assert range_of(page) == whole
    assert pixels(page, "memory") == before


def test_control_and_wheel_zoom_and_the_wheel_alone_scrolls(quiet: Quiet) -> None:
    page = quiet.open(made_up())
    page.mouse.move(*point(page, "lanes", 0.5, 0.3))
    whole_ms, top = length_ms(page), page.evaluate("scrollY")
    page.mouse.wheel(0, 200)
    page.wait_for_timeout(200)
    assert page.evaluate("scrollY") > top
    assert length_ms(page) == whole_ms
    page.mouse.move(*point(page, "lanes", 0.5, 0.3))
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    page.wait_for_timeout(100)
    assert length_ms(page) == pytest.approx(whole_ms * 2.718**-1, rel=0.02)


def said(page: Any, chart: str) -> str:
    return page.locator(f".{chart} .said >> visible=true").first.inner_text()


def test_the_pointer_shows_what_is_there(quiet: Quiet) -> None:
    page = quiet.open(made_up())
    hint = said(page, "lanes")
    page.mouse.move(*point(page, "lanes", 0.1, 0.1))
    assert said(page, "lanes") == (
        "F0 (compute), fno_blocks.0, begins at 0 s, lasts 10 ms"  # no bytes: it moved none
    )
    page.mouse.move(*point(page, "memory", 0.35, 0.5))
    assert said(page, "lanes") == hint
    assert said(page, "memory") == "F7: 758.0 MiB, lasts 15 ms"
    page.mouse.move(*point(page, "memory", 0.95, 0.5))
    words = page.locator(".breakdown").inner_text()
    assert words.startswith("In optimizer step: 448.0 MiB")
    assert re.search(r"gradients\s+96.0 MiB\s+21%", words)
    page.mouse.move(5, 5)
    assert said(page, "memory") == hint
    assert page.locator(".breakdown").inner_text().startswith("At the peak, in F7: 758.0 MiB")


def test_pointing_at_the_lanes_shows_the_memory_of_that_time(quiet: Quiet) -> None:
    page = quiet.open(made_up())
    page.mouse.move(*point(page, "lanes", 0.37, 0.6))
    assert said(page, "memory").startswith("F7: 758.0 MiB")


def test_the_figures_and_the_charts_have_the_same_step(quiet: Quiet) -> None:
    """Memory is recorded from the first phase on, which begins a little after the step."""
    record = made_up()
    samples = (dataclasses.replace(record.memory.samples[0], begin_s=0.005),)
    memory = dataclasses.replace(record.memory, samples=samples + record.memory.samples[1:])
    events = tuple(event for event in record.events if event.begin_s >= 0.010)
    page = quiet.open(dataclasses.replace(record, memory=memory, events=events))
    figures = page.locator(".figures").inner_text().splitlines()
    assert range_of(page) == f"the whole step, {figures[figures.index('Step') + 1]}"


def test_buttons_zoom_and_move(quiet: Quiet) -> None:
    page = quiet.open(made_up())
    whole = range_of(page)
    tools = page.locator(".lanes .tools")
    tools.get_by_label("Zoom in").click()
    first = range_of(page)
    tools.get_by_label("Later").click()
    assert range_of(page) != first != whole
    tools.get_by_label("Earlier").click()
    tools.get_by_label("Zoom out").click()
    assert range_of(page) == whole
    tools.get_by_label("Zoom in").click()
    tools.get_by_label("Show the whole step").click()
    assert range_of(page) == whole


def test_the_keyboard_walks_through_events_and_lanes(quiet: Quiet) -> None:
    page = quiet.open(made_up())
    page.locator(".lanes .uplot").focus()
    words = page.locator(".lanes [aria-live]")
    page.keyboard.press("ArrowRight")
    assert words.inner_text().startswith("F0 (compute)")
    page.keyboard.press("ArrowRight")
    assert words.inner_text().startswith("F1 (compute), fno_blocks.1")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    # Release 0 is the nearest to F1, and offload 1 begins when layer 0 has left.
    assert words.inner_text().startswith("offload 1 (d2h), fno_blocks.1, 64.0 MiB")
    whole_ms = length_ms(page)
    page.keyboard.press("+")
    page.keyboard.press("+")
    assert length_ms(page) == pytest.approx(whole_ms / 4, rel=0.02)
    for _ in range(4):  # what is walked to is brought into sight
        page.keyboard.press("ArrowRight")
    assert words.inner_text().startswith("offload 5 (d2h)")
    numbers = re.fullmatch(r"from ([\d.]+) ms, ([\d.]+) ms", range_of(page))
    assert numbers is not None
    begin_ms, shown_ms = map(float, numbers.groups())
    assert begin_ms <= 130 and begin_ms + shown_ms >= 154  # offload 5: 10 ms and five of 24 ms on
    page.keyboard.press("0")
    assert range_of(page).startswith("the whole step")
    page.keyboard.press("Escape")
    assert words.inner_text().startswith("Point at something")


def test_the_keyboard_begins_at_the_peak_of_memory(quiet: Quiet) -> None:
    page = quiet.open(made_up())
    page.locator(".memory .uplot").focus()
    page.keyboard.press("ArrowRight")
    assert said(page, "memory").startswith("F7: 758.0 MiB")
    page.keyboard.press("ArrowLeft")
    assert said(page, "memory").startswith("F6: ")


def test_the_breakdown_of_the_peak_names_owners(quiet: Quiet) -> None:
    page = quiet.open(made_up())
    words = page.locator(".breakdown").inner_text()
    assert "At the peak, in F7: 758.0 MiB" in words
    assert "optimizer state" in words and "192.0 MiB" in words and "25%" in words


def test_the_table_sorts_by_mouse_and_keyboard(quiet: Quiet) -> None:
    page = quiet.open(made_up())
    first = page.locator(".layer-table tbody tr").first
    heading = page.locator('.layer-table th[data-key="backward_s"]')
    assert first.inner_text().startswith("0 fno_blocks.0")
    heading.get_by_role("button").click()
    assert first.inner_text().startswith("7 fno_blocks.7")  # the longest backward
    assert heading.get_attribute("aria-sort") == "descending"
    heading.get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert first.inner_text().startswith("0 fno_blocks.0")
    assert heading.get_attribute("aria-sort") == "ascending"


def test_a_layer_of_the_table_stands_out_in_the_lanes(quiet: Quiet) -> None:
    page = quiet.open(made_up())
    plain = pixels(page, "lanes")
    button = page.get_by_role("button", name="2 fno_blocks.2")
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert pixels(page, "lanes") != plain
    button.click()
    assert pixels(page, "lanes") == plain


def shown(page: Any) -> list[str]:
    return page.locator(".run >> visible=true").locator("h1").all_inner_texts()


def test_runs_are_switched_by_mouse_and_keyboard(quiet: Quiet) -> None:
    page = quiet.open(make_record(BEFORE, 8, 0), made_up())
    assert shown(page) == [BEFORE, AFTER]
    page.get_by_role("radio", name=BEFORE).click()
    assert shown(page) == [BEFORE]
    page.keyboard.press("ArrowRight")
    assert shown(page) == [AFTER]
    assert "758.0 MiB" in page.locator(".verdict >> visible=true").inner_text()
    page.keyboard.press("ArrowRight")
    assert shown(page) == [BEFORE, AFTER]
    tops = [each.bounding_box()["y"] for each in page.locator(".lanes").all()]
    assert tops[0] == tops[1]  # side by side


def test_runs_share_their_scales(quiet: Quiet) -> None:
    """What is higher or longer in one of them looks so."""
    page = quiet.open(make_record(BEFORE, 8, 0), make_record("a longer one", 16, 0))
    assert len(set(page.locator(".range").all_inner_texts())) == 1
    page.locator(".lanes .tools").first.get_by_label("Zoom in").click()
    assert len(set(page.locator(".range").all_inner_texts())) == 1


def test_three_runs_begin_with_the_first(quiet: Quiet) -> None:
    page = quiet.open(*[make_record(f"run {number}", 4, number) for number in range(3)])
    assert shown(page) == ["run 0"]
    page.get_by_role("radio", name="All").click()
    assert len(shown(page)) == 3


def test_fingers_pinch_and_swipe(quiet: Quiet) -> None:
    page = quiet.open(made_up(), width=390, has_touch=True, is_mobile=True)
    page.locator(".lanes canvas").scroll_into_view_if_needed()
    whole_ms = length_ms(page)

    def touch(kind: str, *points: tuple[float, float]) -> None:
        places = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(points)]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": places})

    session = page.context.new_cdp_session(page)
    left, right = point(page, "lanes", 0.45, 0.3), point(page, "lanes", 0.55, 0.3)
    wide = point(page, "lanes", 0.85, 0.3)
    touch("touchStart", left)
    touch("touchStart", left, right)
    touch("touchMove", left, wide)
    touch("touchEnd")
    page.wait_for_timeout(100)
    zoomed = range_of(page)
    assert length_ms(page) < whole_ms / 2
    touch("touchStart", wide)
    touch("touchMove", left)
    touch("touchEnd")
    page.wait_for_timeout(100)
    assert range_of(page) != zoomed


@pytest.mark.parametrize(
    "record",
    [
        empty_record(title="nothing"),
        empty_record(title="a trace", events=make_record("x", 4, 2).events),
        empty_record(title="a prediction", predicted_peak_bytes=1, predicted_step_s=1.0),
        make_record("one layer", 1, 0),
    ],
    ids=lambda record: record.title,
)
def test_records_that_lack_much_are_shown(quiet: Quiet, record: Any) -> None:
    page = quiet.open(record)
    for chart in page.locator(".uplot").all():
        chart.focus()
        for key in ("ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp", "+", "-", "0"):
            page.keyboard.press(key)
    assert page.locator("h1").inner_text() == record.title


def test_1000_layers_open_and_answer_soon(quiet: Quiet) -> None:
    page = quiet.open(make_record("1,000 layers", 1000, 900))
    timing = "performance.timing.loadEventEnd - performance.timing.navigationStart"
    assert page.evaluate(timing) < 3000
    assert page.locator(".layer-table tbody tr").count() == 1000
    x, y = point(page, "lanes", 0.5, 0.3)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 5.5, y)
    page.mouse.up()
    page.mouse.move(x + 40, y)
    assert re.match(r"\w+( \d+)? \(\w+\), fno_blocks", said(page, "lanes"))


def test_perfetto_is_one_click_away(quiet: Quiet) -> None:
    """It is another page, which asks for the trace by answering; here a page that acts like it."""
    page = quiet.open(made_up())
    perfetto = """<script>addEventListener("message", ({ data, source }) => {
        if (data === "PING") source.postMessage("PONG", "*");
        else window.got = new TextDecoder().decode(data.perfetto.buffer);
    })</script>"""
    page.context.route(
        "https://ui.perfetto.dev/**",
        lambda route: route.fulfill(body=perfetto, content_type="text/html"),
    )
    with page.expect_popup() as opened:
        page.get_by_role("button", name="Open in Perfetto").click()
    opened.value.wait_for_function("window.got")
    document = json.loads(opened.value.evaluate("window.got"))
    slices = [row["name"] for row in document["traceEvents"] if row["ph"] in ("X", "i")]
    assert slices == [event.label for event in made_up().events]
    assert any(row["name"] == "memory" for row in document["traceEvents"])
