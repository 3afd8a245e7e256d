"""`ebbtide.verify` on the accelerator in software: planted defects, peers, and no false alarm."""

from pathlib import Path

import pytest
import torch

import ebbtide
import zoo_plain
from peer_patterns import make
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


def test_save_on_cpu_loses_the_layout_of_channels_last(device: torch.device) -> None:
    torch.manual_seed(0)
    model, inputs = zoo_plain.convnet_channels_last()
    moved = {name: tensor.to(device) for name, tensor in inputs.items()}
    report = ebbtide.verify(model.to(device), moved, offloader="save_on_cpu", orders=0)
    assert report.first_different is not None
    assert ebbtide.verify(model, moved, orders=1).same


def test_trl_has_one_graph_at_a_time(device: torch.device) -> None:
    pytest.importorskip("trl.models.activation_offloading")
    model, x = build(str(device))
    assert ebbtide.verify(model, x, offloader="trl", orders=1).same
    assert not ebbtide.verify(model, x, offloader="trl", orders=0, microbatches=2).same


@pytest.mark.parametrize(
    "flaw", ["", "keeps_strides", "waits_outside", "holds_source"], ids=lambda flaw: flaw or "none"
)
def test_defects_of_others_are_found(flaw: str, device: torch.device) -> None:
    offloader = make(**({flaw: False} if flaw else {}))
    report = ebbtide.verify(*build(str(device)), offloader=offloader, orders=7)
    assert report.same == (not flaw), str(report)
