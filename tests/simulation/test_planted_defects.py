"""`ebbtide.verify` finds defects that were planted in a copy of the engine, on a CPU."""

from pathlib import Path

import pytest

from planted_defects import DEFECTS, Defect, verify_copy

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_planted_defect_is_found(defect: Defect, tmp_path: Path) -> None:
    found = verify_copy(tmp_path, "cpu", defect.plant)
    assert found["same"] is False, found


def test_a_copy_without_a_defect_is_the_same(tmp_path: Path) -> None:
    found = verify_copy(tmp_path, "cpu")
    assert found["same"] is True, found
