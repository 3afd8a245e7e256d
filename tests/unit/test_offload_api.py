"""Bad input gets a clear error and changes nothing; what is attached comes off again."""

import copy
import errno
import inspect
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide import ActivationPolicy, PolicyError, StoreFullError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).relu())


class Model(nn.Module):
    """Docstring to be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * scale


def _state(module: nn.Module) -> list[tuple]:
    return [
        (
            name,
            child.__dict__.get("forward"),
            dict(child._forward_hooks),
            dict(child._forward_pre_hooks),
            dict(child._forward_hooks_always_called),
        )
        for name, child in module.named_modules()
    ]


def _gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    model(torch.randn(16, 32)).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def _refused(model: nn.Module, match: str, **arguments: object) -> None:
    before = _state(model)
    with pytest.raises(PolicyError, match=match):
        ebbtide.offload(model, **arguments)
    assert _state(model) == before


def test_model_without_parameters() -> None:
    _refused(nn.ReLU(), "has no parameters.*wrap_forward_with_offload")


def test_model_on_two_devices() -> None:
    model = Model()
    model.blocks[2].to("meta")
    _refused(model, r"on 2 devices \(blocks.0.first.weight on cpu, blocks.2.first.weight on meta\)")


def test_model_on_the_meta_device() -> None:
    _refused(Model().to("meta"), "hold no values.*to_empty")


@pytest.mark.parametrize(
    ("store", "match"),
    [
        ("disk:/not/there", "cannot create a file in /not/there: No such file"),
        ("host", "would copy RAM to RAM"),
        ("tape", 'not one of "auto", "host", "disk"'),
        ("host:/tmp", 'not one of "auto"'),
    ],
)
def test_store_that_cannot_be(store: str, match: str) -> None:
    _refused(Model(), match, store=store)


@pytest.mark.parametrize("budget", ["24", " 1.5 "])
def test_a_budget_in_text_needs_a_unit(budget: str) -> None:
    _refused(Model(), f"{budget.strip()}GiB", budget=budget)


def test_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("ebbtide.stores.disk_file.tempfile.TemporaryFile", refuse)
    _refused(Model(), "cannot create a file in .*: Permission denied", store=f"disk:{tmp_path}")


@pytest.mark.parametrize(
    "policy", [ActivationPolicy(num_layers=5), ActivationPolicy(keep_last=5)], ids=str
)
def test_more_layers_than_the_model_has(policy: ActivationPolicy) -> None:
    _refused(Model(), "=5 is out of range: the model has 4 layers", activations=policy)


def test_layers_of_a_model_that_repeats_nothing() -> None:
    policy = ActivationPolicy(num_layers=1)
    _refused(nn.Linear(4, 4), "no repeated blocks; name its layers", activations=policy)


def test_layer_patterns_that_match_nothing() -> None:
    _refused(Model(), "no module is called 'block.*'.*blocks.", layers=["block.*"])


def test_module_of_another_model_as_a_layer() -> None:
    _refused(Model(), "no submodule of the model", layers=[Block()])


def test_offload_twice_and_detach_twice() -> None:
    model = Model()
    before = _state(model)
    handle = ebbtide.offload(model)
    attached = _state(model)
    with pytest.raises(PolicyError):
        ebbtide.offload(model)
    with pytest.raises(PolicyError):
        ebbtide.wrap_forward_with_offload(model.forward)
    assert _state(model) == attached
    handle.detach()
    assert _state(model) == before
    handle.detach()
    assert _state(model) == before
    ebbtide.offload(model).detach()


def test_wrap_twice() -> None:
    model = Model()
    model.forward = ebbtide.wrap_forward_with_offload(model.forward)
    with pytest.raises(PolicyError):
        ebbtide.wrap_forward_with_offload(model.forward)
    with pytest.raises(PolicyError):
        ebbtide.offload(model)


def test_wrapped_forward_has_no_layers() -> None:
    with pytest.raises(PolicyError):
        ebbtide.wrap_forward_with_offload(
            Model().forward, activations=ActivationPolicy(num_layers=1)
        )


def test_full_disk_in_the_middle_of_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward raises; what was saved is gone; with room again, training goes on."""
    model = Model()
    expected = _gradients(model)
    allocate = os.posix_fallocate

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with ebbtide.offload(model, activations=ActivationPolicy(min_bytes=1)) as handle:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(StoreFullError):
            _gradients(model)
        monkeypatch.setattr(os, "posix_fallocate", allocate)
        got = _gradients(model)
        assert handle.stats.offloaded_bytes > 0
    assert all(map(torch.equal, got, expected))


def test_detach_while_a_graph_is_alive() -> None:
    model = Model()
    expected = _gradients(model)
    model.zero_grad()
    torch.manual_seed(1)
    with ebbtide.offload(model, activations=ActivationPolicy(min_bytes=1)):
        out = model(torch.randn(16, 32)).square().sum()
    out.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize("wrap", [False, True], ids=["offload", "wrap"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copy_of_an_offloaded_model_is_a_plain_model(wrap: bool, how: str) -> None:
    model = Model()
    if wrap:
        model.forward = ebbtide.wrap_forward_with_offload(model.forward)
    else:
        ebbtide.offload(model)
    if how == "deepcopy":
        copied = copy.deepcopy(model)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        copied = torch.load(buffer, weights_only=False)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    x = torch.randn(2, 32)
    assert torch.equal(copied(x), x)  # its own weights, not the original's
    assert not torch.equal(model(x), x)
    ebbtide.offload(copied).detach()


def _shallow(model: nn.Module) -> nn.Module:
    return copy.copy(model)


def _replica(model: nn.Module) -> nn.Module:
    """As `DataParallel` and learn2learn copy a module, and share its hooks."""
    copied = model.__new__(type(model))
    copied.__dict__ = model.__dict__.copy()
    return copied


def _functional(model: nn.Module) -> nn.Module:
    """As higher copies a module: the attributes, without the hooks, in a class of its own."""

    class Functional(type(model)):  # type: ignore[misc]
        def forward(self, *args: object) -> Tensor:
            self.called = True
            return super().forward(*args)

    copied = Functional()
    for name, value in vars(model).items():
        if not name.startswith("_"):
            setattr(copied, name, value)
    return copied


WAYS_TO_OFFLOAD = {
    "offload": lambda model: ebbtide.offload(model),
    "weights": lambda model: ebbtide.offload(model, weights=ebbtide.WeightPolicy()),
    "recompute": lambda model: ebbtide.offload(
        model, activations=ActivationPolicy(mode="recompute", min_bytes=1)
    ),
    "wrap": lambda model: setattr(
        model, "forward", ebbtide.wrap_forward_with_offload(model.forward)
    ),
}


@pytest.mark.parametrize("how", WAYS_TO_OFFLOAD)
@pytest.mark.parametrize("of_a_copy", [False, True], ids=["of it", "of a deep copy"])
@pytest.mark.parametrize("make", [_shallow, _replica, _functional])
def test_copy_of_the_attributes_of_an_offloaded_model_is_a_plain_model(
    make: Callable[[nn.Module], nn.Module], of_a_copy: bool, how: str
) -> None:
    """It has the model's replaced forwards; what is put in it afterwards counts."""
    model = Model()
    WAYS_TO_OFFLOAD[how](model)
    source = copy.deepcopy(model) if of_a_copy else model
    copied, block = make(source), make(source.blocks[0])
    copied._modules = {"blocks": nn.ModuleList([Block(), Block()])}
    block._modules = {"first": nn.Linear(32, 32), "second": nn.Linear(32, 32)}
    x = torch.randn(2, 32)
    for _ in range(2):  # a recomputed layer is verified first
        model(x).sum().backward()
        expected = x
        for each in copied.blocks:
            expected = Block.forward(each, expected)
        assert torch.equal(copied(x), expected)
        assert torch.equal(block(x), Block.forward(block, x))
        copied(x).sum().backward()
    assert all(parameter.grad is not None for parameter in copied.parameters())
    assert not hasattr(copied, "called") or copied.called  # the forward of its own class


def test_signature_and_docstring_stay() -> None:
    model = Model()
    signature = inspect.signature(model.forward)
    with ebbtide.offload(model):
        assert inspect.signature(model.forward) == signature
    wrapped = ebbtide.wrap_forward_with_offload(model.forward)
    assert inspect.signature(wrapped) == signature


def test_detach_under_a_later_wrapper_leaves_the_wrapper_working() -> None:
    model = Model()
    expected = _gradients(model)
    handle = ebbtide.offload(model, activations=ActivationPolicy(min_bytes=1))
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    handle.detach()
    assert all(map(torch.equal, _gradients(model), expected))
    assert handle.stats.num_saved == 0


def test_wrapped_plain_function() -> None:
    def function(x: Tensor) -> Tensor:
        return (x.exp() * x.sin()).sum()

    x = torch.randn(64, 64, requires_grad=True)
    wrapped = ebbtide.wrap_forward_with_offload(
        function, activations=ActivationPolicy(min_bytes=1), device="cpu"
    )
    wrapped(x).backward()
    y = x.detach().clone().requires_grad_()
    function(y).backward()
    assert torch.equal(x.grad, y.grad)
    assert wrapped.handle.stats.num_offloaded > 0


def test_model_that_changes_type_and_parameters_between_steps() -> None:
    model = Model()
    with ebbtide.offload(model, activations=ActivationPolicy(min_bytes=1)) as handle:
        model.double()
        model(torch.randn(16, 32, dtype=torch.float64)).sum().backward()
        # Per block: the inputs of both Linear layers, one of which is ReLU's result too.
        assert handle.stats.offloaded_bytes == 4 * 2 * 16 * 32 * 8


def test_a_host_budget_is_read_and_refused_where_there_is_no_host_tier() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ebbtide.PolicyError):
        ebbtide.offload(model, host_budget="lots")
    with pytest.raises(ebbtide.PolicyError):
        ebbtide.offload(model, host_budget="1GiB")
    assert "forward" not in model.__dict__


def test_a_device_that_is_not_there_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(PolicyError):
        ebbtide.offload(model, device="xpu")
    with pytest.raises(PolicyError):
        ebbtide.offload(nn.Linear(2, 2, device="meta"), materialize=3)
    with pytest.raises(FileNotFoundError):
        ebbtide.offload(nn.Linear(2, 2, device="meta"), materialize="no such folder")
    ebbtide.offload(model, device="cpu").detach()


def test_a_model_on_meta_gets_its_values() -> None:
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    torch.manual_seed(0)
    with ebbtide.offload(model, materialize=lambda module: module.reset_parameters()):
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine, theirs)
