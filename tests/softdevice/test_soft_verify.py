"""`ebbtide.verify` on the accelerator in software: planted defects, and no false alarm."""

from pathlib import Path

import pytest
import torch

import ebbtide
from planted_defects import DEFECTS, Defect, build, verify_copy


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_planted_defect_is_found(defect: Defect, tmp_path: Path) -> None:
    found = verify_copy(tmp_path, "softdevice", defect.plant)
    assert found["same"] is False, found


def test_a_sound_engine_is_the_same_in_every_order(device: torch.device) -> None:
    everything = {
        "activations": ebbtide.ActivationPolicy(min_bytes=1),
        "weights": ebbtide.WeightPolicy(min_bytes=1),
    }
    report = ebbtide.verify(*build(str(device)), offload=everything, orders=7)
    assert report.same, str(report)
    assert len({run.order for run in report.runs}) == 7
