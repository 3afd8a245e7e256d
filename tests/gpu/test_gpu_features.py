"""What torch can do to a model besides running it, with its activations offloaded."""

import contextlib
import importlib.util
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import ebbtide
from gpu_bench import (
    DRY_RUN,
    OFFLOADED_BYTES,
    SIZE_BYTES,
    TIGHT,
    assert_at_rest,
    assert_parity,
    batch,
    take_step,
    tower,
)
from zoo import Snapshot, assert_bitwise_equal, deterministic

# ---- autocast -----------------------------------------------------------------------------------


def _train(device: torch.device, dtype: torch.dtype, offloaded: bool) -> Snapshot:
    """Every parameter after three optimizer steps under autocast."""
    model = tower(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    context = ebbtide.offload(model, activations=TIGHT) if offloaded else None
    with context or contextlib.nullcontext():
        for number in range(3):
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype):
                loss = model(batch(device, seed=number)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    if context is not None:
        # Of six layers the inputs and the linear maps' results, in half precision: 12 x 256 KiB.
        # The first input comes in single precision, and autocast saves its cast copy.
        assert context.stats.offloaded_bytes == 12 * SIZE_BYTES // 2
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_three_scaled_steps_under_autocast(dtype: torch.dtype, device: torch.device) -> None:
    trained = _train(device, dtype, offloaded=True)
    assert_bitwise_equal(trained, _train(device, dtype, offloaded=False))
    for name, parameter in tower(device).named_parameters():
        assert not torch.equal(trained[name], parameter), f"{name} was not trained"


# ---- torch.compile ------------------------------------------------------------------------------


def _backend(model: nn.Module) -> str:
    """The default compiler, or one that traces and partitions, but generates no code."""
    device_type = next(model.parameters()).device.type
    if DRY_RUN or not _has_code_generator(device_type):
        return "aot_eager"
    if importlib.util.find_spec("triton") is None:
        pytest.skip("no compiler: triton is not installed")
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no compiler: triton finds neither cc, gcc nor clang")
    return "inductor"


def _has_code_generator(device_type: str) -> bool:
    init_backend_registration()
    return get_scheduling_for_device(device_type) is not None


def _compiled_layers(model: nn.Sequential) -> nn.Module:
    for number, layer in enumerate(model):
        model[number] = torch.compile(layer, backend=_backend(layer))
    return model


def _layers_compiled_in_place(model: nn.Sequential) -> nn.Module:
    for layer in model:
        layer.compile(backend=_backend(layer))
    return model


def _model_compiled_in_place(model: nn.Sequential) -> nn.Module:
    model.compile(backend=_backend(model))
    return model


def _compiled_model(model: nn.Sequential) -> nn.Module:
    return torch.compile(model, backend=_backend(model))


def _compiled_forward(model: nn.Sequential) -> nn.Module:
    model.forward = torch.compile(model.forward, backend=_backend(model))
    return model


@pytest.mark.parametrize(
    ("compiled", "warns"),
    [
        (_compiled_layers, False),
        (_layers_compiled_in_place, False),
        (_compiled_model, True),
        (_model_compiled_in_place, True),
        (_compiled_forward, True),
    ],
)
def test_compiled(
    compiled: Callable[[nn.Sequential], nn.Module], warns: bool, device: torch.device
) -> None:
    torch.compiler.reset()
    model = compiled(tower(device, num_layers=3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stats = assert_parity(model, batch(device))
    assert warns == any("compiled as one region" in str(w.message) for w in caught)
    # What the compiler saves is its own choice, but each layer's input is among it.
    assert stats.offloaded_bytes >= SIZE_BYTES


# ---- checkpoint ---------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, layers: nn.Sequential, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpoint_inside(reentrant: bool, device: torch.device) -> None:
    assert_parity(Checkpointed(tower(device), reentrant), batch(device))


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpoint_around(reentrant: bool, device: torch.device) -> None:
    model = tower(device)
    assert_parity(model, batch(device), lambda x: checkpoint(model, x, use_reentrant=reentrant))


# ---- rebuilding ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [0, None], ids=["nothing moves", "the rest moves"])
def test_rebuilt_instead_of_moved(num_layers: int | None, device: torch.device) -> None:
    policy = replace(TIGHT, rebuild=True, num_layers=num_layers)
    stats = assert_parity(tower(device), batch(device), activations=policy)
    # Five GELUs' results are another layer's input. The sixth is saved by the loss, if at all.
    assert stats.rebuilt_bytes == 5 * SIZE_BYTES
    assert stats.offloaded_bytes == (OFFLOADED_BYTES - 5 * SIZE_BYTES if num_layers is None else 0)


# ---- layouts and types --------------------------------------------------------------------------


class ConvLayer(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())


def test_channels_last(device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(ConvLayer() for _ in range(3)))
    model.to(device, memory_format=torch.channels_last)
    x = torch.randn(4, 16, 64, 64).to(device, memory_format=torch.channels_last)
    with deterministic():
        stats = assert_parity(model, x)
    # Every layer saves what its convolution and its group norm take: 4 x 16 x 64 x 64 floats each.
    assert stats.offloaded_bytes >= 6 * x.nbytes


class Spectral(nn.Module):
    """A layer of an FNO: some of the modes times a complex weight. Saves slices and conjugates."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        weight = torch.randn(channels, channels, modes, modes, dtype=torch.complex64)
        self.weight = nn.Parameter(weight / channels)
        self.modes = modes

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(x)
        low = spectrum[..., : self.modes, : self.modes]
        mixed = torch.einsum("bixy,ioxy->boxy", low, self.weight) * low.conj()
        filled = torch.zeros_like(spectrum)
        filled[..., : self.modes, : self.modes] = mixed
        return x + torch.fft.irfft2(filled, s=x.shape[-2:])


def test_complex_tensors_and_fft(device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Spectral(8, 12) for _ in range(3))).to(device)
    x = torch.randn(4, 8, 64, 64).to(device)
    with deterministic():
        stats = assert_parity(model, x)
    # Each layer saves at least the low modes: 4 x 8 x 12 x 12 complex numbers of 8 bytes.
    assert stats.offloaded_bytes >= 3 * 4 * 8 * 12 * 12 * 8


@pytest.fixture
def mesh(tmp_path: Path, device: torch.device) -> Iterator[DeviceMesh]:
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_backend_available(backend):
        pytest.skip(f"torch was built without {backend}")
    dist.init_process_group(
        backend, init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield DeviceMesh(device.type, [0])
    dist.destroy_process_group()


class Elementwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x.sin() * x).exp() * 2


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_dtensor_on_one_rank(
    placement: Shard | Replicate, mesh: DeviceMesh, device: torch.device
) -> None:
    model = Elementwise().to(device)
    # Without a source of data: one rank has it all, and not every device has collectives.
    x = distribute_tensor(batch(device), mesh, [placement], src_data_rank=None)
    plain, offloaded = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(plain).sum().backward()
    with ebbtide.offload(model, activations=TIGHT) as handle:
        model(offloaded).sum().backward()
        # sin and the product save x, the product also sin(x), exp its result: three storages.
        assert handle.stats.offloaded_bytes == 3 * SIZE_BYTES
        assert_at_rest(handle)
    assert isinstance(offloaded.grad, DTensor)
    assert offloaded.grad.placements == plain.grad.placements
    assert_bitwise_equal({"x": offloaded.grad.to_local()}, {"x": plain.grad.to_local()})


def test_model_goes_on_after_detach(device: torch.device) -> None:
    """As if it had never been offloaded."""
    model = tower(device)
    expected = take_step(model, batch(device, seed=5))
    assert_parity(model, batch(device))
    assert_bitwise_equal(take_step(model, batch(device, seed=5)), expected)


# ---- attention ----------------------------------------------------------------------------------


class _Attention(nn.Module):
    """A layer whose attention's kernel saves memory that it has not filled."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(256, 3 * 256)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(1, len(x), 3, 8, 32).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + mixed.transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_attention_is_recomputed(kernel: str, dtype: torch.dtype, device: torch.device) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(0)
    model = nn.Sequential(*(_Attention() for _ in range(8))).to(device, dtype)
    x = batch(device, rows=500).to(dtype)  # some kernels pad it to a multiple of 32
    with (
        deterministic(warn_only=False),
        sdpa_kernel([getattr(SDPBackend, kernel), SDPBackend.MATH]),
    ):
        expected = take_step(model, x)
        policy = replace(TIGHT, mode="recompute")
        with warnings.catch_warnings(), ebbtide.offload(model, activations=policy) as handle:
            warnings.filterwarnings("error", ".*not-recomputed")
            for number in range(4):
                # Freed memory has other garbage each time.
                torch.full((2**22,), number, dtype=torch.float32, device=device)
                assert_bitwise_equal(take_step(model, x), expected)
            assert handle.stats.recomputed_bytes > 0
