"""What is decided about sharded models in one process; tests/parity/test_sharded.py trains them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import ebbtide
from ebbtide import ActivationPolicy, PolicyError, WeightPolicy
from ebbtide.runtime.parameter_index import find_device

WIDTH, ROWS = 64, 128
POLICY = ActivationPolicy(min_bytes=1024, rebuild=False)


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def test_shards_on_the_host_are_computed_with_on_the_device_of_their_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As FSDP2's CPUOffloadPolicy has it, between a forward and the next."""
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    mesh = DeviceMesh("cuda", [0], _init_backend=False)
    shard = torch.zeros(4, 4)
    meta = TensorMeta(shard.shape, shard.stride(), shard.dtype)
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(DTensor(shard, spec, requires_grad=False))
    assert model.weight.device == torch.device("cpu")
    assert find_device([model]) == torch.device("cuda", 3)


class Detaching(nn.Module):
    """Reads a parameter so that nothing in autograd's graph tells that it is one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.second = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.first @ self.second.detach()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Detaching() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).sin()
        return x


@pytest.mark.parametrize("ignored", [False, True])
def test_gathered_parameters_are_known_at_once(*, ignored: bool) -> None:
    """Also where FSDP2 exchanges only some of a block's parameters."""
    model = Net()
    left_out = {block.first for block in model.blocks} if ignored else set()
    for block in model.blocks:
        fully_shard(block, ignored_params=left_out)
    fully_shard(model, ignored_params=left_out)
    x = torch.randn(ROWS, WIDTH)
    with ebbtide.offload(model, activations=POLICY) as handle:
        for _ in range(3):
            model(x).sum().backward()
            # Each block saves its input, for the gradient of `first`, and both of its weights, of
            # which the first block needs only the second: `x` takes no gradient. The sine saves
            # the block's output.
            assert handle.stats.offloaded_bytes == 2 * 2 * ROWS * WIDTH * 4
            assert handle.stats.parameter_bytes == (1 + 2) * WIDTH * WIDTH * 4


def test_memory_of_gathered_parameters_is_not_taken_for_theirs_later() -> None:
    """FSDP2 frees a gathered parameter after the forward; activations may get its address."""
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    x = torch.randn(WIDTH, WIDTH)  # activations are as large as weights
    with ebbtide.offload(model, activations=POLICY) as handle:
        for _ in range(5):
            model(x).sum().backward()
            assert handle.stats.offloaded_bytes == 2 * 2 * WIDTH * WIDTH * 4


def test_a_model_that_is_sharded_after_its_weights_were_offloaded_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    with ebbtide.offload(model, weights=WeightPolicy()):
        fully_shard(model)
        with pytest.raises(PolicyError):
            model(x)


def test_blocks_of_which_some_are_sharded_are_layers() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[1])
    with ebbtide.offload(model) as handle:
        assert handle.layers == ("0", "1", "2")
