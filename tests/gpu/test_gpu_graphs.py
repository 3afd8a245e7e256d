"""Graphs in every order, and on every stream, that autograd allows."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from gpu_bench import (
    TIGHT,
    assert_at_rest,
    batch,
    finish_device,
    join,
    mean_square,
    needs_accelerator,
    on_stream,
    side_stream,
    tower,
)
from zoo import Snapshot, assert_bitwise_equal

Steps = Callable[[nn.Module, torch.device], Snapshot]


def _inputs(device: torch.device, number: int) -> list[Tensor]:
    return [batch(device, seed=seed).requires_grad_() for seed in range(number)]


def _gradients(model: nn.Module, inputs: list[Tensor]) -> Snapshot:
    taken = {name: p.grad.clone() for name, p in model.named_parameters()}
    return taken | {f"input {n}": x.grad.clone() for n, x in enumerate(inputs)}


def _backward_on_another_stream(model: nn.Module, device: torch.device) -> Snapshot:
    (x,) = _inputs(device, 1)
    loss = mean_square(model(x))
    stream = side_stream(device)
    with on_stream(stream):
        loss.backward()
    join(stream)
    return _gradients(model, [x])


def _forward_on_another_stream(model: nn.Module, device: torch.device) -> Snapshot:
    (x,) = _inputs(device, 1)
    stream = side_stream(device)
    with on_stream(stream):
        loss = mean_square(model(x))
    join(stream)
    loss.backward()
    finish_device(device)  # x and the gradients go on to be used, and freed, on this stream
    return _gradients(model, [x])


def _whole_step_on_another_stream(model: nn.Module, device: torch.device) -> Snapshot:
    (x,) = _inputs(device, 1)
    stream = side_stream(device)
    with on_stream(stream):
        mean_square(model(x)).backward()
    join(stream)
    finish_device(device)
    return _gradients(model, [x])


def _retained_graph(model: nn.Module, device: torch.device) -> Snapshot:
    (x,) = _inputs(device, 1)
    loss = mean_square(model(x))
    for _ in range(2):
        loss.backward(retain_graph=True)
    loss.backward()
    return _gradients(model, [x])


def _double_backward(model: nn.Module, device: torch.device) -> Snapshot:
    """A gradient penalty."""
    (x,) = _inputs(device, 1)
    loss = mean_square(model(x))
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + 1e6 * first.square().sum()).backward()
    return _gradients(model, [x])


def _two_microbatches_alive(model: nn.Module, device: torch.device) -> Snapshot:
    """As one forward, one backward: the second forward comes before the first backward."""
    inputs = _inputs(device, 4)
    waiting = [mean_square(model(inputs[0]))]
    for x in inputs[1:]:
        waiting.append(mean_square(model(x)))
        waiting.pop(0).backward()
    waiting.pop().backward()
    return _gradients(model, inputs)


def _forwards_first(model: nn.Module, device: torch.device) -> Snapshot:
    inputs = _inputs(device, 4)
    losses = [mean_square(model(x)) for x in inputs]
    for number in (2, 0, 3, 1):
        losses[number].backward()
    return _gradients(model, inputs)


def _one_backward_for_all(model: nn.Module, device: torch.device) -> Snapshot:
    inputs = _inputs(device, 3)
    torch.stack([mean_square(model(x)) for x in inputs]).sum().backward()
    return _gradients(model, inputs)


def _dropped_graphs(model: nn.Module, device: torch.device) -> Snapshot:
    inputs = _inputs(device, 3)
    for x in inputs[:2]:
        model(x)
    inputs = inputs[2:]
    mean_square(model(inputs[0])).backward()
    return _gradients(model, inputs)


def _backward_of_a_part(model: nn.Module, device: torch.device) -> Snapshot:
    """Backward ends half-way; the other half is dropped."""
    (x,) = _inputs(device, 1)
    half = list(model[3:].parameters())
    found = torch.autograd.grad(mean_square(model(x)), half)
    return {str(number): gradient for number, gradient in enumerate(found)}


def _backward_in_another_thread(model: nn.Module, device: torch.device) -> Snapshot:
    (x,) = _inputs(device, 1)
    losses = [mean_square(model(x))]
    thread = threading.Thread(target=lambda: losses.pop().backward())
    thread.start()
    thread.join()
    finish_device(device)
    return _gradients(model, [x])


def _without_gradients(model: nn.Module, device: torch.device) -> Snapshot:
    """Evaluation between forward and backward."""
    (x,) = _inputs(device, 1)
    loss = mean_square(model(x))
    with torch.no_grad():
        evaluated = model(batch(device, seed=9))
    with torch.inference_mode():
        model(batch(device, seed=9))
    loss.backward()
    return _gradients(model, [x]) | {"evaluated": evaluated}


@pytest.mark.parametrize(
    "steps",
    [
        _backward_on_another_stream,
        _forward_on_another_stream,
        _whole_step_on_another_stream,
        _retained_graph,
        _double_backward,
        _two_microbatches_alive,
        _forwards_first,
        _one_backward_for_all,
        _dropped_graphs,
        _backward_of_a_part,
        _backward_in_another_thread,
        _without_gradients,
    ],
)
def test_same_bits(steps: Steps, device: torch.device) -> None:
    model = tower(device)
    expected = steps(model, device)
    model.zero_grad()
    with ebbtide.offload(model, activations=TIGHT) as handle:
        for _ in range(3):
            assert_bitwise_equal(steps(model, device), expected)
            model.zero_grad()
            assert_at_rest(handle)
        # What a backward with create_graph=True has read stays from the second step on.
        stays = steps is _double_backward
        assert (handle.stats.kept_bytes if stays else handle.stats.offloaded_bytes) > 0


@needs_accelerator
def test_model_that_moves_to_the_device_after_offload(device: torch.device) -> None:
    """`offload(model)` before `model.to(device)`, as many scripts are written."""
    expected = _retained_graph(tower(device), device)
    model = tower(torch.device("cpu"))
    with ebbtide.offload(model, activations=TIGHT) as handle:
        model.to(device)
        assert_bitwise_equal(_retained_graph(model, device), expected)
        assert_at_rest(handle)
        assert handle.stats.peak_host_bytes > 0
