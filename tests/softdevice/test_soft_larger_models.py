"""Models that are larger than the device train from the CPU with one number."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import ebbtide
import softdevice
from ebbtide.stores import DeviceMemory
from zoo import assert_bitwise_equal

ENOUGH_BYTES = 2**33
STEPS = 6  # recorded, frugal twice, planned; the optimizer's state is there from the second one on
SMALL = ebbtide.ActivationPolicy(min_bytes=4096)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.into(self.norms[0](x)).view(batch, length, 3, 4, width // 4)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / (width // 4) ** 0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, width: int = 64, depth: int = 7) -> None:
        super().__init__()
        self.words = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Attention(width) for _ in range(depth))
        self.head = nn.Linear(width, 64, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Spectral(nn.Module):
    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        values = torch.randn(width, width, modes, modes, dtype=torch.complex64) / width
        self.weight = nn.Parameter(values)
        self.skip = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(x)
        m = self.modes
        low = torch.einsum("bixy,ioxy->boxy", spectrum[..., :m, :m], self.weight)
        full = torch.zeros_like(spectrum)
        full[..., :m, :m] = low
        return functional.gelu(torch.fft.irfft2(full, s=x.shape[-2:]) + self.skip(x))


class FNO(nn.Module):
    def __init__(self, width: int = 16, depth: int = 7, modes: int = 12) -> None:
        super().__init__()
        self.lift = nn.Conv2d(1, width, 1)
        self.blocks = nn.ModuleList(Spectral(width, modes) for _ in range(depth))
        self.project = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for block in self.blocks:
            x = block(x)
        return self.project(x)


def words() -> Tensor:
    return torch.arange(16).view(1, 16) * 7 % 64


def field() -> Tensor:
    grid = torch.linspace(0, 6.28, 24)
    return torch.sin(grid)[:, None].mul(torch.cos(2 * grid)).expand(1, 1, 24, 24).contiguous()


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def train(
    model: nn.Module, x: Tensor, *, foreach: bool | None = None
) -> Iterator[tuple[Tensor, int]]:
    """Yield the loss of each step, and the most memory that it has used."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach)
    memory = DeviceMemory(x.device)  # which sees what a budget resets
    for _ in range(STEPS):
        memory.reset_peak()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.detach().cpu(), memory.peak_bytes()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().cpu().clone() for name, each in model.state_dict().items()}


def leave_room(room_bytes: int) -> int:
    """Have the device end this far beyond what it holds; return what it holds."""
    gc.collect()
    torch.accelerator.empty_cache()
    held_bytes = torch.accelerator.memory_reserved()
    softdevice.set_capacity(held_bytes + room_bytes)
    return held_bytes


@pytest.fixture(autouse=True)
def _enough_afterwards() -> Iterator[None]:
    yield
    gc.collect()
    softdevice.set_capacity(ENOUGH_BYTES)


@pytest.mark.parametrize("share", [4 / 3, 1 / 1.5], ids=["states", "weights"])
@pytest.mark.parametrize(("make", "given"), [(GPT, words), (FNO, field)], ids=["gpt", "fno"])
def test_a_model_larger_than_the_device_trains(
    make: Callable[[], nn.Module],
    given: Callable[[], Tensor],
    share: float,
    device: torch.device,
) -> None:
    """The budget is a third of weights, gradients and states, or two thirds of the weights."""
    plain, x = build(make).to(device), given().to(device)
    expected = [loss for loss, _ in train(plain, x)]
    expected_values = values(plain)
    budget_bytes = int(share * sum(each.nbytes for each in plain.parameters()))
    del plain
    held_bytes = leave_room(budget_bytes)
    model = build(make)
    with ebbtide.offload(
        model, budget=held_bytes + budget_bytes, device=device, activations=SMALL
    ) as handle:
        for number, (loss, peak_bytes) in enumerate(train(model, x)):
            assert peak_bytes <= held_bytes + budget_bytes, f"step {number}"
            assert torch.equal(loss, expected[number]), f"step {number}"
        assert_bitwise_equal(values(model), expected_values)
        assert handle.plan is not None
        assert handle.plan.plan.has_weights_on_host
    assert {each.device.type for each in model.state_dict().values()} == {"cpu"}


def wide(batch: int) -> Tensor:
    return torch.arange(16 * batch).view(batch, 16) * 7 % 64


@pytest.mark.parametrize(("room", "foreach"), [(2, None), (4.5, None), (4.5, False)])
def test_weights_for_which_there_is_room_come_back(
    device: torch.device, room: float, foreach: bool | None
) -> None:
    """Weights, gradients and states need four times the weights, and a step of all at once five."""
    plain = build(GPT).to(device)
    expected = [loss for loss, _ in train(plain, words().to(device), foreach=foreach)]
    held_bytes = int(room * sum(each.nbytes for each in plain.parameters()))
    del plain
    gc.collect()
    torch.accelerator.empty_cache()
    model = build(GPT)
    budget_bytes = torch.accelerator.memory_reserved() + held_bytes
    with ebbtide.offload(model, budget=budget_bytes, device=device, activations=SMALL) as handle:
        resting = []
        steps = train(model, words().to(device), foreach=foreach)
        for number, (loss, peak_bytes) in enumerate(steps):
            assert torch.equal(loss, expected[number])
            assert peak_bytes <= budget_bytes
            resting.append(sum(each.device.type == "cpu" for each in model.parameters()))
        assert resting[-1] < resting[0]
        assert handle.plan is not None
        assert handle.plan.plan.has_weights_on_host is (foreach is None)


def adversaries() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return FNO(modes=8, depth=4), FNO(modes=8, depth=4)


def compete(one: nn.Module, other: nn.Module, device: torch.device) -> Iterator[tuple[Tensor, int]]:
    """Yield the loss of each step of two models, as of a GAN, and the most memory that it used."""
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-3) for each in (one, other)]
    memory, noise, real = DeviceMemory(device), field().to(device), field().mT.to(device)
    for _ in range(STEPS):
        memory.reset_peak()
        fake = one(noise)
        optimizers[1].zero_grad()
        loss = other(fake.detach()).square().mean() - other(real).mean()
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        other(fake).square().mean().backward()
        optimizers[0].step()
        yield loss.detach().cpu(), memory.peak_bytes()


def test_each_of_two_models_counts_what_the_training_of_the_other_brings(
    device: torch.device,
) -> None:
    """One alone has room on the device, with its gradients and states; both have not."""
    plain = [each.to(device) for each in adversaries()]
    expected = [loss for loss, _ in compete(*plain, device)]
    room_bytes = 7 * sum(each.nbytes for each in plain[0].parameters())
    del plain
    gc.collect()
    torch.accelerator.empty_cache()
    budget = torch.accelerator.memory_allocated() + room_bytes
    models = adversaries()
    given: dict[str, Any] = {"budget": budget, "device": device, "activations": SMALL}
    with ebbtide.offload(models[0], **given), ebbtide.offload(models[1], **given):
        for number, (loss, peak_bytes) in enumerate(compete(*models, device)):
            assert torch.equal(loss, expected[number]), f"step {number}"
            assert peak_bytes <= budget, f"step {number}"


def test_plans_of_others_are_made_anew_where_a_model_has_made_room(device: torch.device) -> None:
    """The weights of the first of three come to rest after the others have been recorded."""
    x, memory = torch.randn(256, 64).to(device), DeviceMemory(device)
    budget = memory.now_bytes() + 3 * 2**20
    given: dict[str, Any] = {"budget": budget, "device": device, "activations": SMALL}
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(12)]
    models = [nn.Sequential(*blocks[first::3]) for first in range(3)]
    handles = [ebbtide.offload(model, **given) for model in models]
    optimizers = [torch.optim.Adam(model.parameters(), 1e-3) for model in models]
    for number in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            memory.reset_peak()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            # The first two are recorded beside the weights of the first model.
            assert number < 2 or memory.peak_bytes() <= budget
    for handle in handles:
        handle.detach()


@pytest.mark.parametrize("overlaps", [False, True])
def test_masters_rest_within_a_budget(overlaps: bool, device: torch.device) -> None:
    """Two thirds of the weights: half of the bytes come, the optimizer has all digits."""

    def run(model: nn.Module, handle: ebbtide.OffloadHandle | None) -> Iterator[tuple[Tensor, int]]:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        if handle is not None and overlaps:
            optimizer = handle.overlap(optimizer)
        memory = DeviceMemory(device)
        for _ in range(STEPS):
            memory.reset_peak()
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(words().to(device)).float().square().mean()
            loss.backward()
            optimizer.step()
            yield loss.detach().cpu(), memory.peak_bytes()

    plain = build(GPT).to(device)
    expected = [loss for loss, _ in run(plain, None)]
    expected_values = values(plain)
    block_bytes = [sum(p.nbytes for p in block.parameters()) for block in plain.blocks]
    budget_bytes = int(sum(block_bytes) / 1.5)
    del plain
    held_bytes = leave_room(budget_bytes)
    model = build(GPT)
    weights = ebbtide.WeightPolicy(param_dtype=torch.bfloat16)
    with ebbtide.offload(
        model, budget=held_bytes + budget_bytes, device=device, activations=SMALL, weights=weights
    ) as handle:
        for number, (loss, peak_bytes) in enumerate(run(model, handle)):
            assert torch.equal(loss, expected[number]), f"step {number}"
            assert peak_bytes <= held_bytes + budget_bytes, f"step {number}"
        assert_bitwise_equal(values(model), expected_values)
        assert 0 < handle.stats.peak_weight_bytes < 2.2 * max(block_bytes) / 2


def test_the_state_of_weights_is_where_they_are_in_each_step(device: torch.device) -> None:
    """Weights come and go as plans change; what they leave behind would be over the budget."""
    model, resting, memory = build(GPT), set(), DeviceMemory(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.accelerator.empty_cache()
    budget_bytes = memory.now_bytes() + int(3.2 * sum(e.nbytes for e in model.parameters()))
    x = wide(4).to(device)
    with ebbtide.offload(model, budget=budget_bytes, device=device, activations=SMALL):

        def check(*_: Any) -> None:
            resting.add(sum(each.device.type == "cpu" for each in model.parameters()))
            for weight in model.parameters():
                state = optimizer.state.get(weight, {}).values()
                assert {each.device for each in state if each.dim()} <= {weight.device}

        model.words.register_forward_pre_hook(check)
        for number in range(STEPS):
            memory.reset_peak()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            assert not number or memory.peak_bytes() <= budget_bytes
    assert len(resting) > 1


def test_a_plan_knows_of_the_step_inside_backward(device: torch.device) -> None:
    """The optimizer has the room on the host that the rest leaves, and the same bits."""

    def run(model: nn.Module, handle: ebbtide.OffloadHandle | None) -> Iterator[Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        if handle is not None:
            optimizer = handle.overlap(optimizer, max_norm=1e6)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(words().to(device)).square().mean()
            loss.backward()
            if handle is None:
                nn.utils.clip_grad_norm_(model.parameters(), 1e6, foreach=False)
            optimizer.step()
            yield loss.detach().cpu()

    plain = build(GPT).to(device)
    expected = list(run(plain, None))
    weight_bytes = sum(each.nbytes for each in plain.parameters())
    del plain
    gc.collect()
    torch.accelerator.empty_cache()
    budget_bytes = torch.accelerator.memory_reserved() + weight_bytes
    model = build(GPT)
    with ebbtide.offload(
        model, budget=budget_bytes, device=device, activations=SMALL, host_budget=8 * weight_bytes
    ) as handle:
        assert all(map(torch.equal, run(model, handle), expected))
        plan = handle.plan
        assert plan is not None and plan.plan.has_weights_on_host
        assert plan.profile.ahead is not None


def test_weights_rest_after_the_first_step_if_nothing_fits_with_them(device: torch.device) -> None:
    """Its record says what a step with weights at rest needs, too: no other one is recorded."""
    expected = [loss for loss, _ in train(build(GPT).to(device), wide(32).to(device))]
    model = build(GPT).to(device)
    weight_bytes = sum(each.nbytes for each in model.parameters())
    budget_bytes = DeviceMemory(device).now_bytes() + int(4.1 * weight_bytes)
    resting = []
    with ebbtide.offload(model, budget=budget_bytes, activations=SMALL) as handle:
        for number, (loss, peak_bytes) in enumerate(train(model, wide(32).to(device))):
            assert torch.equal(loss, expected[number])
            assert peak_bytes <= budget_bytes
            assert bool(number) == (handle.plan is not None), "a recorded step follows no plan"
            resting.append(sum(each.device.type == "cpu" for each in model.parameters()))
        assert handle.plan is not None
        assert handle.plan.plan.peak_bytes <= budget_bytes
    assert not resting[0]
    assert resting[1]


def test_weights_rest_before_the_first_step_beside_what_came_after_the_model(
    device: torch.device,
) -> None:
    """A model for averages was not there yet when the budget was given."""
    expected = [loss for loss, _ in train(build(GPT).to(device), wide(32).to(device))]
    model = build(GPT).to(device)
    weight_bytes = sum(each.nbytes for each in model.parameters())
    budget_bytes = DeviceMemory(device).now_bytes() + int(4.2 * weight_bytes)
    with ebbtide.offload(model, budget=budget_bytes, activations=SMALL):
        assert {each.device.type for each in model.parameters()} == {device.type}
        averages = build(GPT).to(device)
        for number, (loss, peak_bytes) in enumerate(train(model, wide(32).to(device))):
            assert torch.equal(loss, expected[number])
            assert peak_bytes <= budget_bytes
    del averages


def test_a_plan_counts_the_copies_of_weights_that_recomputed_layers_keep(
    device: torch.device,
) -> None:
    """Each block of this model has 195 KiB of weights, none of more than 64 KiB."""
    model = build(GPT).to(device)
    weight_bytes = sum(each.nbytes for each in model.parameters())
    budget_bytes = DeviceMemory(device).now_bytes() + int(4.1 * weight_bytes)
    with ebbtide.offload(model, budget=budget_bytes, activations=SMALL) as handle:
        for _, peak_bytes in train(model, wide(12).to(device)):
            assert peak_bytes <= budget_bytes
        assert handle.plan is not None
        copied = {each.name: each.copied_bytes for each in handle.plan.profile.layers}
    assert copied["blocks.3"] == sum(each.nbytes for each in Attention(64).parameters())


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_a_budget_has_room_for_an_optimizer_that_steps_late(
    make: type[torch.optim.Optimizer], device: torch.device
) -> None:
    """Gradients are added up over eight forwards; by then, the plan has settled."""
    batches = [wide(16) + each for each in range(8)]

    def accumulate(model: nn.Module) -> Iterator[tuple[Tensor, int]]:
        optimizer, memory = make(model.parameters(), lr=1e-3), DeviceMemory(device)
        for _ in range(2):
            optimizer.zero_grad()
            for batch in batches:
                memory.reset_peak()
                loss = model((batch % 64).to(device)).square().mean()
                loss.backward()
                if batch is batches[-1]:
                    optimizer.step()
                yield loss.detach().cpu(), memory.peak_bytes()

    expected = [loss for loss, _ in accumulate(build(GPT).to(device))]
    model = build(GPT).to(device)
    weight_bytes = sum(each.nbytes for each in model.parameters())
    budget_bytes = DeviceMemory(device).now_bytes() + int(4.1 * weight_bytes)
    with ebbtide.offload(model, budget=budget_bytes, activations=SMALL):
        for number, (loss, peak_bytes) in enumerate(accumulate(model)):
            assert torch.equal(loss, expected[number])
            assert peak_bytes <= budget_bytes, number


def test_a_loop_that_writes_weights_itself_has_no_optimizer_to_come(device: torch.device) -> None:
    """Its gradients stay, too, and are filled with zeros."""
    model = build(GPT).to(device)
    weight_bytes = sum(each.nbytes for each in model.parameters())
    budget_bytes = DeviceMemory(device).now_bytes() + int(4.1 * weight_bytes)
    with ebbtide.offload(model, budget=budget_bytes, activations=SMALL) as handle:
        for _ in range(5):
            model(wide(16).to(device)).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 1e-3 * parameter.grad
                    parameter.grad.zero_()
        assert handle.plan is not None
        # The weights and their gradients, the words, and no state.
        assert handle.plan.profile.fixed_bytes < 2.1 * weight_bytes


def test_weights_leave_if_nothing_fits_with_them(device: torch.device) -> None:
    """A plan for a larger batch does not fit beside weights that came back.

    All of them came back: the first parameter, which never rests, is all that is left to rest.
    Measured seconds choose the plan, and one that recomputes has steps that verify. So the number
    of steps until it has settled varies; from then on they keep the budget.
    """

    def grow(model: nn.Module) -> Iterator[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for number in range(20):
            optimizer.zero_grad()
            batch = words() if number < 4 else wide(32)
            loss = model(batch.to(device)).square().mean()
            loss.backward()
            optimizer.step()
            yield loss.detach().cpu()

    plain = build(GPT).to(device)
    expected = list(grow(plain))
    weight_bytes = sum(each.nbytes for each in plain.parameters())
    del plain
    gc.collect()
    torch.accelerator.empty_cache()
    model = build(GPT)
    budget_bytes = torch.accelerator.memory_reserved() + int(2.9 * weight_bytes)
    with ebbtide.offload(model, budget=budget_bytes, device=device, activations=SMALL) as handle:
        resting, peaks, memory = [], [], DeviceMemory(device)
        for number, loss in enumerate(grow(model)):
            assert torch.equal(loss, expected[number])
            resting.append(sum(each.device.type == "cpu" for each in model.parameters()))
            if number > 4 and handle.plan is not None and handle.plan.settled:
                peaks.append(memory.peak_bytes())
            memory.reset_peak()
        assert not resting[3]
        assert resting[-1]
        assert len(peaks) > 3, "it settles late"
        assert max(peaks) <= budget_bytes


# ---- Frameworks, which move the model to the device themselves ----


class Words(nn.Module):
    """A GPT that is called with a batch by name, and returns its loss, as Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = GPT()

    def forward(self, words: Tensor, **_: Any) -> dict[str, Tensor]:
        return {"loss": self.net(words).square().mean()}


def rows() -> Dataset[dict[str, Tensor]]:
    return cast("Dataset[dict[str, Tensor]]", [{"words": words()[0]}] * STEPS)


def in_transformers(model: nn.Module, device: torch.device, folder: Path) -> None:  # noqa: ARG001
    transformers = pytest.importorskip("transformers")
    settings = transformers.TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=1, save_strategy="no",
        report_to="none", remove_unused_columns=False, learning_rate=1e-2, disable_tqdm=True,
        dataloader_pin_memory=False,
        max_grad_norm=0.0,  # torch adds up norms device by device: their last bit may differ
    )  # fmt: skip
    transformers.Trainer(model, settings, train_dataset=rows()).train()


def in_accelerate(model: nn.Module, device: torch.device, folder: Path) -> None:  # noqa: ARG001
    accelerator = pytest.importorskip("accelerate").Accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows()))
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()


def in_lightning(model: nn.Module, device: torch.device, folder: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    strategies = pytest.importorskip("lightning.pytorch.strategies")

    class Accelerator(lightning.accelerators.CPUAccelerator):  # type: ignore[misc, name-defined]
        def setup_device(self, device: torch.device) -> None:
            """Lightning's refuses devices that it does not know."""

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return cast("Tensor", self.model(**batch)["loss"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    trainer = lightning.Trainer(
        accelerator=Accelerator(), strategy=strategies.SingleDeviceStrategy(device), max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(rows()))


def by_hand(model: nn.Module, device: torch.device, folder: Path) -> None:  # noqa: ARG001
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(words().to(device))["loss"].backward()
        optimizer.step()
        model.to(device)  # some do so each epoch


@pytest.mark.parametrize("frame", [in_transformers, in_accelerate, in_lightning, by_hand])
def test_frameworks_that_move_the_model_leave_weights_at_rest(
    frame: Callable[[nn.Module, torch.device, Path], None],
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weights alone are 1.5 times what the device has room for."""
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(device))
    plain = build(Words)
    frame(plain, device, tmp_path)
    expected = values(plain)
    budget_bytes = int(sum(each.nbytes for each in plain.parameters()) / 1.5)
    del plain
    gc.collect()
    torch.accelerator.empty_cache()
    budget_bytes += torch.accelerator.memory_reserved()
    softdevice.set_capacity(budget_bytes)
    memory = DeviceMemory(device)
    memory.reset_peak()
    model = build(Words)
    with ebbtide.offload(model, budget=budget_bytes, device=device, activations=SMALL) as handle:
        frame(model, device, tmp_path)
        assert memory.reserved_peak_bytes() <= budget_bytes
        assert handle.plan is not None
        assert handle.plan.plan.has_weights_on_host
    assert_bitwise_equal(values(model), expected)


SCRIPT = """
import sys
import softdevice
softdevice.load("random:1")
import torch
from test_soft_larger_models import GPT, STEPS, build, train, words
device, share = torch.device("softdevice", 0), float(sys.argv[1])
model = build(GPT)
softdevice.set_capacity(int(share * sum(each.nbytes for each in model.parameters())))
model = model.to(device)
print(*[loss.item().hex() for loss, _ in train(model, words().to(device))])
print(torch.accelerator.max_memory_reserved() <= softdevice.capacity())
"""


def test_run_trains_what_a_script_moves_to_a_device_that_is_too_small(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    paths = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    run = ["-m", "ebbtide", "run", "--budget", "90%", "--min-bytes", "4KiB", str(path), "0.75"]
    plain, offloaded = (
        subprocess.run(
            [sys.executable, *words],
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
        for words in ([str(path), "100"], run)
    )
    assert plain.stdout == offloaded.stdout, offloaded.stderr
    assert "GPT" in offloaded.stderr


def test_a_program_that_changes_weights_on_the_way_to_the_device_changes_them(
    device: torch.device,
) -> None:
    model = build(Tower)
    before = values(model)
    with ebbtide.offload(model, budget="1GiB", device=device, weights=ebbtide.WeightPolicy()):
        model._apply(lambda each: each.to(device) * 2)
        with torch.no_grad():
            model(torch.zeros(1, 256, device=device))
        after = values(model)
        rested = copy.deepcopy(model).to(device)
    assert_bitwise_equal(after, {name: 2 * each for name, each in before.items()})
    assert {each.device for each in rested.parameters()} == {device}


# ---- Without settings, with little host memory, and where nothing fits ----


class Tower(nn.Sequential):
    """At a batch of 4096, the input of each layer has 4 MiB."""

    def __init__(self, width: int = 256, depth: int = 8) -> None:
        super().__init__(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)])


def steps(model: nn.Module, counts: list[int], device: torch.device) -> list[Tensor]:
    """Train with batches of so many rows; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for count in counts:
        optimizer.zero_grad()
        batch = torch.linspace(-1, 1, count * 256, device=device).view(count, 256)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
        del batch, loss
    return losses


def plainly(counts: list[int], device: torch.device) -> tuple[list[Tensor], int, int]:
    """Return the losses of plain steps, what they reserve, and what is held without them."""
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    held_bytes = torch.accelerator.memory_reserved()
    losses = steps(build(Tower).to(device), counts, device)
    peak_bytes = torch.accelerator.max_memory_reserved() - held_bytes
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    return losses, peak_bytes, torch.accelerator.memory_reserved()


def test_without_settings_weights_leave_if_they_may_not_fit(device: torch.device) -> None:
    expected, _, held_bytes = plainly([256] * 6, device)
    model = build(Tower).to(device)
    weight_bytes = sum(each.nbytes for each in model.parameters())
    softdevice.set_capacity(held_bytes + int(1.4 * weight_bytes) + 4 * 2**20)  # 2 with gradients
    with (
        warnings.catch_warnings(record=True) as given,
        ebbtide.offload(model),
    ):
        warnings.simplefilter("always")
        assert steps(model, [256] * 6, device) == expected
    assert [str(each.message).rsplit("[ebbtide: ")[-1] for each in given] == ["weights-rest]"]


@pytest.mark.parametrize("share", [8.0, 0.6, 0.4])
def test_without_settings_a_a_model_is_left_alone_as_far_as_it_fits(
    share: float, device: torch.device
) -> None:
    counts = [4096] * 9
    expected, plain_bytes, held_bytes = plainly(counts, device)
    capacity_bytes = held_bytes + int(share * plain_bytes)
    softdevice.set_capacity(capacity_bytes)
    model = build(Tower).to(device)
    with ebbtide.offload(model) as handle:
        assert steps(model, counts, device) == expected
        assert torch.accelerator.max_memory_reserved() <= capacity_bytes
        stats, plan = handle.stats, handle.plan
        moved = stats.offloaded_bytes + stats.rebuilt_bytes + stats.recomputed_bytes
        assert (moved == 0) is (share > 1)
        assert ("nothing moves" in repr(handle)) is (share > 1)
        assert plan is not None
        assert plan.budget_bytes <= 0.9 * capacity_bytes


def test_a_model_rests_where_others_fill_the_device(device: torch.device) -> None:
    model = build(Tower)
    weight_bytes = sum(each.nbytes for each in model.parameters())
    held_bytes = plainly([], device)[-1]
    others = torch.empty(8 * 2**20, dtype=torch.uint8, device=device)
    softdevice.set_capacity(held_bytes + others.nbytes + weight_bytes // 2 + 2**20)
    with ebbtide.offload(model, budget=held_bytes + 64 * 2**20, device=device):
        assert {each.device.type for each in model.parameters()} == {"cpu"}
        steps(model, [64] * 3, device)


def test_a_model_for_which_there_is_no_room_at_all_is_unchanged(device: torch.device) -> None:
    model = build(Tower)
    weight_bytes = sum(each.nbytes for each in model.parameters())
    softdevice.set_capacity(plainly([], device)[-1] + weight_bytes // 2)
    with pytest.raises(ebbtide.StoreFullError):
        ebbtide.offload(model, budget="90%", device=device, host_budget="64KiB")
    assert {each.device.type for each in model.parameters()} == {"cpu"}
    assert "forward" not in vars(model)


@pytest.mark.filterwarnings("ignore:.*over-budget")  # nobody knows before what a step saves
@pytest.mark.parametrize("host_budget", ["12MiB", "1MiB"])
def test_what_the_host_has_no_room_for_is_computed_again(
    host_budget: str, device: torch.device
) -> None:
    counts = [4096] * 12
    expected, plain_bytes, held_bytes = plainly(counts, device)
    budget_bytes = held_bytes + int(0.7 * plain_bytes)
    model = build(Tower).to(device)
    with ebbtide.offload(model, budget=budget_bytes, host_budget=host_budget) as handle:
        losses = steps(model, counts[:9], device)
        torch.accelerator.reset_peak_memory_stats()
        assert losses + steps(model, counts[9:], device) == expected
        assert torch.accelerator.max_memory_allocated() <= budget_bytes
        stats = handle.stats
        assert stats.host_capacity_bytes <= int(host_budget[:-3]) * 2**20
        assert stats.recomputed_bytes + stats.rebuilt_bytes


def test_training_goes_on_with_a_batch_for_which_no_plan_fits(device: torch.device) -> None:
    counts = [1024] * 8 + [8192] * 6 + [1024]
    expected, _, held_bytes = plainly(counts, device)
    model = build(Tower).to(device)
    with (
        warnings.catch_warnings(record=True) as given,
        ebbtide.offload(model, budget=held_bytes + 16 * 2**20),
    ):
        warnings.simplefilter("always")
        assert steps(model, counts, device) == expected
    assert [str(each.message).endswith("[ebbtide: over-budget]") for each in given] == [True]


def test_training_that_has_not_begun_ends_where_no_plan_fits(device: torch.device) -> None:
    held_bytes = plainly([], device)[-1]
    model = build(Tower).to(device)
    with (
        ebbtide.offload(model, budget=held_bytes + 8 * 2**20),
        pytest.raises(ebbtide.BudgetError),
    ):
        steps(model, [8192] * 8, device)
