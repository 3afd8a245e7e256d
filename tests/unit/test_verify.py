"""`ebbtide.verify` and the command: what is the same, what differs, and what is said of it."""

from __future__ import annotations

import contextlib
import errno
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from commands import call
from ebbtide.devices import AbstractLane
from ebbtide.runtime.engine import devices_made_by, make_device
from ebbtide.runtime.torch_internals import top_hooks

WIDTH = 32
ALL_KINDS = 5  # so many seeds in a row provoke everything


class Noisy(nn.Module):
    """Adds what its closure returns, which no run can put back."""

    def __init__(self, noise: Callable[[], float]) -> None:
        super().__init__()
        self.inner = small()
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.noise()


def small(num_layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.BatchNorm1d(WIDTH))
        for _ in range(num_layers)
    ]
    return nn.Sequential(*layers)


def batch() -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))


class WrongWhenOffloaded(torch.autograd.Function):
    """Returns a multiple of its gradient if autograd's saved tensors go through hooks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = 1.0 if top_hooks() is None else factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class Wrong(nn.Module):
    """A model whose gradients are wrong in the middle if it is offloaded."""

    def __init__(self, factor: float, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.below, self.above = small(), inner or small()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.above(WrongWhenOffloaded.apply(self.below(x), self.factor))


@pytest.mark.parametrize(
    "offload",
    [
        None,
        {"activations": ebbtide.ActivationPolicy(min_bytes=1, mode="recompute")},
        {
            "activations": ebbtide.ActivationPolicy(min_bytes=1),
            "weights": ebbtide.WeightPolicy(min_bytes=1),
        },
        {"activations": ebbtide.ActivationPolicy(min_bytes=1, rebuild=False)},
    ],
    ids=["activations", "recompute", "weights", "not rebuilt"],
)
def test_an_offloaded_model_is_the_same_under_every_provocation(
    offload: dict[str, object] | None,
) -> None:
    report = ebbtide.verify(small(), batch(), offload=offload, orders=ALL_KINDS)
    assert report.same, str(report)
    assert [run.seed for run in report.runs] == [None, *range(ALL_KINDS)]
    assert all(run.moved_bytes for run in report.runs)


@pytest.mark.parametrize("seed", range(4))
def test_a_write_that_fails_is_told_of_by_its_own_error_wherever_it_shows(seed: int) -> None:
    """The copy of noise starts as the next layer begins, which may raise another copy's error."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = (nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(8))
            self.layers = nn.ModuleList(layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x * torch.rand_like(x)
                with torch.no_grad():
                    busy @ busy  # meanwhile the copy of x ends
                x = layer(x)
            return x

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        model(torch.ones(16, 32)).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    class Failing(AbstractLane):
        def __init__(self, lane: AbstractLane, writes: bool) -> None:
            self.lane, self.writes = lane, writes

        def submit(self, work: Any, then: Any = None) -> Any:
            fails = self.writes and fills and chance.random() < 0.1
            return self.lane.submit(fail if fails else work, then)

        def close(self) -> None:
            self.lane.close()

    def fail() -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    def make(torch_device: torch.device) -> Any:
        device: Any = make_device(torch_device)
        lane = device.lane
        device.lane = lambda name, what: Failing(lane(name, what), "write" in name)
        return device

    busy, model, chance = torch.ones(512, 512), Model(), random.Random(seed)
    expected, fills = gradients(), [True]
    with devices_made_by(make):
        handle = ebbtide.offload(model, activations=ebbtide.ActivationPolicy(min_bytes=1))
    with handle:
        with pytest.raises(OSError) as raised:  # noqa: PT011
            list(iter(gradients, None))
        assert raised.value.errno == errno.ENOSPC
        fills.clear()
        with contextlib.suppress(OSError):  # of a write before
            gradients()
        assert all(map(torch.equal, gradients(), expected))


def test_a_budget_is_verified() -> None:
    report = ebbtide.verify(small(), batch(), offload={"budget": "4GiB"}, orders=2)
    assert all(run.is_same for run in report.runs), str(report)


def test_the_model_is_left_as_it_was() -> None:
    model, x = small(), batch()
    model(x).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    states = torch.get_rng_state(), random.getstate()
    ebbtide.verify(model, x, orders=1)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(p.grad is gradients[name] for name, p in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    with ebbtide.offload(model):  # it is not offloaded any more
        pass


def test_every_run_begins_with_the_same_counters() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = small(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.inner(x * self.calls)  # type: ignore[no-any-return]

    model = Counting()
    report = ebbtide.verify(model, batch(), orders=1)
    assert report.same and not report.deterministic, str(report)
    assert model.calls == 0


def test_a_wrong_gradient_is_found_and_named() -> None:
    model = Wrong(1 + 2**-20)
    report = ebbtide.verify(model, batch(), orders=1)
    assert not report.same
    first = report.first_different
    assert first is not None and first.seed is None
    path = first.difference.rpartition(" ")[2]
    assert path.startswith("below.2")  # backward comes to the last layer below first
    assert 1 < first.num_different < report.compared
    assert_fits_a_terminal(report)
    assert json.loads(json.dumps(report.document()))["same"] is False


def test_two_graphs_may_be_alive_at_once() -> None:
    report = ebbtide.verify(small(), batch(), orders=2, microbatches=2)
    assert report.same, str(report)


def test_what_deterministic_kernels_make_the_same_is_verified_with_these() -> None:
    """What they do not is refused: nothing could be compared to the bit."""
    calls = [0]

    def noise() -> float:
        calls[0] += 1
        return 1e-3 * (calls[0] % 2)  # three steps in a run: the next run has the others

    def noise_of_kernels() -> float:
        return 0.0 if torch.are_deterministic_algorithms_enabled() else noise()

    report = ebbtide.verify(Noisy(noise_of_kernels), batch(), orders=2)
    assert report.same and report.deterministic, str(report)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not ebbtide.verify(Wrong(1.5, Noisy(noise_of_kernels)), batch(), orders=0).same
    with pytest.raises(ebbtide.PolicyError, match="step 1: loss"):
        ebbtide.verify(Noisy(noise), batch(), orders=2)


def test_a_model_without_anything_to_offload_is_not_called_the_same() -> None:
    policy = ebbtide.ActivationPolicy(min_bytes="1GiB")
    report = ebbtide.verify(small(), batch(), offload={"activations": policy}, orders=1)
    assert not report.has_moved and not report.same
    assert report.first_different is None
    assert_fits_a_terminal(report)


def test_nan_in_the_plain_steps_is_refused() -> None:
    with pytest.raises(ebbtide.PolicyError):
        ebbtide.verify(Noisy(lambda: float("nan")), batch(), orders=1)


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"orders": -1}, {"microbatches": 0}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_wrong_arguments_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ebbtide.PolicyError):
        ebbtide.verify(small(), batch(), **wrong)  # type: ignore[arg-type]


def assert_fits_a_terminal(report: ebbtide.VerifyReport) -> None:
    lines = str(report).splitlines()
    assert len(lines) <= 20 and max(map(len, lines)) <= 80
    assert "\n" not in report.line


# ---- The command --------------------------------------------------------------------------------

SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
model = nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.DataLoader(torch.randn(64, 32), batch_size=16, shuffle=True)

def build():
    return model, torch.randn(16, 32)

class Wrong(nn.Sequential):
    def forward(self, x):
        factor = 1 if torch._C._autograd._top_saved_tensors_default_hooks(False) is None else 2
        return factor * super().forward(x)

def wrong():
    return Wrong(*layers), torch.randn(16, 32)

if __name__ == "__main__":
    for epoch in range(int(sys.argv[1])):
        for x in data:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "to_verify.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "to_verify", raising=False)
    for name, value in (("argv", sys.argv), ("path", sys.path)):  # which a script changes
        monkeypatch.setattr(sys, name, [*value])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    return "to_verify.py"


def test_the_model_of_a_script_is_verified(script: str) -> None:
    run = call("verify", "--json", "--orders", "1", "--steps", "6", script, "2")
    assert run.exit_code == 0, run.output
    document = json.loads(run.stdout)
    assert document["same"] and document["compared"] > 6 * 6
    assert all(each["moved_bytes"] for each in document["runs"])


def test_a_wrong_model_of_a_script_is_found_by_the_names_that_it_is_called_with(
    script: str,
) -> None:
    source = SCRIPT.replace("model(x).square()", "model(x=x).square()")
    Path(script).write_text(
        source.replace("    for epoch", "    model, _ = wrong()\n    for epoch")
    )
    run = call("verify", "--json", "--orders", "0", "--steps", "2", script, "1")
    assert run.exit_code == 1, run.output
    (offloaded,) = json.loads(run.stdout)["runs"]
    assert offloaded["difference"].startswith("step 1")


def test_a_script_that_offloads_by_itself_cannot_be_run_plainly(script: str) -> None:
    source = SCRIPT.replace("optimizer = ", "import ebbtide; ebbtide.offload(model); optimizer = ")
    Path(script).write_text(source)
    run = call("verify", "--orders", "0", script, "1")
    assert run.exit_code == 2 and not run.stdout


def test_an_error_of_the_model_is_raised_although_the_script_goes_on(script: str) -> None:
    fails = "layers[0].register_forward_hook(lambda *_: 1 // 0)\noptimizer = "
    step = "model(x).square().mean().backward()"
    goes_on = f"with contextlib.suppress(Exception):\n                {step}"
    source = SCRIPT.replace("optimizer = ", fails).replace(step, goes_on)
    Path(script).write_text(f"import contextlib\n{source}")
    run = call("verify", "--orders", "0", script, "1")
    assert isinstance(run.exception, ZeroDivisionError)


@pytest.mark.parametrize("epochs", ["0", "no number"], ids=["ends", "fails"])
def test_a_script_that_trains_no_model_is_refused(script: str, epochs: str) -> None:
    run = call("verify", "--orders", "0", script, epochs)
    assert run.exit_code == 2 and not run.stdout


@pytest.mark.usefixtures("script")
def test_a_function_is_verified() -> None:
    arguments = ["verify", "--weights", "--orders", "2", "--json", "to_verify:build"]
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["same"] and [run["seed"] for run in document["runs"]] == [None, 0, 1]


@pytest.mark.usefixtures("script")
def test_options_behind_a_function_are_refused() -> None:
    result = call("verify", "to_verify:build", "--orders", "1")
    assert result.exit_code == 2


@pytest.mark.usefixtures("script")
def test_a_wrong_model_ends_the_command_with_1() -> None:
    result = call("verify", "--orders", "0", "to_verify:wrong")
    assert result.exit_code == 1, result.output
    assert "DIFFERENT" in result.output
