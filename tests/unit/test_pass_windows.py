"""Windows for copies: as many bytes in each pass as it has room for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ebbtide
from ebbtide import ActivationPolicy
from ebbtide.devices import SimulatedDevice
from ebbtide.errors import PolicyError
from ebbtide.planning import (
    CautiousTiming,
    Decision,
    Hardware,
    LayerMode,
    LayerPlan,
    Plan,
    PlannedStep,
    Prediction,
    SavedStorage,
    StepProfile,
    StepTiming,
    StorageId,
    StorageUses,
    open_windows,
)
from ebbtide.planning.prediction import Predictor
from ebbtide.runtime.transfers import Offloads
from ebbtide.stores import PinnedStore
from loops import on_device
from plan_cases import (
    MB,
    fake_profile,
    links,
    make_layer,
    make_link,
    make_profile,
    planned,
    profiles,
    reread,
)
from test_planning_search import MANY

KEEP, OFFLOAD, REBUILD = Decision
CPU = Hardware.named("cpu")
FOUR = make_profile(*[make_layer(10)] * 4)  # forwards of 1 s, backwards of 2 s
CLOSED = Plan(
    layers=(LayerPlan(decisions=(OFFLOAD,)),) * 3 + (LayerPlan(decisions=(KEEP,)),),
    windows=(0,) * 9,
)


def opened(plan: Plan, profile: StepProfile, timing: Predictor, device_bytes: int) -> Plan:
    peaks = timing.predict(plan).peak_by_position
    return open_windows(plan, profile, StorageUses(profile), peaks, device_bytes)


def peaks_mb(prediction: Prediction) -> list[float]:
    return [peak / MB for peak in prediction.peak_by_position]


# ---- time and memory -----------------------------------------------------------------------------


def test_with_closed_windows_each_pass_is_alone_with_what_it_needs() -> None:
    got = StepTiming(FOUR, make_link(2)).predict(CLOSED)
    # Copies take 5 s. F1, F2 and F3 wait for the save of the pass before, and B2, B1 and B0 bring
    # back what they need themselves.
    assert peaks_mb(got) == [10] * 9
    assert got.exposed_copy_s == pytest.approx(6 * 5)
    assert got.step_s == pytest.approx(4 * 3 + 6 * 5)


def test_windows_use_what_the_budget_leaves() -> None:
    timing = StepTiming(FOUR, make_link(2))
    plan = opened(CLOSED, FOUR, timing, 20 * MB)
    assert plan.windows == (10 * MB,) * 9
    assert plan.max_inflight_bytes == 10 * MB
    got = timing.predict(plan)
    # Down: storage 0 from 1 to 6 s, 1 to 11 s, 2 to 16 s. F1 begins at 1 s, F2 waits until 6 s, F3
    # from 7 until 11 s, B3 from 12 until 16 s. Up: storage 2 from 16 to 21 s, 1 to 26 s, 0 to 31 s.
    assert got.exposed_copy_s == pytest.approx(4 + 4 + 4 + 3 + 3 + 3)
    assert got.step_s == pytest.approx(33)
    assert peaks_mb(got) == [10, 20, 20, 20, 20, 20, 20, 20, 10]


def test_a_pass_without_room_closes_the_windows_of_those_before_it() -> None:
    """What is brought back ahead of its need also occupies the passes between."""
    layers = [make_layer(10)] * 4
    layers[1] = make_layer(10, backward_working_bytes=10 * MB)
    profile = make_profile(*layers)
    timing = StepTiming(profile, make_link(2))
    plan = opened(CLOSED, profile, timing, 20 * MB)
    # B1 needs all. So B2 may bring back what B1 uses, and B3 what B2 uses, and that of B1 no more.
    assert [size // MB for size in plan.windows] == [10, 10, 10, 10, 10, 10, 10, 0, 10]
    assert peaks_mb(timing.predict(plan)) == [10, 20, 20, 20, 20, 20, 20, 20, 10]
    wider = opened(CLOSED, profile, timing, 35 * MB)
    assert [size // MB for size in wider.windows] == [25, 25, 25, 25, 25, 25, 25, 15, 25]


def test_what_a_pass_rebuilds_is_not_brought_back_ahead() -> None:
    source = SavedStorage(number=0, size_bytes=10 * MB)
    rebuilt = SavedStorage(number=1, size_bytes=10 * MB, sources=(StorageId(1, 0),), rebuild_s=0.1)
    second = dataclasses.replace(make_layer(), storages=(source, rebuilt))
    profile = make_profile(make_layer(10), second, make_layer())
    layers = tuple(LayerPlan(decisions=each) for each in [(OFFLOAD,), (OFFLOAD, REBUILD), ()])
    plan = Plan(layers=layers, windows=(0,) * 7)
    timing = StepTiming(profile, make_link(1000))
    assert peaks_mb(timing.predict(plan)) == [10, 20, 0, 0, 0, 20, 10]
    wide = opened(plan, profile, timing, 30 * MB)
    # B1 has room for 10 MB beside its own. So 20 MB may be there before it, of which it uses 10.
    assert [size // MB for size in wide.windows] == [20, 10, 30, 30, 20, 10, 20]


@given(profile=profiles(5), hardware=links(), data=st.data())
@MANY
def test_a_plan_with_open_windows_fits_wherever_it_fits_with_closed_ones(
    profile: StepProfile, hardware: Hardware, data: st.DataObject
) -> None:
    between = data.draw(st.lists(st.booleans(), min_size=len(profile.layers)))
    layers, chosen = [], []
    for index, each in enumerate(profile.layers):
        apart = between[index] and not (index and layers[-1].between)
        layers.append(dataclasses.replace(each, between=apart, may_recompute=not apart))
        modes = [LayerMode.AS_IS] if apart else list(LayerMode)
        decisions = tuple(data.draw(st.sampled_from(list(Decision))) for _ in each.storages)
        chosen.append(LayerPlan(mode=data.draw(st.sampled_from(modes)), decisions=decisions))
    profile = dataclasses.replace(profile, layers=tuple(layers))
    plan = Plan(layers=tuple(chosen), windows=(0,) * (2 * len(layers) + 1))
    for timing in (StepTiming(profile, hardware), CautiousTiming(profile, hardware, 1.0)):
        closed = timing.predict(plan)
        more_bytes = data.draw(st.sampled_from([0, 5, 20, 100])) * MB
        device_bytes = closed.peak_bytes + more_bytes
        wide = opened(plan, profile, timing, device_bytes)
        got = timing.predict(wide)
        assert got.peak_bytes <= device_bytes
        pairs = zip(got.peak_by_position, closed.peak_by_position, strict=True)
        assert all(open_bytes <= device_bytes for open_bytes, _ in pairs)


# ---- files, and other profiles -------------------------------------------------------------------


def test_a_plan_is_read_with_its_windows() -> None:
    plan = dataclasses.replace(CLOSED, windows=tuple(range(9)))
    assert reread(planned(plan, FOUR)).plan == plan


def test_windows_of_another_profile_are_refused() -> None:
    plan = dataclasses.replace(CLOSED, windows=(0,) * 8)
    with pytest.raises(PolicyError):
        StepTiming(FOUR, make_link(2)).predict(plan)


# ---- the engine ----------------------------------------------------------------------------------


class Chain(nn.Module):
    """Blocks with work between them, which saves as much as they do: 4 KiB each.

    Attributes:
        before: how many operations come before the first block.
        again: how often the last block is called again.
        look: called in the work between blocks, and when the backward of a block, or of the work
            behind it, is about to begin.
    """

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(count)])
        self.before = self.again = 0
        self.look: Callable[[str], None] = lambda _: None

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.before):
            x = x.sin()
        for block in [*self.blocks, *[self.blocks[3]] * self.again]:
            x = block(x)
            x.register_hook(lambda _: self.look("backward"))
            self.look("forward")
            x = x.sin()
            x.register_hook(lambda _: self.look("between"))
        return x


class Plus(nn.Module):
    """Saves nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


POLICY = ActivationPolicy(min_bytes=1)


def step_of(model: Chain, batch: Tensor, windows: Sequence[int], *, keeps: int = 0) -> PlannedStep:
    """A plan that offloads all that is saved but the last positions' storages."""
    profile = fake_profile(
        model,
        batch,
        Hardware.named("h100"),
        layers=list(model.blocks),
        min_bytes=1,
        optimizer_states=0,
    )
    assert [each.between for each in profile.layers][-8:] == [False, True] * 4
    count = len(profile.layers)
    layers = [LayerPlan(decisions=(OFFLOAD,) * len(each.storages)) for each in profile.layers]
    for index in range(count - keeps, count):
        layers[index] = LayerPlan(decisions=(KEEP,) * len(profile.layers[index].storages))
    plan = Plan(layers=tuple(layers), windows=tuple(windows))
    return PlannedStep(plan=plan, profile=profile, hardware=CPU, budget_bytes=0)


def gradients(model: nn.Module, batch: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(batch).square().sum().backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


@pytest.fixture
def chain() -> Iterator[tuple[Chain, Tensor]]:
    """A model on a device whose copies run as late as possible."""
    device = SimulatedDevice(0, eagerness=0.0)
    with on_device(device, lambda: PinnedStore(device, slab_bytes=2**16), bound_bytes=2**30):
        yield Chain(), torch.randn(64, 16)


def seen_in(
    model: Chain, batch: Tensor, step: PlannedStep
) -> tuple[dict[str, list[int]], list[Tensor]]:
    """What is on its way in storages: down in the forward, and up before each backward."""
    seen: dict[str, list[int]] = {"forward": [], "backward": [], "between": []}
    with ebbtide.offload(model, plan=step, activations=POLICY) as handle:
        transfers = handle._engine.transfers

        def look(what: str) -> None:
            down, up = transfers.offloads.queued_bytes, transfers.reloads.buffered_bytes
            seen[what].append((down if what == "forward" else up) // 4096)

        model.look = look
        found = gradients(model, batch)
    return seen, found


@pytest.mark.parametrize("width", [0, 1, 3])
def test_no_more_is_on_its_way_down_than_the_window(chain, width: int) -> None:
    model, batch = chain
    expected = gradients(model, batch)
    seen, found = seen_in(model, batch, step_of(model, batch, [width * 4096] * 17))
    assert all(map(torch.equal, expected, found))
    # What a layer saves is on its way while the work behind it runs, if that has room. The first
    # one saves the batch, which stays.
    assert seen["forward"] == [min(width, done) for done in (0, 2, 4, 6)]


def test_the_work_between_layers_has_its_own_window(chain) -> None:
    model, batch = chain
    wide = [0 if index % 2 else 2**20 for index in range(9)] + [0] * 8
    seen, _ = seen_in(model, batch, step_of(model, batch, wide))
    assert seen["forward"] == [0] * 4
    narrow = [2**20 if index % 2 else 0 for index in range(9)] + [0] * 8
    seen, _ = seen_in(model, batch, step_of(model, batch, narrow))
    assert seen["forward"] == [0, 1, 1, 1]


def test_the_work_behind_the_last_layer_brings_nothing_back_ahead(chain) -> None:
    model, batch = chain
    seen, _ = seen_in(model, batch, step_of(model, batch, [2**20] * 17))
    # In the backward of the last layer, all six come back. Each layer, and the work before it, have
    # read two when the backward of the next one begins.
    assert seen["backward"] == [0, 4, 2, 0]


def test_a_window_opens_when_the_backward_begins(chain) -> None:
    """Also where it reads nothing itself."""
    model, batch = chain
    model.blocks[3] = Plus()
    windows = [0] * 10 + [8192] * 7
    seen, _ = seen_in(model, batch, step_of(model, batch, windows, keeps=1))
    # The work before the last layer reads one storage, and two more may be there.
    assert seen["between"] == [0, 3, 3, 1]


def test_what_is_saved_in_a_pass_leaves_without_a_wait(chain, monkeypatch) -> None:
    """The pass needs it in memory anyway."""
    model, batch = chain
    step = step_of(model, batch, [0] * 17)
    waited = []
    monkeypatch.setattr(Offloads, "make_room", lambda _, size_bytes: waited.append(size_bytes))
    seen_in(model, batch, step)
    assert waited == []


def test_what_a_backward_has_read_makes_no_room_for_later_ones(chain) -> None:
    """It is in use until that backward has ended."""
    _, batch = chain
    model = Chain(8)
    seen, _ = seen_in(model, batch, step_of(model, batch, [8192] * 33))
    assert seen["backward"] == [0] + [2] * 6 + [0]


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_an_interrupt_in_a_step_with_windows_loses_nothing(chain, when: str) -> None:
    model, batch = chain
    expected = gradients(model, batch)
    step = step_of(model, batch, [4096] * 17)

    def interrupt(what: str) -> None:
        if what == when:
            model.look = lambda _: None
            raise KeyboardInterrupt

    with ebbtide.offload(model, plan=step, activations=POLICY):
        model.look = interrupt
        with pytest.raises(KeyboardInterrupt):
            gradients(model, batch)
        for _ in range(2):
            assert all(map(torch.equal, expected, gradients(model, batch)))


def test_windows_hold_for_several_forwards_and_backwards_of_a_step(chain) -> None:
    model, batch = chain
    step = step_of(model, batch, [0] * 17)

    def train() -> list[Tensor]:
        model.zero_grad()
        loss = model(batch).square().sum() + model(2 * batch).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]

    expected = train()
    with ebbtide.offload(model, plan=step, activations=POLICY):
        assert all(map(torch.equal, expected, train()))


def test_a_model_may_make_more_calls_than_its_plan_has(chain) -> None:
    model, batch = chain
    step = step_of(model, batch, [2**20] * 17)
    model.again = 2
    expected = gradients(model, batch)
    seen, found = seen_in(model, batch, step)
    assert all(map(torch.equal, expected, found))
    # There is no room for those but for what each saves itself.
    assert seen["forward"] == [0, 2, 4, 6, 1, 1]
