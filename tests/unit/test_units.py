"""Byte counts: what people write is read exactly, and what is written reads back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import PolicyError
from ebbtide.units import format_seconds, format_size, parse_budget_bytes, parse_size_bytes

UNITS = {
    "B": 1,
    "KiB": 1024,
    "MiB": 1024 * 1024,
    "GiB": 1024 * 1024 * 1024,
    "TiB": 1024 * 1024 * 1024 * 1024,
    "KB": 1000,
    "MB": 1000 * 1000,
    "GB": 1000 * 1000 * 1000,
    "TB": 1000 * 1000 * 1000 * 1000,
}
SIZES = st.integers(0, 2**60)


@given(SIZES)
def test_whole_bytes_are_read_as_they_are(size_bytes: int) -> None:
    assert parse_size_bytes(size_bytes) == size_bytes
    assert parse_size_bytes(f"{size_bytes}B") == size_bytes


@given(st.integers(0, 10**9), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " ", "  "]))
def test_units_multiply(count: int, unit: str, space: str) -> None:
    short = unit[0] if unit.endswith("iB") else unit  # 24G is 24GiB
    for spelling in (unit, unit.lower(), unit.upper(), short, short.lower()):
        assert parse_size_bytes(f"{space}{count}{space}{spelling}") == count * UNITS[unit]


@given(SIZES, st.sampled_from([("KB", 3), ("MB", 6), ("GB", 9), ("TB", 12)]))
def test_decimal_fractions_are_exact(size_bytes: int, unit: tuple[str, int]) -> None:
    """1234567 bytes, written as 1.234567MB, are 1234567 bytes."""
    name, digits = unit
    whole, fraction = divmod(size_bytes, 10**digits)
    assert parse_size_bytes(f"{whole}.{fraction:0{digits}}{name}") == size_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("24GiB", 24 * 1024**3),
        ("1.5 KiB", 1024 + 512),
        ("0.1KiB", 102),  # 102.4: bytes are whole, the rest is cut off
        ("1.001KB", 1001),
        ("0B", 0),
        ("24000M", 24000 * 1024**2),
    ],
)
def test_examples(text: str, size_bytes: int) -> None:
    assert parse_size_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GiB",
        "7",
        " 1.5 ",
        "90%",
        "24 gigs",
        "-1",
        "-1KiB",
        "+1",
        "1e9",
        "1.KiB",
        ".5KiB",
        "1 2",
        "1_000",
    ],
)
def test_other_text_is_refused_with_what_can_be_read(text: str) -> None:
    with pytest.raises(PolicyError, match=r"^cap=.*GiB"):
        parse_size_bytes(text, name="cap")


def test_a_share_is_one_of_what_there_is() -> None:
    assert parse_size_bytes("90%", whole_bytes=1000) == 900
    assert parse_budget_bytes(" 12.5 % ", 100_000) == 12_500
    for text in ("100.1%", "0%", "0B", "-5%"):
        with pytest.raises(PolicyError):
            parse_budget_bytes(text, 100_000)


@pytest.mark.parametrize("value", [True, False, 1.5, None, b"1KiB", [1]])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(PolicyError):
        parse_size_bytes(value, name="cap")


def test_negative_bytes_are_refused() -> None:
    with pytest.raises(PolicyError):
        parse_size_bytes(-1, name="cap")


@given(SIZES)
def test_what_is_formatted_reads_back_within_its_last_digit(size_bytes: int) -> None:
    """One decimal of a KiB or MiB: within 0.05 of it, and a byte that reading cuts off."""
    text = format_size(size_bytes)
    unit = text.split()[1]
    last_digit = {"B": 0.0, "KiB": 0.1, "MiB": 0.1, "GiB": 0.01}[unit]
    tolerance_bytes = last_digit / 2 * UNITS[unit] + (unit != "B")
    # 2**60 bytes as a float are off by up to 2**7, far below the last digit of a GiB.
    assert abs(parse_size_bytes(text) - size_bytes) <= tolerance_bytes * 1.001


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1830, "1.8 KiB"),  # 1830 / 1024 = 1.787
        (5 * 2**20 + 2**19, "5.5 MiB"),
        (2**30, "1.00 GiB"),
        (3 * 2**40, "3072.00 GiB"),
        (-1830, "-1.8 KiB"),
    ],
)
def test_formatted_examples(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0.0, "0 s"),
        (2e-9, "0.00 us"),
        (5.23e-5, "52.3 us"),
        (0.0123, "12.3 ms"),
        (0.143, "143 ms"),
        (1.0, "1.00 s"),
        (4321.0, "4,321 s"),
    ],
)
def test_durations_have_three_digits(duration_s: float, text: str) -> None:
    assert format_seconds(duration_s) == text
