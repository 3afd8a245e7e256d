"""`ebbtide.verify` on the accelerator in software: planted defects, peers, and no false alarm."""

from pathlib import Path

import pytest
import torch

import ebbtide
import peer_offloaders
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


# ---- Other libraries


@pytest.mark.parametrize(
    "flaw",
    ["", "waits_for_own_copy", "reads_strides", "waits_outside", "holds_source"],
    ids=lambda flaw: flaw or "none",
)
def test_a_defect_that_an_issue_describes_is_found(flaw: str, device: torch.device) -> None:
    report = peer_offloaders.verify(*build(str(device)), peer_offloaders.without(flaw))
    assert report.same == (not flaw), str(report)


@pytest.mark.parametrize("offloader", [peer_offloaders.save_on_cpu, peer_offloaders.trl])
def test_a_library_that_is_right_raises_no_alarm(
    offloader: peer_offloaders.Made,
    device: torch.device,  # noqa: ARG001
) -> None:
    model, batch = peer_offloaders.build(peer_offloaders.Gate)
    report = peer_offloaders.verify(model, batch, offloader)
    assert report.same, str(report)


def test_trl_frees_a_tensor_that_backward_returns(device: torch.device) -> None:  # noqa: ARG001
    """In TRL 1.16. ebbtide offloads the same model right."""
    model, batch = peer_offloaders.build(peer_offloaders.Fused)
    report = peer_offloaders.verify(model, batch, peer_offloaders.trl)
    assert not report.same and report.has_moved, str(report)
    everything = {"activations": ebbtide.ActivationPolicy(min_bytes=1)}
    report = ebbtide.verify(model, batch, offload=everything, orders=7)
    assert report.same, str(report)
