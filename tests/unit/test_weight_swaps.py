"""Weights at rest that a program swaps by pointer keep all sharing and give the same bits."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.devices import SimulatedDevice, simulated
from ebbtide.stores import PinnedStore
from loops import on_device
from saying import warned
from weight_swaps import (
    SWAPS,
    WITHOUT_GRAPH,
    Tied,
    batch,
    differentiate_in_threads,
    make,
    swap_while_a_graph_is_alive,
    train_and_swap,
)

CPU = torch.device("cpu")


@contextlib.contextmanager
def offloaded(
    model: nn.Module, kind: str, directory: Path, *, eagerness: float = 0.1
) -> Iterator[ebbtide.OffloadHandle]:
    device, _, buffers = kind.partition(", ")
    policy = ebbtide.WeightPolicy(double_buffering=buffers != "one buffer")
    if device == "cpu":
        with ebbtide.offload(model, weights=policy, store=f"disk:{directory}") as handle:
            yield handle
        return
    made = SimulatedDevice(0, eagerness=eagerness)
    with on_device(made, lambda: PinnedStore(made, slab_bytes=2**16)):
        handle = ebbtide.offload(model, weights=policy)
    yield handle
    handle.detach()
    made.finish_copies()
    assert made.allocated_bytes() == 0


KINDS = ("cpu", "cpu, one buffer", "simulated", "simulated, one buffer")


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SWAPS)
def test_an_average_is_swapped_in_and_out(
    name: str, kind: str, trains: bool, tmp_path: Path
) -> None:
    plain, model = make(), make()
    expected = train_and_swap(plain, SWAPS[name], CPU, trains=trains)
    with offloaded(model, kind, tmp_path):
        found = train_and_swap(model, SWAPS[name], CPU, trains=trains)
    assert [torch.equal(*pair) for pair in zip(found, expected, strict=True)] == [True] * len(found)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("kind", KINDS[::2])
@pytest.mark.parametrize("name", sorted(SWAPS.keys() - WITHOUT_GRAPH))
def test_a_swap_between_forward_and_backward(name: str, kind: str, tmp_path: Path) -> None:
    plain, model = make(), make()
    expected = swap_while_a_graph_is_alive(plain, SWAPS[name], CPU)
    with offloaded(model, kind, tmp_path):
        found = swap_while_a_graph_is_alive(model, SWAPS[name], CPU)
    assert [torch.equal(*pair) for pair in zip(found, expected, strict=True)] == [True] * len(found)


def test_threads_differentiate_one_graph(tmp_path: Path) -> None:
    model = make()
    with offloaded(model, "cpu", tmp_path):
        found = differentiate_in_threads(model, CPU)
    assert len(found) == 1 + 3 * 6
    assert all(all(map(torch.equal, each, found[0])) for each in found)


def test_one_graph_is_differentiated_within_its_own_backward(tmp_path: Path) -> None:
    """The inner backward takes nothing from the outer one, and copies are late."""
    plain, model = make(), make()

    def run(net: Tied) -> list[Tensor]:
        found: list[Tensor] = []
        loss = net(batch(0, CPU)).square().mean()
        parameters = list(net.parameters())

        def again(gradient: Tensor) -> None:
            found.append(gradient.clone())
            if len(found) == 1:
                inner = torch.autograd.grad(loss, parameters, retain_graph=True)
                found.extend(each.clone() for each in inner)

        hook = net.blocks[1][0].bias.register_hook(again)
        loss.backward(retain_graph=True)
        hook.remove()
        return [*found, *(p.grad.clone() for p in parameters if p.grad is not None)]

    expected = run(plain)
    with offloaded(model, "simulated", tmp_path):
        found = run(model)
    assert len(expected) > 2 * len(list(plain.parameters()))
    assert [torch.equal(*pair) for pair in zip(found, expected, strict=True)] == [True] * len(found)


def test_a_thread_does_not_take_what_another_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have sent a gradient; the first one's wait ends when the second waits or is through."""
    plain, model = make(), make()
    sent, waits, through, lock = *(threading.Event() for _ in range(3)), threading.Lock()
    found: list[Tensor] = []

    def differentiate() -> None:
        layer = model.blocks[1][0]
        got = torch.autograd.grad(loss, [layer.weight, layer.bias], retain_graph=True)
        found.extend([gradient.clone() for gradient in got])  # at once: the other thread does, too
        through.set()

    second = threading.Thread(target=differentiate)

    def between(_: Tensor) -> None:  # both gradients are sent, and the bias's has arrived
        if threading.current_thread() is second:
            sent.set()
            waits.wait(60)
        else:
            second.start()
            sent.wait(60)

    synchronize = simulated._CopyEvent.synchronize

    def wait(event: simulated._CopyEvent) -> None:
        if sent.is_set() and event.lane == "d2h":
            (through if threading.current_thread() is second else waits).set()
            through.wait(60)
        with lock:
            synchronize(event)

    loss = plain(batch(0, CPU)).square().mean()
    expected = torch.autograd.grad(loss, [plain.blocks[1][0].weight, plain.blocks[1][0].bias])
    monkeypatch.setattr(simulated._CopyEvent, "synchronize", wait)
    with offloaded(model, "simulated", tmp_path, eagerness=0.0):
        loss = model(batch(0, CPU)).square().mean()
        model.blocks[1][0].bias.register_hook(between)
        differentiate()
        second.join()
    assert len(found) == 4
    assert all(map(torch.equal, found, [*expected, *expected]))


def _flat(model: Tied) -> Tensor:
    """All weights are views of one vector, which the program holds."""
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector, model.parameters())
    return vector


def _between_processes(model: Tied) -> Tensor:
    model.share_memory()
    return torch.from_numpy(model.blocks[1][0].weight.detach().numpy())


def _of_numpy(model: Tied) -> Tensor:
    array = model.blocks[1][0].weight.detach().numpy().copy()
    model.blocks[1][0].weight.data = torch.from_numpy(array)
    return torch.from_numpy(array)


def _in_a_state(model: Tied) -> Tensor:
    return model.state_dict()["blocks.1.0.weight"]


def _by_another_parameter(model: Tied) -> Tensor:
    model.blocks[1][0].bias.data = model.blocks[1][0].weight.data[0]
    return model.blocks[1][0].bias.detach()


SHARING = (_flat, _between_processes, _of_numpy, _in_a_state, _by_another_parameter)


@pytest.mark.parametrize("kind", KINDS[::2])
@pytest.mark.parametrize("share", SHARING, ids=lambda share: share.__name__[1:])
def test_offload_keeps_sharing(share: Callable[[Tied], Tensor], kind: str, tmp_path: Path) -> None:
    """The program changes the weights through what it holds, and sees them change in it."""
    plain, model = make(), make()

    def run(net: Tied, held: Tensor) -> list[Tensor]:
        found = []
        for step in range(2):
            net.zero_grad()
            net(batch(step, CPU)).square().mean().backward()
            torch.optim.SGD(net.parameters(), lr=0.1).step()
            found.append(held.clone())
            held.mul_(0.5)
            with torch.no_grad():
                found.append(net(batch(step, CPU)))
        return found

    expected, held = run(plain, share(plain)), share(model)
    if share in (_flat, _between_processes):
        with pytest.raises(ebbtide.PolicyError, match=r"blocks\.0\.0\.weight.*clone"):
            ebbtide.offload(model, weights=ebbtide.WeightPolicy())
        found = run(model, held)
    else:
        with contextlib.ExitStack() as stack:
            with pytest.warns(RuntimeWarning, match="blocks.1.0.weight.*shared-weights"):
                handle = stack.enter_context(offloaded(model, kind, tmp_path))
            rest = {parameter.name for parameter in handle.inspect().parameters}
            assert "blocks.0.0.weight" in rest
            assert "blocks.1.0.weight" not in rest
            found = run(model, held)
    assert [torch.equal(*pair) for pair in zip(found, expected, strict=True)] == [True] * len(found)


def test_what_nobody_shares_is_offloaded(tmp_path: Path) -> None:
    """Neither parts of memory that nobody holds nor a file that was mapped."""
    model = make()
    _flat(model)  # the vector itself goes
    torch.save(model.blocks[2].state_dict(), tmp_path / "weights.pt")
    mapped = torch.load(tmp_path / "weights.pt", mmap=True)
    model.blocks[2].load_state_dict(mapped, assign=True)
    del mapped
    with offloaded(model, "cpu", tmp_path) as handle:
        assert len(handle.inspect().parameters) == len(list(model.parameters()))


def test_a_weight_in_a_graph_without_a_backward_stays(tmp_path: Path) -> None:
    """Its gradient is right, and the next offload takes the weight."""
    plain, model = make(), make()
    plain(batch(0, CPU)).square().mean().backward()
    loss = model(batch(0, CPU)).square().mean()
    with contextlib.ExitStack() as stack:
        with warned("shared-weights"):
            stack.enter_context(offloaded(model, "cpu", tmp_path))
        loss.backward()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
    del loss
    with offloaded(model, "cpu", tmp_path) as handle:
        assert len(handle.inspect().parameters) == len(list(model.parameters()))


def test_what_nobody_can_reach_shares_nothing(tmp_path: Path) -> None:
    model = make()
    garbage: dict[str, Any] = {"state": model.state_dict()}
    garbage["itself"] = garbage
    gc.disable()
    try:
        del garbage
        with offloaded(model, "cpu", tmp_path) as handle:
            assert len(handle.inspect().parameters) == len(list(model.parameters()))
    finally:
        gc.enable()


def test_sharing_by_values_of_a_sparse_tensor_is_seen() -> None:
    model = make()
    values = model.state_dict().values()
    held = [torch.sparse_coo_tensor(torch.arange(len(each))[None], each) for each in values]
    with pytest.raises(ebbtide.PolicyError):
        ebbtide.offload(model, weights=ebbtide.WeightPolicy())
    assert len(held) == len(list(model.parameters()))


@pytest.mark.parametrize("share", ["after", "vector"])
def test_sharing_that_begins_after_offload_is_kept(share: str, tmp_path: Path) -> None:
    """Also after detach, on a CPU."""
    plain, model = make(), make()

    def run(net: Tied) -> list[Tensor]:
        if share == "vector":
            held = _flat(net)
        else:
            net.share_memory()
            held = net.blocks[1][0].weight.data
        with torch.no_grad():
            before = net(batch(0, CPU))
            held.mul_(0.5)
            return [before, net(batch(0, CPU)), held]

    expected = run(plain)
    for kind in KINDS[::2]:
        model = make()
        with offloaded(model, kind, tmp_path):
            found = run(model)
        assert all(map(torch.equal, found, expected)), kind
    model = make()
    with offloaded(model, "cpu", tmp_path):
        held = run(model)[-1]
    held.mul_(0.5)
    plain_held = expected[-1]
    plain_held.mul_(0.5)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
