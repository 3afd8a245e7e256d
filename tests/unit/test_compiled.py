"""Models that are compiled before or after the offload train as the compiled model alone does."""

import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import ebbtide

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
LAYERS = 3
POLICY = ebbtide.ActivationPolicy(min_bytes=1024)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def each_layer(model: Net) -> nn.Module:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend="aot_eager", fullgraph=True)
    return model


def each_layer_in_place(model: Net) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def each_forward(model: Net) -> nn.Module:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    return model


def whole(model: Net) -> nn.Module:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def whole_in_place(model: Net) -> nn.Module:
    model.compile(backend="aot_eager", fullgraph=True)
    return model


PER_LAYER = [each_layer, each_layer_in_place, each_forward]
Compile = Callable[[Net], nn.Module]


def of_the_code(texts: Iterable[str]) -> list[str]:
    """Leave out what torch says of this machine and its Python, whatever is compiled."""
    of_the_machine = "triton not found", "Guards may run slower on Python"
    return [text for text in texts if not text.startswith(of_the_machine)]


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts += of_the_code([record.getMessage()])


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What the compiler logs at the level of warnings."""
    messages = Messages()
    messages.setLevel(logging.WARNING)
    logging.getLogger("torch").addHandler(messages)
    yield messages.texts
    logging.getLogger("torch").removeHandler(messages)


def train(model: nn.Module) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(1)
    x = torch.randn(512, 64)
    losses = []
    for _ in range(2):
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            model(x)
    return losses, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def build() -> Net:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    return Net()


@functools.cache
def compiled_alone(compile_it: Compile) -> tuple[list[float], list[Tensor], int]:
    """What training gives without ebbtide, and how many graphs were compiled for it."""
    losses, gradients = train(compile_it(build()))
    return losses, gradients, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("before", [True, False], ids=["compiled before", "compiled after"])
@pytest.mark.parametrize("compile_it", [*PER_LAYER, whole, whole_in_place])
def test_same_bits_and_graphs_as_compiled_alone(
    compile_it: Compile, before: bool, log: list[str]
) -> None:
    """Each is compiled with fullgraph=True, so a graph break would be an error."""
    expected_losses, expected, graphs = compiled_alone(compile_it)
    model = build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        offloaded = compile_it(model) if before else model
        handle = ebbtide.offload(offloaded, activations=POLICY)
        losses, gradients = train(offloaded if before else compile_it(model))
    assert losses == expected_losses
    assert all(map(torch.equal, gradients, expected))
    assert counters["stats"]["unique_graphs"] == graphs  # nothing was compiled twice
    assert not counters["graph_break"]
    assert not log
    assert handle.stats.offloaded_bytes > LAYERS * 512 * 64 * 4  # the layers' inputs at least
    told = of_the_code(str(w.message) for w in caught)
    if compile_it in PER_LAYER:
        assert not told
        names = {storage.name for storage in handle.inspect().storages}
        assert {f"blocks.{number}" for number in range(LAYERS)} <= names
    else:
        assert len(told) == 1
        assert "compiled as one region" in told[0]


def test_a_recomputed_forward_is_not_taken_for_a_compiled_one() -> None:
    """Recomputed inside backward, layers are not counted; that says nothing about the model."""
    model, x = build(), torch.randn(512, 64, requires_grad=True)
    with warnings.catch_warnings(), ebbtide.offload(model, activations=POLICY) as handle:
        warnings.simplefilter("error")
        for _ in range(2):
            checkpoint(model, x, use_reentrant=True).sum().backward()
        assert handle.layers == tuple(f"blocks.{number}" for number in range(LAYERS))


def in_a_sequential(model: Net) -> nn.Module:
    """The compiler traces the blocks and not the `nn.Sequential` that they are called by."""
    model.blocks = nn.ModuleList(nn.Sequential(block, nn.Tanh()) for block in model.blocks)
    for each in model.blocks:
        each.compile(backend="aot_eager")
    return model


@pytest.mark.parametrize("mode", ["offload", "recompute"])
@pytest.mark.parametrize("layers", [None, ["blocks.*"]], ids=["blocks", "sequentials"])
def test_layers_of_a_sequential_that_is_compiled(
    mode: Any, layers: list[str] | None, log: list[str]
) -> None:
    with warnings.catch_warnings(record=True) as expected_told:
        warnings.simplefilter("always")
        expected_losses, expected = train(in_a_sequential(build()))
    graphs = counters["stats"]["unique_graphs"]
    assert graphs
    model = in_a_sequential(build())
    policy = ebbtide.ActivationPolicy(min_bytes=1024, mode=mode)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        handle = ebbtide.offload(model, layers=layers, activations=policy)
        losses, gradients = train(model)
    said = {str(each.message) for each in told if "[ebbtide: not-recomputed]" not in str(each)}
    said -= {str(each.message) for each in expected_told}
    # The compiler of torch 2.15 traces the `nn.Sequential`, too, and so its blocks as parts of it.
    is_inside = TORCH >= (2, 15) and layers is None
    names = {each.rpartition(" ")[2] for each in of_the_code(said)}
    assert bool(names) == is_inside and names <= {"no-layer-called]", "nothing-offloaded]"}
    assert losses == expected_losses
    assert all(map(torch.equal, gradients, expected))
    assert counters["stats"]["unique_graphs"] == graphs or is_inside
    assert not log
    stats = handle.stats  # what is compiled is offloaded, where it would be recomputed otherwise
    assert is_inside or stats.recomputed_bytes + stats.offloaded_bytes > 0


def train_in_a_compiled_step(model: Net) -> tuple[list[Tensor], list[str]]:
    """Train with a step that is compiled as one function.

    Returns:
        The losses and the weights, and the files of which the compiler has compiled functions.
    """
    compiled: list[str] = []
    noting = register_bytecode_hook(lambda code, _: compiled.append(code.co_filename))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    @torch.compile(backend="aot_eager")
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach() + 1

    with noting:
        losses = [step(torch.randn(512, 64)) for _ in range(4)]
    return losses + [each.detach().clone() for each in model.parameters()], compiled


@pytest.mark.parametrize(
    "options",
    [
        {"activations": POLICY},
        {"weights": ebbtide.WeightPolicy()},
        {"weights": ebbtide.WeightPolicy(), "activations": POLICY},
        {"budget": "8GiB"},
    ],
    ids=["activations", "weights", "both", "budget"],
)
def test_a_compiled_step_runs_the_offload_as_it_is(options: dict[str, Any]) -> None:
    """The compiler is at work during the backward that such a step calls, too."""
    plain = build()
    torch.manual_seed(1)
    expected, _ = train_in_a_compiled_step(plain)
    torch._dynamo.reset()
    model = build()
    torch.manual_seed(1)
    with ebbtide.offload(model, **options) as handle:
        trained, compiled = train_in_a_compiled_step(model)
        moved_bytes = handle.stats.offloaded_bytes
    assert all(map(torch.equal, trained, expected))
    assert compiled
    assert not [file for file in compiled if Path(ebbtide.__file__).parent in Path(file).parents]
    if "activations" in options:
        assert moved_bytes > LAYERS * 512 * 64 * 4


@pytest.mark.parametrize("compile_it", PER_LAYER)
def test_detach_leaves_the_compiled_layers(compile_it: Compile) -> None:
    model = build()
    handle = ebbtide.offload(model, activations=POLICY)
    compile_it(model)
    train(model)
    handle.detach()
    graphs = counters["stats"]["unique_graphs"]
    for block in model.modules():
        assert not block._forward_hooks
        assert not block._forward_pre_hooks
        assert "CompiledCall" not in type(block._compiled_call_impl).__name__
    train(model)
    assert counters["stats"]["unique_graphs"] <= 2 * graphs
    ebbtide.offload(model, activations=POLICY).detach()


def test_compiled_layers_are_counted() -> None:
    """num_layers=1 offloads the first layer only, also where layers are compiled later."""
    model = build()
    policy = ebbtide.ActivationPolicy(min_bytes=1024, num_layers=1)
    handle = ebbtide.offload(model, activations=policy)
    each_layer(model)
    train(model)
    moved = {s.name for s in handle.inspect().storages if s.decision == "offload"}
    assert moved == {"blocks.0"}
