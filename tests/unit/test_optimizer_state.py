"""State of an optimizer whose weights are in mapped files: in files, too, else as it was."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.stores.mapped_memory import MappedFiles
from waiting import wait_until

WIDTH = 64


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])


class Custom(torch.optim.Optimizer):
    """Momentum whose state is made by a function, in a way that other people's optimizers do it."""

    def __init__(self, parameters: Iterable[Tensor], make_state: Callable[..., None]) -> None:
        super().__init__(parameters, {})
        self.make_state = make_state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    self.make_state(self, state, p)
                state["momentum"].mul_(0.9).add_(p.grad)
                p.sub_(state["look"], alpha=0.1)


def two_names(_: Custom, state: dict[str, Tensor], p: Tensor) -> None:
    state["momentum"] = state["look"] = torch.zeros_like(p)


def two_names_at_once(_: Custom, state: dict[str, Tensor], p: Tensor) -> None:
    both = torch.zeros_like(p)
    state.update(momentum=both, look=both)


def a_view(_: Custom, state: dict[str, Tensor], p: Tensor) -> None:
    state["momentum"] = torch.zeros_like(p)
    state["look"] = state["momentum"].view(p.shape)


def views_of_one(_: Custom, state: dict[str, Tensor], p: Tensor) -> None:
    flat = torch.zeros(2 * p.numel())
    state["momentum"] = flat[: p.numel()].view_as(p)
    state["look"] = flat[: p.numel()].view_as(p)


def two_views(_: Custom, state: dict[str, Tensor], p: Tensor) -> None:
    whole = torch.zeros_like(p)
    state["momentum"] = whole.view_as(p)
    state["look"] = whole.view_as(p)


def a_name_elsewhere(optimizer: Custom, state: dict[str, Tensor], p: Tensor) -> None:
    state["momentum"] = torch.zeros_like(p)
    optimizer.param_groups[0].setdefault("looks", {})[p] = state["momentum"]
    state["look"] = optimizer.param_groups[0]["looks"][p]


def a_new_dict(optimizer: Custom, _: dict[str, Tensor], p: Tensor) -> None:
    both = torch.zeros_like(p)
    optimizer.state[p] = {"momentum": both, "look": both}
    _.update(optimizer.state[p])


def the_gradient(_: Custom, state: dict[str, Tensor], p: Tensor) -> None:
    state["momentum"] = torch.zeros_like(p)
    state["look"] = p.grad


MAKERS = [
    two_names,
    two_names_at_once,
    a_view,
    views_of_one,
    two_views,
    a_name_elsewhere,
    a_new_dict,
    the_gradient,
]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for number in range(steps):
        optimizer.zero_grad(set_to_none=False)
        model(torch.full((4, WIDTH), number + 1.0)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("make_state", MAKERS)
def test_names_of_one_tensor_stay_one_tensor(make_state: Callable[..., None]) -> None:
    plain, mine = make(), make()
    expected = Custom(plain.parameters(), make_state)
    train(plain, expected)
    with ebbtide.offload(mine, weights=ebbtide.WeightPolicy()):
        optimizer = Custom(mine.parameters(), make_state)
        train(mine, optimizer)
        train(plain, expected)
        optimizer.load_state_dict(optimizer.state_dict())
        train(mine, optimizer)
        for got, wanted in zip(mine.parameters(), plain.parameters(), strict=True):
            assert torch.equal(got, wanted)
            state, other = optimizer.state[got], expected.state[wanted]
            shared = state["momentum"].data_ptr() == state["look"].data_ptr()
            assert shared == (other["momentum"].data_ptr() == other["look"].data_ptr())
            assert type(state) is dict


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> list[MappedFiles]:
    """The files of the stores that are made from now on."""
    made: list[MappedFiles] = []
    initialise = MappedFiles.__init__

    def note(self: MappedFiles, directory: Path) -> None:
        initialise(self, directory)
        made.append(self)

    monkeypatch.setattr(MappedFiles, "__init__", note)
    return made


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "adagrad": torch.optim.Adagrad,
    "rprop": torch.optim.Rprop,
    "two names": lambda p: Custom(p, two_names),
    "elsewhere": lambda p: Custom(p, a_name_elsewhere),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_is_in_files(kind: str, files: list[MappedFiles]) -> None:
    plain, mine = make(), make()
    expected = OPTIMIZERS[kind](plain.parameters())
    train(plain, expected)
    with ebbtide.offload(mine, weights=ebbtide.WeightPolicy()):
        optimizer = OPTIMIZERS[kind](mine.parameters())
        train(mine, optimizer)
        for got, wanted in zip(mine.parameters(), plain.parameters(), strict=True):
            assert torch.equal(got, wanted)
            for name, value in optimizer.state[got].items():
                if isinstance(value, Tensor):
                    assert torch.equal(value, expected.state[wanted][name])
                    assert value.dim() == 0 or files[0].contains(value), name


def test_each_tensor_is_moved_before_the_next_is_made(files: list[MappedFiles]) -> None:
    """The state of all parameters together need not fit in RAM."""
    seen = []

    def look(optimizer: Custom, state: dict[str, Tensor], p: Tensor) -> None:
        two_names(optimizer, state, p)
        seen.append(files[0].contains(state["momentum"]))

    model = make()
    with ebbtide.offload(model, weights=ebbtide.WeightPolicy()):
        train(model, Custom(model.parameters(), look), 1)
    assert seen == [1] * 6


def test_a_full_disk_leaves_state_in_ram(
    files: list[MappedFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, mine = make(), make()
    train(plain, torch.optim.Adam(plain.parameters()))

    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    with ebbtide.offload(mine, weights=ebbtide.WeightPolicy()):
        model_step = torch.optim.SGD(mine.parameters(), lr=0)
        train(mine, model_step, 1)  # the gradients have their room now
        monkeypatch.setattr(files[0], "_allocate", refuse)
        optimizer = torch.optim.Adam(mine.parameters())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(mine, optimizer)
        assert [str(w.message)[:31] for w in caught] == ["optimizer state stays in RAM: n"]
        assert all(map(torch.equal, mine.parameters(), plain.parameters()))


# A step that raises


def interrupt() -> float:
    raise ZeroDivisionError


@pytest.fixture
def interrupted() -> Iterator[torch.optim.Optimizer]:
    """An optimizer whose first step raised, under another default device."""
    model = make()
    with ebbtide.offload(model, weights=ebbtide.WeightPolicy()):
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(4, WIDTH)).sum().backward()
        with pytest.raises(ZeroDivisionError), torch.device("meta"):
            optimizer.step(interrupt)
        yield optimizer


def test_a_step_that_raises_leaves_the_default_device(interrupted: object) -> None:
    assert interrupted is not None
    assert torch.get_default_device() == torch.device("cpu")
    assert torch.empty(1).device == torch.device("cpu")


def pagers() -> list[threading.Thread]:
    """The threads that page optimizer state in and out during a step."""
    return [thread for thread in threading.enumerate() if thread.name == "ebbtide-pager"]


def test_files_are_paged_out_while_a_step_fills_ram(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    paged_out = threading.Event()
    model = make()

    def fill_ram(optimizer: Custom, state: dict[str, Tensor], p: Tensor) -> None:
        two_names(optimizer, state, p)
        # 32 MiB are tolerated.
        pages = torch.from_file(str(tmp_path / "pages"), shared=True, size=2**26, dtype=torch.uint8)
        pages.fill_(1)
        assert paged_out.wait(60)

    with ebbtide.offload(model, weights=ebbtide.WeightPolicy()) as handle:
        optimizer = Custom(model.parameters(), fill_ram)
        model(torch.ones(4, WIDTH)).sum().backward()
        monkeypatch.setattr(handle._engine.transfers.store, "page_out", paged_out.set)
        optimizer.step()


@pytest.mark.parametrize("then", ["step", "detach", "drop"])
def test_the_thread_of_a_step_that_raises_ends(then: str) -> None:
    """It ends with the next step, with the offload, or with the optimizer."""
    model = make()
    with ebbtide.offload(model, weights=ebbtide.WeightPolicy()) as handle:
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(4, WIDTH)).sum().backward()
        with contextlib.suppress(ZeroDivisionError):
            optimizer.step(interrupt)
        assert len(pagers()) == 1
        if then == "step":
            optimizer.step()
        elif then == "detach":
            handle.detach()
        else:
            del optimizer
            gc.collect()  # torch's optimizers refer to themselves
        wait_until(lambda: not pagers(), f"the thread did not end after {then}")


def test_an_optimizer_whose_step_raised_can_be_copied_and_saved() -> None:
    model = make()

    def fail_late(optimizer: Custom, state: dict[str, Tensor], p: Tensor) -> None:
        two_names(optimizer, state, p)
        if len(optimizer.state) == 3:
            raise ZeroDivisionError

    with ebbtide.offload(model, weights=ebbtide.WeightPolicy()):
        optimizer = Custom(model.parameters(), fail_late)
        model(torch.ones(4, WIDTH)).sum().backward()
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        assert len(torch.load(file, weights_only=True)["state"]) == 3
        other = copy.deepcopy(optimizer.state)
        assert type(other) is defaultdict
        assert other.default_factory is dict
        optimizer.make_state = two_names
        train(model, optimizer, 1)
        assert optimizer.state.default_factory is dict
        assert {type(state) for state in optimizer.state.values()} == {dict}


@pytest.mark.parametrize("in_thread", [False, True])
def test_another_optimizer_may_step_in_the_middle_of_a_step(in_thread: bool) -> None:
    """As where two models are trained by two threads. The hooks of torch are for all optimizers."""
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    other = torch.optim.SGD([weight], 0.1)

    def step_meanwhile(_: Custom, state: dict[str, Tensor], p: Tensor) -> None:
        if in_thread:
            thread = threading.Thread(target=other.step)
            thread.start()
            thread.join()
        else:
            other.step()
        state["momentum"] = torch.zeros_like(p)
        state["look"] = state["momentum"]

    def train(model: nn.Sequential) -> list[Tensor]:
        optimizer = Custom(model.parameters(), step_meanwhile)
        for n in range(3):
            optimizer.zero_grad()
            model(torch.full((8, WIDTH), 0.1 * n)).square().mean().backward()
            optimizer.step()
            assert len(optimizer.state) == 6
            assert all(set(each) == {"momentum", "look"} for each in optimizer.state.values())
        return [p.detach().clone() for p in model.parameters()]

    expected, model = train(make()), make()
    with ebbtide.offload(model, weights=ebbtide.WeightPolicy()):
        got = train(model)
    assert all(map(torch.equal, expected, got))
