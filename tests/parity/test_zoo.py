"""The bitwise comparison of the zoo sees every difference."""

import pytest
import torch
from torch import Tensor

from zoo import ENTRIES, assert_bitwise_equal, snapshot

DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_flipped_bit_is_seen(dtype: torch.dtype) -> None:
    values = torch.tensor([[0, 1, 0], [1, 0, 1]]).to(dtype)
    flipped = values.clone()
    flipped.view(-1)[4:5].view(torch.uint8)[0] ^= 1
    assert_bitwise_equal({"w": values}, {"w": values.clone()})
    with pytest.raises(AssertionError, match="w: 1 of 6 elements differ, first at flat index 4"):
        assert_bitwise_equal({"v": values, "w": flipped}, {"v": values, "w": values})


@pytest.mark.parametrize("name", ["loss", "gradient of head.weight", "gradient of input x"])
def test_one_flipped_bit_in_a_snapshot_is_named(name: str) -> None:
    entry = next(entry for entry in ENTRIES if entry.name == "recurrent")
    expected, actual = (snapshot(entry, *entry.build()) for _ in range(2))
    actual[name].view(-1)[:1].view(torch.uint8)[0] ^= 1
    with pytest.raises(AssertionError, match=name):
        assert_bitwise_equal(actual, expected)


def test_negative_zero_differs_from_zero_and_nan_equals_itself() -> None:
    nan = torch.tensor([torch.nan, 1.0])
    assert_bitwise_equal({"t": nan}, {"t": nan.clone()})
    with pytest.raises(AssertionError):
        assert_bitwise_equal({"t": torch.tensor(-0.0)}, {"t": torch.tensor(0.0)})


def test_conjugate_and_negative_views_compare_by_value() -> None:
    values = torch.randn(3, dtype=torch.complex64)
    assert_bitwise_equal({"t": values.conj()}, {"t": values.conj().resolve_conj()})
    imaginary = values.conj().imag  # a negative view
    assert_bitwise_equal({"t": imaginary}, {"t": imaginary})
    with pytest.raises(AssertionError):
        assert_bitwise_equal({"t": values.conj()}, {"t": values})


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        (None, r"t: None != torch.float32 \(2, 3\) strides \(3, 1\)"),
        (torch.zeros(2, 3, dtype=torch.float64), "t: torch.float64"),
        (torch.zeros(3, 2), r"t: torch.float32 \(3, 2\)"),
        (torch.zeros(3, 2).t(), r"t: torch.float32 \(2, 3\) strides \(1, 2\)"),
    ],
    ids=["missing", "dtype", "shape", "strides"],
)
def test_other_layouts_are_seen(actual: Tensor | None, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_bitwise_equal({"t": actual}, {"t": torch.zeros(2, 3)})


def test_other_names_are_seen() -> None:
    with pytest.raises(AssertionError):
        assert_bitwise_equal({"t": None}, {"t": None, "u": None})
