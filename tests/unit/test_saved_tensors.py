"""The rules of saved tensors: what is shared, what comes back, what is noticed, what is let go."""

import copy
import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide import ActivationPolicy, SavedTensorModifiedError
from ebbtide.devices import CpuDevice
from ebbtide.stores import DiskStore, PinnedStore
from engine_bench import EngineBench, ParameterIndex
from waiting import wait_until

pytestmark = pytest.mark.usefixtures("frozen_imports")

MIB = 2**20


class Bench(EngineBench):
    """An engine on a store that can be looked into."""

    def __init__(self, store: DiskStore | PinnedStore, device: CpuDevice) -> None:
        policy = ebbtide.ActivationPolicy(min_bytes=1024, rebuild=False)
        super().__init__(device, store, 4 * MIB, policy)

    def _dropped(self) -> bool:
        return bool(self.store.used_bytes) and bool(getattr(self.store, "_dropped", ()))

    def settle(self) -> None:
        """Wait for the copies under way and let go of what they held."""
        # What a dropped slot still has in use is in use until the last reader is gone.
        wait_until(lambda: not self.is_copying() and not self._dropped(), "copies did not end")

    def is_copying(self) -> bool:
        now = self.in_flight
        return bool(now.offload_bytes or now.abandoned_buffers)


@pytest.fixture(params=["disk", "host"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    device = CpuDevice()
    store = DiskStore() if request.param == "disk" else PinnedStore(device)
    bench = Bench(store, device)
    yield bench
    gc.collect()  # tracebacks of the tests that raise
    bench.settle()
    assert bench.store.used_bytes == 0, "bytes were left in the store"
    bench.close()


class Probe(torch.autograd.Function):
    """Saves a tensor, and hands what backward gets of it to `seen`."""

    @staticmethod
    def forward(ctx, tensor, anchor, seen):
        ctx.save_for_backward(tensor)
        ctx.seen = seen
        return anchor * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.seen.append(ctx.saved_tensors[0])
        return None, gradient * 2, None


def _restored(bench: Bench, make: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """What was saved (kept aside by value and layout) and what backward got."""
    anchor = torch.ones(1, requires_grad=True)
    seen: list[Tensor] = []
    saved = make()
    reference = copy.deepcopy(saved) if not saved.is_conj() and not saved.is_neg() else saved
    out = bench.run(Probe.apply, saved, anchor, seen)
    del saved
    gc.collect()
    out.sum().backward()
    return reference, seen[0]


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.flatten().view(torch.uint8)


LAYOUTS = {
    "contiguous": lambda: torch.randn(64, 64),
    "transposed": lambda: torch.randn(64, 65).t(),
    "channels_last": lambda: torch.randn(2, 8, 16, 16).to(memory_format=torch.channels_last),
    "bfloat16": lambda: torch.randn(64, 64).bfloat16(),
    "float8": lambda: torch.randn(64, 64).to(torch.float8_e4m3fn),
    "float64": lambda: torch.randn(64, 64, dtype=torch.float64),
    "bool": lambda: torch.randn(64, 64) > 0,
    "int64": lambda: torch.randint(0, 99, (64, 64)),
    "complex": lambda: torch.randn(64, 64, dtype=torch.complex64),
    "complex conjugate": lambda: torch.randn(64, 64, dtype=torch.complex64).conj(),
    "negative imaginary": lambda: torch.randn(64, 64, dtype=torch.complex64).conj().imag,
    "real part": lambda: torch.randn(64, 64, dtype=torch.complex64).real,
    "spectrum": lambda: torch.fft.rfft2(torch.randn(4, 32, 32))[..., :8, :5],
    "middle slice": lambda: torch.randn(9, 64, 64)[3:5],
    "strided slice": lambda: torch.randn(64, 256)[::3, 5::7],
    "storage offset": lambda: torch.randn(64 * 64 + 3)[3:],
    "expanded": lambda: torch.randn(1, 1024).expand(512, 1024),
    "expanded slice": lambda: torch.randn(8, 1024)[2:3].expand(512, 1024),
    "overlapping windows": lambda: torch.randn(4096).unfold(0, 64, 16),
    "zero size": lambda: torch.randn(0, 64),
    "scalar of a large storage": lambda: torch.randn(64, 64)[3, 4],
    "half": lambda: torch.randn(64, 64)[:32],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_comes_back_as_it_was(bench: Bench, layout: str) -> None:
    torch.manual_seed(0)
    reference, restored = _restored(bench, LAYOUTS[layout])
    assert restored.dtype == reference.dtype
    assert restored.shape == reference.shape
    assert restored.stride() == reference.stride()
    assert restored.storage_offset() == reference.storage_offset()
    assert restored.is_conj() == reference.is_conj()
    assert restored.is_neg() == reference.is_neg()
    assert torch.equal(_bits(restored), _bits(reference))


def test_expanded_tensor_moves_its_storage_only(bench: Bench) -> None:
    _restored(bench, LAYOUTS["expanded"])
    assert bench.stats.offloaded_bytes == 1024 * 4
    assert bench.stats.saved_bytes == 512 * 1024 * 4


def test_small_slice_moves_itself_and_not_its_storage(bench: Bench) -> None:
    _restored(bench, lambda: torch.randn(1000, 64)[10:20])
    assert bench.stats.offloaded_bytes == 10 * 64 * 4


def test_large_slice_moves_its_whole_storage(bench: Bench) -> None:
    x = torch.randn(1000, 64, requires_grad=True)
    bench.run(lambda x: (x * 1.5)[:600].square().sum(), x).backward()
    assert bench.stats.offloaded_bytes == 1000 * 64 * 4


def test_slice_of_memory_that_the_graph_has_not_made_moves_itself(bench: Bench) -> None:
    _restored(bench, lambda: torch.randn(1000, 64)[:600])
    assert bench.stats.offloaded_bytes == 600 * 64 * 4


def test_one_storage_saved_many_times_moves_once(bench: Bench) -> None:
    x = torch.randn(64, 64, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        h = x * 1.5  # saves nothing of x
        return (h * h).sum() + (h.view(-1) * h.t().reshape(-1)).sum() + h.exp().sum()

    out = bench.run(function, x)
    out.backward()
    # h: twice by h * h, once as its view; beside it the transposed copy, and exp's own result.
    assert bench.stats.num_saved == 5
    assert bench.stats.offloaded_bytes == 3 * 64 * 64 * 4
    assert bench.stats.reloaded_bytes <= bench.stats.offloaded_bytes
    y = x.detach().clone().requires_grad_()
    function(y).backward()
    assert torch.equal(x.grad, y.grad)


def test_same_storage_at_another_version_is_another_record(bench: Bench) -> None:
    x = torch.randn(64, 64)
    anchor = torch.ones(1, requires_grad=True)
    before = x.clone()
    seen: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        # Function.apply's own save is checked when unpacked, so only the second one is unpacked.
        first = Probe.apply(x, anchor, [])
        x.add_(1)
        second = Probe.apply(x, anchor, seen)
        del first
        return second

    bench.run(function, x).sum().backward()
    assert torch.equal(seen[0], before + 1)
    assert bench.stats.num_offloaded == 2


@pytest.mark.parametrize("when", ["at once", "after the copy is complete"])
def test_modification_in_place_is_noticed(bench: Bench, when: str) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    kept: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        h = x * 2
        kept.append(h)
        return (h * h).sum()

    out = bench.run(function, x)
    if when != "at once":
        bench.settle()
    with torch.no_grad():
        kept[0].add_(1)
    with pytest.raises(SavedTensorModifiedError, match=r"\(64, 64\).*version 0 is at version 1"):
        out.backward()
    del out


def test_modification_of_a_kept_or_parameter_tensor_is_noticed() -> None:
    model = nn.Linear(4, 4)
    with ebbtide.offload(model):
        x = torch.randn(2, 4, requires_grad=True)
        out = model(x)
        with torch.no_grad():
            model.weight.add_(1)
        with pytest.raises(SavedTensorModifiedError):
            out.sum().backward()


def test_two_graphs_alive_and_backward_in_either_order(bench: Bench) -> None:
    inputs = [torch.randn(64, 64, requires_grad=True) for _ in range(3)]
    outs = [bench.run(lambda x: (x.exp() * x.sin()).sum(), x) for x in inputs]
    for number in (1, 2, 0):
        outs[number].backward()
    for x in inputs:
        y = x.detach().clone().requires_grad_()
        (y.exp() * y.sin()).sum().backward()
        assert torch.equal(x.grad, y.grad)
    del outs


def test_retain_graph_backs_up_twice(bench: Bench) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    out = bench.run(lambda x: x.exp().sin().sum(), x)
    out.backward(retain_graph=True)
    once = x.grad.clone()
    out.backward()
    assert torch.equal(x.grad, 2 * once)
    del out


def test_double_backward(bench: Bench) -> None:
    def second_derivative(x: Tensor, run: Callable[..., Tensor]) -> Tensor:
        out = run(lambda x: (x.sin() * x.exp()).sum(), x)
        (first,) = torch.autograd.grad(out, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return second

    x = torch.randn(64, 64, requires_grad=True)
    expected = second_derivative(x, lambda function, x: function(x))
    assert torch.equal(second_derivative(x, bench.run), expected)


def test_backwards_that_make_graphs_share_what_was_reloaded(bench: Bench) -> None:
    """The first graph holds what it has read: reloaded again, the bytes would be there twice."""
    x = torch.randn(64, 64, requires_grad=True)
    out = bench.run(lambda x: (x.sin() * x.exp()).sum(), x)
    bench.settle()
    slopes = [torch.autograd.grad(out, x, create_graph=True)[0] for _ in range(3)]
    assert bench.in_flight.reload_bytes == bench.store.used_bytes
    (second,) = torch.autograd.grad(sum(slope.square().sum() for slope in slopes) + out, x)
    del out, slopes
    assert bench.stats.reloaded_bytes == bench.stats.offloaded_bytes > 0
    assert bench.in_flight.reload_bytes == 0

    y = x.detach().requires_grad_()
    out = (y.sin() * y.exp()).sum()
    slopes = [torch.autograd.grad(out, y, create_graph=True)[0] for _ in range(3)]
    expected = torch.autograd.grad(sum(slope.square().sum() for slope in slopes) + out, y)
    assert torch.equal(second, *expected)


def test_dropped_graph_leaves_nothing_behind(bench: Bench) -> None:
    x = torch.randn(256, 256, requires_grad=True)
    gc.disable()
    try:
        for _ in range(5):
            out = bench.run(lambda x: x.exp().sin().exp().sum(), x)
            del out
        bench.settle()
        assert bench.store.used_bytes == 0
        assert bench.in_flight.is_idle
    finally:
        gc.enable()


def test_exception_in_forward_leaves_nothing_behind(bench: Bench) -> None:
    x = torch.randn(64, 64, requires_grad=True)

    def fail(x: Tensor) -> Tensor:
        x.exp().sin().sum()
        raise KeyError("half-way")

    with pytest.raises(KeyError):
        bench.run(fail, x)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    out = bench.run(lambda x: x.exp().sum(), x)
    out.backward()
    assert torch.equal(x.grad, x.detach().exp())
    del out


def test_exception_in_backward_leaves_nothing_behind(bench: Bench) -> None:
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # noqa: ARG004
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):  # noqa: ARG004
            raise KeyError("half-way back")

    x = torch.randn(64, 64, requires_grad=True)
    out = bench.run(lambda x: Fail.apply(x.exp()).sin().sum(), x)
    with pytest.raises(KeyError):
        out.backward()
    del out


def test_backward_in_another_thread(bench: Bench) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    out = bench.run(lambda x: x.exp().sin().sum(), x)
    thread = threading.Thread(target=out.backward)
    thread.start()
    thread.join()
    y = x.detach().clone().requires_grad_()
    y.exp().sin().sum().backward()
    assert torch.equal(x.grad, y.grad)
    del out, thread


def test_forward_and_backward_in_several_threads_at_once(bench: Bench) -> None:
    """Each thread owns a graph; they meet in the session, its lock and its store."""
    inputs = [torch.randn(128, 128, requires_grad=True) for _ in range(4)]
    outs = [bench.run(lambda x: x.exp().sin().exp().sum(), x) for x in inputs]
    threads = [threading.Thread(target=out.backward) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x in inputs:
        y = x.detach().clone().requires_grad_()
        y.exp().sin().exp().sum().backward()
        assert torch.equal(x.grad, y.grad)
    del outs, threads


def test_what_backward_has_written_to_is_not_read_again(bench: Bench) -> None:
    """A custom backward that works in place must not change what another one reads."""

    class Spoil(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sum()

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient * x.mul_(2)

    x = torch.randn(64, 64, requires_grad=True)
    out = bench.run(lambda x: Spoil.apply(x * 1), x)
    bench.settle()
    out.backward(retain_graph=True)
    assert torch.equal(x.grad, 2 * x.detach())
    with pytest.raises(ebbtide.SavedTensorModifiedError):
        out.backward()
    del out


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inside(reentrant: bool) -> None:
    model = _Checkpointed(reentrant)
    _compare_model(model, torch.randn(64, 64, requires_grad=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_the_offloaded_model(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(64, 64, requires_grad=True)
    _compare_model(model, x, lambda x: checkpoint(model, x, use_reentrant=reentrant))


class _Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def _compare_model(
    model: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor] | None = None
) -> None:
    call = call or model
    call(x).square().sum().backward()
    expected = [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
    x.grad = None
    model.zero_grad()
    with ebbtide.offload(model, activations=ActivationPolicy(min_bytes=0)):
        call(x).square().sum().backward()
    for got, plain in zip([x.grad, *(p.grad for p in model.parameters())], expected, strict=True):
        assert torch.equal(got, plain)


def test_gradient_accumulation_over_microbatches() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    batches = [torch.randn(64, 64) for _ in range(4)]

    def accumulate() -> list[Tensor]:
        model.zero_grad()
        for batch in batches:
            model(batch).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = accumulate()
    with ebbtide.offload(model, activations=ActivationPolicy(min_bytes=0)):
        for got, plain in zip(accumulate(), expected, strict=True):
            assert torch.equal(got, plain)


def test_no_hooks_where_autograd_does_not_record() -> None:
    model = nn.Linear(64, 64)
    seen = []
    model.register_forward_hook(
        lambda *_: seen.append(torch._C._autograd._top_saved_tensors_default_hooks(True))
    )
    inner = nn.Sequential(model)
    with ebbtide.offload(inner, activations=ActivationPolicy(min_bytes=0)) as handle:
        with torch.no_grad():
            inner(torch.randn(64, 64))
        with torch.inference_mode():
            inner(torch.randn(64, 64))
        assert seen == [None, None]
        inner(torch.randn(64, 64))
        assert seen[2] is not None
    assert handle.stats.num_saved > 0


VIEWS_AND_COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda w: w.to(torch.float64),
    "clone": lambda w: w.clone(),
    "t": lambda w: w.t(),
    "mT": lambda w: w.mT,
    "transpose": lambda w: w.transpose(0, 1),
    "permute": lambda w: w.permute(1, 0),
    "view": lambda w: w.view(4),
    "reshape": lambda w: w.t().reshape(4),
    "view_as": lambda w: w.view_as(w),
    "_unsafe_view": lambda w: torch.ops.aten._unsafe_view(w, [4]),
    "_reshape_alias": lambda w: torch.ops.aten._reshape_alias(w, [4], [1]),
    "alias": lambda w: torch.ops.aten.alias(w),
    "expand": lambda w: w.expand(2, 2, 2),
    "select": lambda w: w[0],
    "slice": lambda w: w[:1],
    "unsqueeze": lambda w: w.unsqueeze(0),
    "squeeze": lambda w: w.squeeze(),
    "squeeze of one": lambda w: w.squeeze(0),
    "squeeze of some": lambda w: w.squeeze((0, 1)),
    "unbind": lambda w: w.unbind()[0],
    "split": lambda w: torch.split(w, 1)[0],
    "split with sizes": lambda w: torch.split(w, [1, 1])[0],
    "diagonal": lambda w: w.diagonal(),
    "as_strided": lambda w: w.as_strided((2,), (1,)),
    "view_as_complex": lambda w: torch.view_as_complex(w),
    "real": lambda w: torch.view_as_complex(w).real,
    "conj": lambda w: torch.view_as_complex(w).conj(),
    "as autocast": lambda w: w.to(torch.bfloat16).t(),
}


@pytest.mark.parametrize("name", VIEWS_AND_COPIES)
def test_views_and_copies_of_a_parameter_are_no_activations(name: str) -> None:
    """By the names of nodes, which each version of torch must give these operations."""
    layer = nn.Linear(2, 2)
    index = ParameterIndex([layer])
    index.refresh()
    assert index.owns(VIEWS_AND_COPIES[name](layer.weight), 0)
    assert not index.owns(VIEWS_AND_COPIES[name](layer.weight * 2), 0)


class Squared(nn.Module):
    """Saves a tensor three times: twice by a product with itself, once by its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x * self.weight)
        return x * x


def test_what_is_saved_several_times_is_reloaded_once() -> None:
    model = Squared()
    policy = ActivationPolicy(min_bytes=1, rebuild=False)
    with ebbtide.offload(model, activations=policy) as handle:
        for _ in range(2):
            model(torch.randn(64, 64)).sum().backward()
        assert handle.stats.offloaded_bytes == 2 * 64 * 64 * 4
        # What has not left yet when backward reads it is not reloaded.
        assert handle.stats.reloaded_bytes <= handle.stats.offloaded_bytes
