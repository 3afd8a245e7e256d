"""Empty, sparse, nested and lazy tensors train as they do without an offload."""

import warnings
from collections.abc import Callable

import pytest
import torch
from ebbtide.compat.transformer_engine import mark_not_offload
from torch import Tensor, nn
from torch.nn import functional as F

import ebbtide
from ebbtide import PolicyError, WeightPolicy
from plainly import (
    ACTIVATIONS,
    DEVICE_WEIGHTS,
    EVERY_WAY,
    EVERYTHING,
    MAPPED_WEIGHTS,
    ROWS,
    WIDTH,
    Block,
    Compute,
    Net,
    Offload,
    assert_same_bits,
    batch,
    gradients,
    on_cpu,
    train,
    training,
)

EVERY = pytest.mark.parametrize("how", EVERY_WAY)


@pytest.fixture(autouse=True)
def _prototypes() -> None:
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors", UserWarning)
    warnings.filterwarnings("ignore", "Sparse .* tensor support is in beta", UserWarning)
    warnings.filterwarnings("ignore", "Lazy modules are a new feature", UserWarning)


# ---- empty tensors -----------------------------------------------------------------------------


def _experts(block: Block, x: Tensor) -> Tensor:
    """A mixture of two experts; the router sends every row to the first."""
    y = torch.zeros_like(x)
    for number, expert in enumerate((block.first, block.second)):
        rows = (torch.zeros(len(x)) == number).nonzero().squeeze(-1)
        y = y.index_add(0, rows, F.gelu(expert(x[rows])))
    return x + y


def _empty_columns(block: Block, x: Tensor) -> Tensor:
    empty = F.gelu(block.second(x)[:, 3:3]).sin() * 2
    return x + block.first(x) + empty.sum()


def _empty_pieces(block: Block, x: Tensor) -> Tensor:
    return torch.cat([F.gelu(block.first(piece)).sin() * piece for piece in x.split([0, ROWS, 0])])


def _empty_spectrum(block: Block, x: Tensor) -> Tensor:
    modes = torch.fft.rfft(block.second(x))[:, :0]
    return block.first(x) + modes.conj().abs().sum()


def _scalars(block: Block, x: Tensor) -> Tensor:
    return x * block.first(x).mean().exp() + block.second(x)[0, 0].sin()


EMPTY: dict[str, Compute] = {
    "expert without tokens": _experts,
    "columns of a matrix": _empty_columns,
    "pieces of a split": _empty_pieces,
    "spectrum": _empty_spectrum,
    "scalars": _scalars,
}


@EVERY
@pytest.mark.parametrize("kind", EMPTY)
def test_empty_tensors(kind: str, how: str) -> None:
    assert_same_bits(training(EMPTY[kind]), EVERY_WAY[how])


@EVERY
def test_empty_batch_and_empty_parameter(how: str) -> None:
    def program(offload: Offload) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = Net()
        model.blocks[0].nothing = nn.Parameter(torch.empty(0, WIDTH))
        return train(model, offload, x=batch(0))

    assert_same_bits(program, EVERY_WAY[how])


# ---- sparse tensors ----------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
}
BLOCKED: dict[str, Callable[[Tensor], Tensor]] = {
    "bsr": lambda matrix: matrix.to_sparse_bsr((2, 2)),
    "bsc": lambda matrix: matrix.to_sparse_bsc((2, 2)),
}


def _adjacency(layout: str) -> Tensor:
    matrix = (torch.rand(ROWS, ROWS, generator=torch.Generator().manual_seed(1)) > 0.5).float()
    return (LAYOUTS | BLOCKED)[layout](matrix)


def _graph_convolution(block: Block, x: Tensor) -> Tensor:
    return x + F.gelu(block.first(torch.mm(block.adjacency, x))) + block.second(x)


def _graph_network(layout: str, *, trained: bool) -> Callable[[Offload], list[Tensor | None]]:
    def program(offload: Offload) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = Net(_graph_convolution)
        for block in model.blocks:
            if trained:
                block.adjacency = nn.Parameter(_adjacency(layout))
            else:
                block.register_buffer("adjacency", _adjacency(layout))
        with offload(model):
            loss = model(batch()).sum()
            loss.backward()
            return [loss.detach(), *gradients(model)]

    return program


@EVERY
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_buffers(layout: str, how: str) -> None:
    assert_same_bits(_graph_network(layout, trained=False), EVERY_WAY[how])


@pytest.mark.parametrize("how", ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_parameters(layout: str, how: str) -> None:
    assert_same_bits(_graph_network(layout, trained=True), ACTIVATIONS[how])


@EVERY
@pytest.mark.parametrize("layout", BLOCKED)
def test_blocked_sparse_buffers(layout: str, how: str) -> None:
    """Torch's CPU kernels cannot multiply by them here, but a model may carry them."""

    def program(offload: Offload) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = Net(lambda block, x: block.first(block.adjacency.to_dense() @ x))
        for block in model.blocks:
            block.register_buffer("adjacency", _adjacency(layout))
        return train(model, offload)

    assert_same_bits(program, EVERY_WAY[how])


@pytest.mark.parametrize("layout", LAYOUTS | BLOCKED)
def test_sparse_weights_cannot_rest(layout: str) -> None:
    model = Net()
    model.blocks[1].adjacency = nn.Parameter(_adjacency(layout))
    with pytest.raises(PolicyError, match=r"blocks\.1\.adjacency"):
        ebbtide.offload(model, weights=WeightPolicy())
    with ebbtide.offload(model, weights=WeightPolicy(), layers=["blocks.0", "blocks.2"]):
        model(batch()).sum().backward()


def test_values_of_a_sparse_buffer_are_no_activations() -> None:
    """They are on the device anyway, as those of any buffer."""
    model = Net(lambda block, x: block.first(x) * block.held.values().view(ROWS, WIDTH))
    for block in model.blocks:
        block.register_buffer("held", batch().to_sparse_csr())
    with ebbtide.offload(model, activations=EVERYTHING) as handle:
        model(batch()).sum().backward()
    # Of each block, the linear layer's input leaves, and the values stay.
    assert handle.stats.offloaded_bytes == 3 * ROWS * WIDTH * 4


@EVERY
def test_sparse_gradients(how: str) -> None:
    def program(offload: Offload) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = Net(lambda block, x: x + block.table(torch.arange(ROWS)) + block.first(x))
        for block in model.blocks:
            block.table = nn.Embedding(10, WIDTH, sparse=True)
        return train(model, offload)

    assert_same_bits(program, EVERY_WAY[how])


def test_a_sparse_tensor_can_be_marked() -> None:
    for layout in LAYOUTS | BLOCKED:
        mark_not_offload(_adjacency(layout))


# ---- nested tensors ----------------------------------------------------------------------------


def _nested(x: Tensor, layout: torch.layout) -> Tensor:
    return torch.nested.as_nested_tensor([x[:3], x[3:]], layout=layout)


def _perceptron(block: Block, x: Tensor, layout: torch.layout) -> Tensor:
    return x + torch.cat(block.second(F.gelu(block.first(_nested(x, layout)))).unbind())


def _padded(block: Block, x: Tensor, layout: torch.layout) -> Tensor:
    y = F.gelu(block.second(_nested(x, layout)))
    return x + block.first(x) + torch.nested.to_padded_tensor(y, 0.0).sum()


def _attention(block: Block, x: Tensor, layout: torch.layout) -> Tensor:
    sentences = _nested(x, layout)
    query = block.first(sentences).unflatten(-1, [2, WIDTH // 2]).transpose(1, 2)
    key = block.second(sentences).unflatten(-1, [2, WIDTH // 2]).transpose(1, 2)
    y = F.scaled_dot_product_attention(query, key, key)
    return x + torch.cat(y.transpose(1, 2).flatten(-2).unbind())


NESTED = {
    "strided perceptron": (_perceptron, torch.strided),
    "jagged perceptron": (_perceptron, torch.jagged),
    "strided padded": (_padded, torch.strided),
    "jagged padded": (_padded, torch.jagged),
    "jagged attention": (_attention, torch.jagged),  # torch cannot unflatten the strided layout
}


@EVERY
@pytest.mark.parametrize("kind", NESTED)
def test_nested_tensors(kind: str, how: str) -> None:
    compute, layout = NESTED[kind]
    assert_same_bits(training(lambda block, x: compute(block, x, layout)), EVERY_WAY[how])


@EVERY
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_inputs_and_buffers(layout: torch.layout, how: str) -> None:
    def program(offload: Offload) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = Net(lambda block, x: x + F.gelu(block.first(x)))
        model.blocks[0].register_buffer("sentences", _nested(batch(), layout))
        x = torch.nested.nested_tensor(
            [batch()[:3], batch()[3:]], layout=layout, requires_grad=True
        )
        with offload(model):
            loss = torch.cat(model(x).unbind()).sum()
            loss.backward()
            return [loss.detach(), torch.cat(x.grad.unbind()), *gradients(model)]

    assert_same_bits(program, EVERY_WAY[how])


def test_the_values_of_jagged_tensors_leave() -> None:
    model = Net(lambda block, x: _perceptron(block, x, torch.jagged))
    with ebbtide.offload(model, activations=EVERYTHING) as handle:
        model(batch()).sum().backward()
    # Each block saves its input, the first layer's output and its GELU, all with ROWS rows.
    assert handle.stats.offloaded_bytes >= 3 * 3 * ROWS * WIDTH * 4


def test_nested_weights_cannot_rest() -> None:
    model = Net()
    model.blocks[0].nested = nn.Parameter(_nested(batch(), torch.strided))
    with pytest.raises(PolicyError):
        ebbtide.offload(model, weights=WeightPolicy())


# ---- lazy modules ------------------------------------------------------------------------------


def _lazy_net() -> Net:
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        block.first, block.second = nn.LazyLinear(WIDTH), nn.LazyLinear(WIDTH)
    return model


@pytest.mark.parametrize("how", ACTIVATIONS)
def test_lazy_modules(how: str) -> None:
    def program(offload: Offload) -> list[Tensor | None]:
        return train(_lazy_net(), offload)

    assert_same_bits(program, ACTIVATIONS[how])


def test_layers_of_lazy_modules_are_found() -> None:
    with ebbtide.offload(_lazy_net()) as handle:
        assert handle.layers == ("blocks.0", "blocks.1", "blocks.2")


@pytest.mark.parametrize("how", MAPPED_WEIGHTS | DEVICE_WEIGHTS)
def test_lazy_weights_rest_after_one_forward(how: str) -> None:
    offload = (MAPPED_WEIGHTS | DEVICE_WEIGHTS)[how]
    with pytest.raises(PolicyError), offload(_lazy_net()):
        pass

    def program(offload: Offload) -> list[Tensor | None]:
        model = _lazy_net()
        model(batch())
        return train(model, offload)

    assert_same_bits(program, offload)


# ---- parameters and buffers without plain memory -----------------------------------------------

BUFFERS: dict[str, Callable[[], Tensor]] = {
    "mkldnn": lambda: batch().to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(batch(), 0.1, 0, torch.qint8),
}


@EVERY
@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_in_other_formats(kind: str, how: str) -> None:
    def program(offload: Offload) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = Net(lambda block, x: block.first(x) * _plain(block.held) + block.second(x))
        for block in model.blocks:
            block.register_buffer("held", BUFFERS[kind]())
            block.register_buffer("absent", torch.empty(4, device="meta"))
        return train(model, offload)

    assert_same_bits(program, EVERY_WAY[how])


def _plain(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if tensor.is_quantized else tensor.to_dense()


@EVERY
def test_inputs_and_buffers_made_in_inference_mode(how: str) -> None:
    """Autograd saves none of them, but what is computed again may need them."""

    def program(offload: Offload) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = Net(lambda block, x: block.second(F.gelu(block.first(x + block.table.mean(0)))))
        with torch.inference_mode():
            x = batch() * 2
            for block in model.blocks:
                block.register_buffer("table", torch.randn(2048, WIDTH))
        return train(model, offload, x)

    assert_same_bits(program, EVERY_WAY[how])


def test_weights_made_in_inference_mode_cannot_rest() -> None:
    with torch.inference_mode():
        model = Net()
    with pytest.raises(PolicyError):
        ebbtide.offload(model, weights=WeightPolicy())
    with on_cpu(activations=EVERYTHING)(model), torch.no_grad():
        model(batch())
