"""What ebbtide logs: decisions, by loggers of its modules, and nothing that nobody asked for."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.devices import CpuDevice
from ebbtide.errors import warn_user
from ebbtide.stores.host_memory import allocate_host_memory
from page_locks import PageLocks


def model() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()) for _ in range(3)])


def train(net: nn.Module, steps: int) -> None:
    for _ in range(steps):
        net(torch.randn(64, 64)).sum().backward()


def logged(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[tuple[str, str]]:
    """Each record's logger, below `ebbtide`, and the first words of its text.

    Without the one that the first store of a process logs, whichever test makes it.
    """
    return [
        (record.name.removeprefix("ebbtide."), record.getMessage().partition(":")[0])
        for record in caplog.records
        if record.levelno >= level and record.name != "ebbtide.stores.measured_memory"
    ]


def test_decisions_are_logged_by_the_module_that_makes_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = model()
    policy = ebbtide.ActivationPolicy(min_bytes=1, rebuild=False)
    with caplog.at_level(logging.INFO, "ebbtide"), ebbtide.offload(net, activations=policy):
        pass
    assert logged(caplog) == [
        ("stores.build", "store for a model on cpu"),
        ("api", "offload"),
        ("handle", "detach"),
    ]
    text = next(r.getMessage() for r in caplog.records if r.name == "ebbtide.api")
    assert "Sequential on cpu, 3 layers, store: disk" in text
    assert "min_bytes=1" in text


def test_a_step_logs_nothing_but_that_its_file_grows(caplog: pytest.LogCaptureFixture) -> None:
    net = model()
    with ebbtide.offload(net, activations=ebbtide.ActivationPolicy(min_bytes=1)):
        with caplog.at_level(logging.DEBUG, "ebbtide"):
            train(net, 1)
            assert [name for name, _ in logged(caplog, logging.DEBUG)] == ["stores.disk_file"]
            caplog.clear()
            train(net, 3)
        assert caplog.records == []


def test_a_budget_logs_each_plan_and_that_it_settled(caplog: pytest.LogCaptureFixture) -> None:
    net = model()
    handle = ebbtide.offload(net, budget="16GiB")
    with caplog.at_level(logging.INFO, "ebbtide.planning"):
        for _ in range(30):
            train(net, 1)
            if handle.plan is not None and handle.plan.settled:
                break
        train(net, 2)
    handle.detach()
    texts = [text for _, text in logged(caplog)]
    assert texts[0] == "a new kind of step is recorded, with everything offloaded"
    assert texts.count("the plan has settled") == 1
    assert "the next step follows another plan" in texts
    assert "of a budget of 16.00 GiB are free" in caplog.records[-1].getMessage()


def test_a_program_without_logging_prints_nothing() -> None:
    """Python prints warnings and errors of loggers that have no handler."""
    code = (
        "import logging, ebbtide\n"
        "log = logging.getLogger('ebbtide.devices.lanes')\n"
        "log.error('seen only by who asks for it')\n"
        "assert logging.getLogger('ebbtide').level == logging.NOTSET\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Warnings


def test_a_warning_ends_with_its_name_and_can_be_turned_off_by_it() -> None:
    with pytest.warns(RuntimeWarning, match=r"^something \[ebbtide: some-cause\]$") as caught:
        warn_user("some-cause", "something")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", r"(?s).*\[ebbtide: some-cause\]")
        warn_user("some-cause", "something\nelse")
        with pytest.raises(RuntimeWarning):
            warn_user("other-cause", "something")


def test_pageable_memory_is_said_once_for_each_device() -> None:
    first, second = CpuDevice(), CpuDevice()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for device in (first, first, second, first):
            PageLocks(device, refuses=True)
            allocate_host_memory(device, 2**20)
    assert len(caught) == 2


def test_other_hooks_are_said_once_for_each_model() -> None:
    net, other = model(), model()
    with (
        ebbtide.offload(net),
        ebbtide.offload(other),
        warnings.catch_warnings(record=True) as caught,
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    ):
        warnings.simplefilter("always")
        for each in (net, net, other, other):
            each(torch.randn(2, 64))
    assert [str(each.message).count("[ebbtide: other-hooks]") for each in caught] == [1, 1]


def test_layers_that_are_not_recomputed_are_one_warning() -> None:
    net = model()
    policy = ebbtide.ActivationPolicy(mode="recompute", min_bytes=1)
    with (
        ebbtide.offload(net, activations=policy),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for layer in net:
            layer.forward = torch.compile(layer.forward, backend="eager")
        train(net, 2)
        for layer in net:
            del layer.forward
    texts = [str(each.message) for each in caught if "not-recomputed" in str(each.message)]
    assert len(texts) == 1
    assert texts[0].count("is compiled") == 3
