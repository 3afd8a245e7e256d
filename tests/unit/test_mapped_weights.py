"""Weights of a model on the CPU: in files between uses, the same bits, and RAM that is free."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

import ebbtide

WIDTH = 128


def make(count: int = 4, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)])


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


def train(model: nn.Module, kind: str, steps: int = 10) -> torch.optim.Optimizer:
    optimizer = OPTIMIZERS[kind](model.parameters())
    torch.manual_seed(1)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for _ in range(2):
            model(torch.randn(16, WIDTH)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        with torch.no_grad():
            model(torch.randn(4, WIDTH))
    return optimizer


def assert_same(
    mine: nn.Module, plain: nn.Module, my_state: torch.optim.Optimizer, state: torch.optim.Optimizer
) -> None:
    for got, expected in zip(mine.parameters(), plain.parameters(), strict=True):
        assert torch.equal(got, expected)
        assert torch.equal(got.grad, expected.grad)
        for name, value in state.state[expected].items():
            if isinstance(value, Tensor):
                assert torch.equal(my_state.state[got][name], value), name


@pytest.mark.parametrize("double_buffering", [True, False])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_ten_steps_are_the_same(kind: str, double_buffering: bool, tmp_path: Path) -> None:
    plain, mine = make(), make()
    expected = train(plain, kind)
    policy = ebbtide.WeightPolicy(double_buffering=double_buffering)
    handle = ebbtide.offload(mine, weights=policy, store=f"disk:{tmp_path}")
    optimizer = train(mine, kind)
    assert_same(mine, plain, optimizer, expected)
    handle.detach()
    assert_same(mine, plain, optimizer, expected)
    model_bytes = sum(p.nbytes for p in mine.parameters())
    file = tmp_path / "model.pt"
    torch.save(mine.state_dict(), file)
    assert file.stat().st_size < model_bytes * 1.2 + 10_000
    train(mine, kind, 1)  # goes on, plainly


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (ebbtide.WeightPolicy(num_layers=2), ["0", "1"]),
        (ebbtide.WeightPolicy(keep_last=3), ["0"]),
        (ebbtide.WeightPolicy(num_layers=3, keep_last=2), ["0", "1"]),
    ],
)
def test_which_layers(policy: ebbtide.WeightPolicy, names: list[str]) -> None:
    model = make()
    with ebbtide.offload(model, weights=policy) as handle:
        resting = [parameter.name for parameter in handle.inspect().parameters]
        assert resting == [f"{name}.0.{kind}" for name in names for kind in ("weight", "bias")]


def test_layers_by_name_and_a_pipeline_stage() -> None:
    """A stage of a pipeline is a model like any other."""
    dist = torch.distributed
    pipelining = pytest.importorskip("torch.distributed.pipelining")

    def losses(*, offloaded: bool) -> tuple[list[Tensor], nn.Module]:
        model, found, handle = make(), [], None
        if offloaded:
            activations = ebbtide.ActivationPolicy(min_bytes=1024)
            weights = ebbtide.WeightPolicy()
            handle = ebbtide.offload(
                model, activations=activations, weights=weights, layers=["*.0"]
            )
        stage = pipelining.PipelineStage(model, 0, 1, torch.device("cpu"))
        pipeline = pipelining.ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.AdamW(model.parameters())
        torch.manual_seed(1)
        for _ in range(3):
            optimizer.zero_grad()
            x = torch.randn(32, WIDTH)
            pipeline.step(x, target=x.sin(), losses=found)
            optimizer.step()
        if handle is not None:
            handle.detach()
        return [loss.detach() for loss in found], model

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        expected, plain = losses(offloaded=False)
        got, mine = losses(offloaded=True)
    finally:
        dist.destroy_process_group()
    assert all(map(torch.equal, got, expected))
    assert all(map(torch.equal, mine.parameters(), plain.parameters()))


def test_parameters_that_take_the_place_of_others(tmp_path: Path) -> None:
    plain, mine = make(), make()
    policy = ebbtide.WeightPolicy()
    with ebbtide.offload(mine, weights=policy, store=f"disk:{tmp_path}") as handle:
        for model in (plain, mine):
            train(model, "adamw")
            values = {name: value * 0.5 for name, value in model.state_dict().items()}
            model.load_state_dict(values, assign=True)
        del values  # while it holds the memory, that is not moved
        expected, optimizer = train(plain, "adamw"), train(mine, "adamw")
        assert_same(mine, plain, optimizer, expected)
        addresses = {parameter.address for parameter in handle.inspect().parameters}
        assert addresses == {parameter.data_ptr() for parameter in mine.parameters()}
        assert _all_in_files([p.grad for p in mine.parameters()], tmp_path)


def _all_in_files(tensors: list[Tensor], directory: Path) -> bool:
    """Whether the memory of these tensors is that of files in a directory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    places = [line.split()[0].split("-") for line in lines if str(directory) in line]
    mapped = [range(int(begin, 16), int(end, 16)) for begin, end in places]
    return all(any(each.data_ptr() in part for part in mapped) for each in tensors)


def test_checkpoints_and_shared_layers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = make(3)
            self.blocks[2][0].weight = self.blocks[0][0].weight

        def forward(self, x: Tensor) -> Tensor:
            for block in [*self.blocks, self.blocks[1]]:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return x

    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    mine = Net()
    expected = train(plain, "adamw")
    layers = list(mine.blocks)
    with ebbtide.offload(mine, weights=ebbtide.WeightPolicy(), layers=layers):
        assert_same(mine, plain, train(mine, "adamw"), expected)


def test_a_step_that_raises_leaves_nothing_behind() -> None:
    model = make()
    with ebbtide.offload(model, weights=ebbtide.WeightPolicy()):
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, WIDTH)).sum().backward()

        def closure() -> float:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            optimizer.step(closure)
        optimizer.step()
        assert _get_current_function_mode() is None
    assert _get_current_function_mode() is None


def test_a_full_disk_is_said_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    before = [p.detach().clone() for p in model.parameters()]

    room = 2
    allocate = os.posix_fallocate

    def refuse(*arguments: int) -> None:
        nonlocal room
        if not room:
            raise OSError(28, "No space left on device")
        room -= 1
        allocate(*arguments)

    addresses = {p.data_ptr() for p in model[2:].parameters()}
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ebbtide.StoreFullError):
        ebbtide.offload(model, weights=ebbtide.WeightPolicy())
    monkeypatch.undo()
    assert {p.data_ptr() for p in model[2:].parameters()} == addresses, "these never moved"
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, parameter)
    ebbtide.offload(model, weights=ebbtide.WeightPolicy()).detach()


MEASURE = """
import sys
import torch
from torch import nn
import ebbtide

def anonymous_kib():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))

torch.manual_seed(0)
torch.set_num_threads(1)
width, count = 1024, 12
if sys.argv[1] == "offload":
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8)) for _ in range(count)])
    for block in model:  # layer by layer, so that the whole is never in RAM at once
        block[0] = nn.Linear(width, width)
    ebbtide.offload(model, weights=ebbtide.WeightPolicy())
else:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width)) for _ in range(count)])
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(4, width)).square().mean().backward()
    optimizer.step()
import gc; gc.collect()
print(anonymous_kib())
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="only Linux tells in /proc what memory is a process's own",
)
def test_memory_really_falls() -> None:
    """Of weights, gradients and two moments nothing stays in the process's own memory."""

    def measure(mode: str) -> int:
        run = subprocess.run(
            [sys.executable, "-c", MEASURE, mode], capture_output=True, text=True, check=True
        )
        return int(run.stdout) * 1024

    layer_bytes = (1024 * 1024 + 1024) * 4
    saved_bytes = measure("plain") - measure("offload")
    # 12 layers, four times their bytes; two layers' worth is left for what varies.
    assert saved_bytes > (12 * 4 - 8) * layer_bytes
