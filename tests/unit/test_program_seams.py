"""Seams with a user's program: tensors of its own class, generators, the system's limits."""

from __future__ import annotations

import contextlib
import resource
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # which is loaded in most programs: any optimizer's step does so
from torch import Tensor, nn

import ebbtide
from ebbtide import ActivationPolicy, EbbtideError, PolicyError

EVERYTHING = ActivationPolicy(min_bytes=1, rebuild=False)


class Tagged(Tensor):
    """A tensor with a note, as medical images have."""

    note = ""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, cls):
            result.note = next((a.note for a in args if isinstance(a, cls)), "")
        return result


class Silent(Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        squared: Tensor = Squared.apply(x)
        return squared


@pytest.mark.parametrize("kind", [Tagged, Silent])
@pytest.mark.parametrize("form", ["whole", "view", "cast"])
def test_tensors_of_a_class_that_only_adds_python_are_offloaded(kind: type, form: str) -> None:
    x = torch.randn(16, 32)
    if form == "view":
        x = torch.randn(16, 64)[:, ::2]
    if form == "cast":
        x = x.to(torch.float64).float()
    given = x.as_subclass(kind)
    given.note = "scan 7"  # type: ignore[attr-defined]
    plain, model = Model(), Model()
    plain(given).sum().backward()
    with ebbtide.offload(model, activations=EVERYTHING) as handle:
        for _ in range(2):
            model.zero_grad()
            model(given).sum().backward()
    expected = [p.grad for p in plain.parameters()]
    assert all(
        a is not None and b.grad is not None and torch.equal(a, b.grad)
        for a, b in zip(expected, model.parameters(), strict=True)
    )
    # The input, three outputs of tanh, of which two are inputs, too, and the input of the square.
    assert handle.stats.offloaded_bytes >= 4 * 16 * 32 * 4
    assert handle.stats.kept_bytes == 0


def test_a_modified_tensor_of_such_a_class_is_noticed() -> None:
    model = Model()
    with ebbtide.offload(model, activations=EVERYTHING):
        x = torch.randn(16, 32).as_subclass(Tagged)
        loss = model(x).sum()
        x.add_(1)
        with pytest.raises(ebbtide.SavedTensorModifiedError):
            loss.backward()


class Yielding(Model):
    def forward(self, x: Tensor) -> Iterator[Tensor]:  # type: ignore[override]
        for block in self.blocks:
            x = block(x)
            yield x


class Mapping(Yielding):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        return map(torch.tanh, super().forward(x))


class Iterating(Yielding):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        return iter(list(super().forward(x)))


@pytest.mark.parametrize("kind", [Yielding, Mapping, Iterating])
def test_a_forward_that_yields_is_called_what_it_is(kind: type[Yielding]) -> None:
    plain, model = kind(), kind()
    x = torch.randn(16, 32)
    *_, last = plain(x)
    last.sum().backward()
    with ebbtide.offload(model, activations=EVERYTHING) as handle:
        for step in range(2):
            model.zero_grad()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                *_, last = model(x)
            last.sum().backward()
            del last
            names = {str(each.message).rpartition("[ebbtide: ")[2] for each in caught}
            assert names == ({"forward-yields]"} if step == 0 and kind is not Iterating else set())
            assert handle.stats.offloaded_bytes > 0
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_no_file_to_be_had_says_so() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    model, files = Model(), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        with contextlib.suppress(OSError):
            for _ in range(100):
                files.append(open("/dev/null"))  # noqa: SIM115
        with pytest.raises(PolicyError, match="ulimit -n"):
            ebbtide.offload(model)
    finally:
        for file in files:
            file.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    ebbtide.offload(model).detach()  # the model is as it was


def test_no_thread_to_be_had_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = Model(), Model()
    x = torch.randn(16, 32)
    plain(x).sum().backward()
    handle = ebbtide.offload(model, activations=EVERYTHING)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(EbbtideError, match="ulimit -u"):
            model(x)
    model(x).sum().backward()  # there are threads again
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)
    assert handle.stats.offloaded_bytes > 0
    handle.detach()


class Silenced(nn.Sequential):
    """Has a forward of its own, which cannot be compiled."""

    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            x = self[0](x)
            torch._dynamo.graph_break()
            return self[1](x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [nn.Sequential, Silenced])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("mode", ["offload", "recompute"])
def test_what_the_compiler_leaves_alone_is_not_compiled(
    mode: str, when: str, kind: type[nn.Sequential]
) -> None:
    """Before 2.15 it compiles no container of torch's own, unless the container has hooks."""

    def count_graphs(*, offloads: bool) -> int:
        graphs: list[object] = []

        def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
            graphs.append(graph)
            return graph.forward

        def compile_layers(model: nn.Sequential) -> None:
            for layer in model:
                layer.compile(backend=backend)

        torch._dynamo.reset()
        model = nn.Sequential(*(kind(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
        with contextlib.ExitStack() as stack:
            if when == "before" or not offloads:
                compile_layers(model)
            if offloads:
                policy = ActivationPolicy(min_bytes=1, mode=mode)  # type: ignore[arg-type]
                handle = stack.enter_context(ebbtide.offload(model, activations=policy))
                if when == "after":
                    compile_layers(model)
            for _ in range(2):
                model(torch.randn(4, 16)).sum().backward()
            model[1](torch.randn(4, 16)).sum().backward()  # a part by itself
            if offloads:
                assert handle.stats.num_saved > 0
        assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model)
        return len(graphs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert count_graphs(offloads=True) == count_graphs(offloads=False)
    torch._dynamo.reset()
