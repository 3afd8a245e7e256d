"""What a console shows of handles, sessions, forwards and figures."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ebbtide

POLICY = ebbtide.ActivationPolicy(min_bytes=1, rebuild=False)


def model() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Sigmoid()) for _ in range(6)])


def test_a_handle_tells_its_state() -> None:
    """Each layer saves its input and its output, which is the next one's input: 64 x 256 x 4 B."""
    net = model()
    handle = ebbtide.offload(net, activations=POLICY)
    assert repr(handle) == (
        "<OffloadHandle: attached, Sequential on cpu, 6 layers, store: disk, last step: none yet, "
        "now: no step is under way>"
    )
    loss = net(torch.randn(64, 256)).sum()
    assert "now: a step is under way" in repr(handle)
    loss.backward()
    assert "last step: 448.0 KiB offloaded, now: no step is under way" in repr(handle)
    handle.detach()
    assert repr(handle).startswith("<OffloadHandle: detached, Sequential on cpu, 6 layers")


def test_a_repr_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for by debuggers and in error messages, also amid a step."""
    net = model()
    with ebbtide.offload(net, activations=POLICY) as handle:
        net(torch.randn(64, 256)).sum().backward()

        def refuse(*_: object) -> None:
            raise AssertionError("waited for the device")

        monkeypatch.setattr("ebbtide.runtime.stats.StepMeter.stats", property(refuse))
        assert "448.0 KiB" in repr(handle)


def test_a_wrapped_forward_tells_its_state() -> None:
    net = model()
    net.forward = ebbtide.wrap_forward_with_offload(net.forward)
    assert repr(net.forward) == "<OffloadedForward: Sequential.forward, active>"
    assert "attached, Sequential on cpu, store: disk" in repr(net.forward.handle)
    net.forward.handle.detach()
    assert repr(net.forward) == "<OffloadedForward: Sequential.forward, detached>"
    whole = ebbtide.wrap_forward_with_offload(model())
    assert repr(whole) == "<OffloadedForward: Sequential, active>"  # not its modules, line by line


def test_a_session_tells_its_state() -> None:
    session = ebbtide.OffloadSession(2, 6, device="cpu")
    assert repr(session).startswith("<OffloadSession: open, cpu, 2 of 6 layers offloaded, store: d")
    with session.layer():
        assert repr(session).startswith("<OffloadSession: inside layer 0, ")
    session.close()
    assert repr(session).startswith("<OffloadSession: closed, ")
    by_hand = ebbtide.OffloadSession(schedule="manual", model_layers=3, device="cpu")
    assert "3 layers, moved by hand" in repr(by_hand)
