"""Arguments of a wrong type or size: a PolicyError names what belongs there, nothing is changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ebbtide.compat.megatron import CPUOffloadingConfig
from ebbtide.compat.transformer_engine import get_cpu_offload_context, mark_not_offload
from torch import nn

import ebbtide
from ebbtide import ActivationPolicy, OffloadSession, PolicyError, WeightPolicy
from ebbtide.stores.build import parse_store


def stack() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)])


MODEL = stack()


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (None, "must be an nn.Module .*got None"),
        ([MODEL, MODEL], "got a list; give the module"),
        (nn.Linear, "got the class Linear"),
        ("model", "got 'model'"),
        (torch.optim.SGD(MODEL.parameters(), 0.1), "got a SGD; give the module whose forward"),
        (torch.zeros(2), "got a Tensor"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_model(model: Any, match: str) -> None:
    with pytest.raises(PolicyError, match=f"^model .*{match}"):
        ebbtide.offload(model)
    config = CPUOffloadingConfig(cpu_offloading=True, cpu_offloading_num_layers=1)
    with pytest.raises(PolicyError):
        config.apply(model)


def test_the_handle_taken_for_the_model() -> None:
    model = ebbtide.offload(stack())
    advised = {}
    for name in ("parameters", "stat"):
        with pytest.raises(AttributeError) as error:
            getattr(model, name)
        advised[name] = "handle = ebbtide.offload(model)" in error.value.args[0]
    with pytest.raises(TypeError) as called:
        model(torch.ones(1))
    advised["()"] = "handle = ebbtide.offload(model)" in called.value.args[0]
    assert advised == {"parameters": True, "stat": False, "()": True}
    with pytest.raises(PolicyError):
        ebbtide.offload(model)


def test_budget_of_bytes_that_nobody_means() -> None:
    for budget in (24, 0, "24B"):
        with pytest.raises(PolicyError):
            ebbtide.offload(stack(), budget=budget)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"activations": True}, r"ActivationPolicy or None, got True; write .*Policy\(\) for all"),
        ({"activations": False}, "got False; .*num_layers=0 in it for none"),
        ({"activations": ActivationPolicy}, "got the class ActivationPolicy; write"),
        ({"activations": WeightPolicy()}, "got a WeightPolicy"),
        ({"activations": 4}, "got 4"),
        ({"activations": {"num_layers": 4}}, "got a dict"),
        ({"weights": True}, r"WeightPolicy or None, got True; write .*WeightPolicy\(\)"),
        ({"weights": False}, "got False; .*for none"),
        ({"weights": WeightPolicy}, "got the class WeightPolicy"),
        ({"weights": ActivationPolicy()}, "got an ActivationPolicy"),
        ({"weights": WeightPolicy(num_layers=99)}, r"num_layers=99\) is out of range: .* 4 layers"),
        ({"weights": WeightPolicy(num_layers=5)}, r"num_layers=5\) is out of range"),
        ({"weights": WeightPolicy(keep_last=5)}, r"keep_last=5\) is out of range"),
        ({"weights": WeightPolicy(num_layers=0)}, "selects none of the model's 4 layers"),
        ({"weights": WeightPolicy(min_bytes="1GiB")}, "selects none .* change .* min_bytes"),
        ({"store": None}, 'store must be text, got None; one of "auto"'),
        ({"store": 3}, "store must be text, got 3"),
        ({"store": Path("/tmp/x")}, 'write store="disk:/tmp/x"'),
        ({"store": "disk:"}, "names no directory"),
        ({"store": "auto:/tmp"}, 'is not one of "auto"'),
        ({"store": "disk:~nobody_of_this_name/x"}, "there is no such home directory"),
        ({"host_budget": True}, "host_budget must be a number of bytes"),
        ({"host_budget": -1}, "host_budget must not be negative"),
        ({"host_budget": 24}, 'host_budget=24 is 24 bytes; write a size such as "24GiB"'),
        ({"trace": "step.json"}, "trace must be True or False, got 'step.json'"),
        ({"trace": None}, "trace must be True or False, got None"),
        ({"trace": 1}, "trace must be True or False, got 1"),
        ({"schedule": "F0"}, "must be an ebbtide.Schedule"),
        ({"layers": 3}, r"layers must be a list .* got 3; .*num_layers=\.\.\."),
        ({"layers": MODEL[0][0]}, r"layers must be a list .* got a Linear; write layers=\[model"),
        ({"layers": nn.Linear}, "got the class Linear"),
        ({"layers": "0"}, "layers must be a list .* got '0'"),
        ({"layers": [0, 1]}, "each of layers must be a module of the model or a pattern, got 0"),
        ({"layers": [nn.Linear]}, "each of layers .* got the class Linear"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_arguments_of_offload(arguments: dict[str, Any], match: str) -> None:
    model = stack()
    with pytest.raises(PolicyError, match=match):
        ebbtide.offload(model, **arguments)
    assert "forward" not in vars(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
    ebbtide.offload(model).detach()


def test_a_module_list_may_be_given_as_layers() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))})
    with ebbtide.offload(model, layers=model["layers"]) as handle:
        assert handle.layers == ("layers.0", "layers.1", "layers.2")


@pytest.mark.parametrize("number", [0, 1, 3, 4])
def test_as_many_weights_as_there_are_layers(number: int) -> None:
    if number:
        ebbtide.offload(stack(), weights=WeightPolicy(num_layers=number)).detach()
    if number < 4:
        ebbtide.offload(stack(), weights=WeightPolicy(keep_last=number)).detach()


def test_a_callable_is_wrapped() -> None:
    x = torch.randn(3, 8)
    plain = MODEL.forward(x)
    forward = ebbtide.wrap_forward_with_offload(MODEL.forward, trace=True)
    forward(x).sum().backward()
    assert torch.equal(forward(x), plain)
    assert forward.handle is not None
    assert forward.handle.stats.num_saved > 0
    assert isinstance(forward.handle.trace, ebbtide.Trace)


def test_offload_is_for_modules() -> None:
    model: Any = MODEL.forward
    with pytest.raises(PolicyError, match="wrap_forward_with_offload"):
        ebbtide.offload(model)


def test_a_callable_cannot_be_offloaded_by_a_configuration() -> None:
    config: Any = CPUOffloadingConfig(cpu_offloading=True, cpu_offloading_num_layers=1)
    with pytest.raises(PolicyError):
        config.apply(MODEL.forward)


@pytest.mark.parametrize(
    ("forward", "arguments", "match"),
    [
        (None, {}, "forward must be a callable, such as model.forward, got None"),
        ("forward", {}, "got 'forward'"),
        (nn.Linear, {}, "got the class Linear"),
        (torch.zeros(2), {}, "got a Tensor"),
        (MODEL.forward, {"activations": True}, "activations must be"),
        (MODEL.forward, {"trace": "x"}, "trace must be"),
        (MODEL.forward, {"device": "gpu"}, "device must be a torch.device, got 'gpu'; such as"),
        (MODEL.forward, {"device": 1.5}, "device must be"),
        (MODEL.forward, {"store": None}, "store must be text"),
    ],
    ids=str,
)
def test_arguments_of_the_wrapper(forward: Any, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(PolicyError, match=match):
        ebbtide.wrap_forward_with_offload(forward, **arguments)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"modules": nn.Linear(2, 2)}, r"modules must be a list of modules, .*modules=\[model\]"),
        ({"modules": 3}, "modules must be a list of modules, got 3"),
        ({"modules": [3]}, "modules must be a list of modules, got 3; as one of its elements"),
        ({"modules": [[MODEL]]}, "got a list; as one of its elements"),
        ({"activations": True}, "activations must be"),
        ({"any_order": "yes"}, "any_order must be True or False, got 'yes'"),
        ({"device": "gpu"}, "device must be a torch.device"),
        ({"store": None}, "store must be text"),
        ({"trace": 0}, "trace must be True or False"),
        ({"schedule": 3}, 'schedule must be an ebbtide.Schedule or "manual", got 3'),
        ({"num_layers": MODEL}, r"num_layers must be .* see modules=\[model\]"),
    ],
    ids=str,
)
def test_arguments_of_a_session(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(PolicyError, match=match):
        OffloadSession(**{"num_layers": 1, "model_layers": 4} | arguments)


@pytest.mark.parametrize("number", ["0", -1, True, 1.0, MODEL], ids=str)
def test_numbers_of_layers_in_a_session(number: Any) -> None:
    session = OffloadSession(1, 4, device="cpu")
    with pytest.raises(PolicyError):
        session.layer(number).__enter__()
    with pytest.raises(PolicyError):
        session.layer(0, microbatch=number).__enter__()
    with pytest.raises(PolicyError):
        session.begin_backward(number)
    with pytest.raises(PolicyError):
        session.begin_backward(0, part="F")


def test_other_public_functions() -> None:
    schedule = ebbtide.schedule.default(1, 3)
    with pytest.raises(PolicyError):
        ebbtide.rehearse("F0")
    for arguments in ({"bandwidth_bytes_per_s": "25"}, {"forward_s": "1"}, {"backward_s": True}):
        with pytest.raises(PolicyError):
            ebbtide.rehearse(schedule, **arguments)
    with pytest.raises(ebbtide.ScheduleError):
        ebbtide.Schedule.parse(None)
    with pytest.raises(PolicyError, match=r"^recipe"):
        ebbtide.register_rebuild(3)
    with pytest.raises(PolicyError):
        mark_not_offload(MODEL)
    with pytest.raises(PolicyError):
        get_cpu_offload_context("yes", 1, 4)
    with pytest.raises(PolicyError):
        ActivationPolicy(min_bytes=None)


def test_a_home_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").mkdir()
    assert parse_store("disk:~/x") == ("disk", tmp_path / "x")
    assert parse_store("tiered:~/x") == ("tiered", tmp_path / "x")
    assert parse_store("disk") == ("disk", None)
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: opened.append(path) or real(path, *rest))
    model = stack()
    with ebbtide.offload(model, store="disk:~/x", activations=ActivationPolicy(min_bytes=1)) as one:
        model(torch.randn(4, 8)).sum().backward()
        assert one.stats.offloaded_bytes > 0
        assert f"store: disk:{tmp_path / 'x'}" in repr(one)
    assert any(str(path).startswith(str(tmp_path / "x")) for path in opened)
