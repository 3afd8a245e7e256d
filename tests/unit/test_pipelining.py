"""Stages of `torch.distributed.pipelining`, all of them in one process, so that nothing is sent."""

import contextlib
import functools
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

import ebbtide
import loopback
from ebbtide import ActivationPolicy, PolicyError, ScheduleError
from ebbtide.devices import SimulatedDevice
from ebbtide.interop.pipelining import offload_stages
from ebbtide.stores import PinnedStore
from loops import on_device
from saying import warned

ROWS, WIDTH, WIDE = 32, 16, 128
UNIT_BYTES = 2 * ROWS * WIDE * 4  # the GELU's input and its output
INPUT_BYTES = ROWS * WIDTH * 4  # the first product's; the pipeline keeps it
POLICY = ActivationPolicy(min_bytes=1024, rebuild=False)
COUNT = 4  # microbatches
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        backend = "gloo"
        if hasattr(PipelineStage, "_get_init_p2p_neighbors_ops"):  # a stage may greet itself
            loopback.register()
            backend = "loopback"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


class Block(nn.Module):
    """A stage. ``fails`` counts calls down to one that raises."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        self.fails = -1

    def forward(self, x: Tensor) -> Tensor:
        self.fails -= 1
        if self.fails == 0:
            raise ValueError("no more")
        return self.down(F.gelu(self.up(x)))


def build(kind: Any, num_stages: int, count: int = COUNT, block: Any = Block) -> Any:
    """A schedule with all its stages here."""
    torch.manual_seed(0)
    stages = [
        PipelineStage(block(), number, num_stages, torch.device("cpu"))
        for number in range(num_stages)
    ]
    return kind(stages[0] if kind is ScheduleGPipe else stages, count, loss_fn=F.mse_loss)


def build_again(pipeline: Any) -> Any:
    """A new schedule with new stages of the same modules."""
    modules = [stage.submod for stage in stages_of(pipeline)]
    stages = [
        PipelineStage(module, number, len(modules), torch.device("cpu"))
        for number, module in enumerate(modules)
    ]
    single = hasattr(pipeline, "_stage")
    return type(pipeline)(stages[0] if single else stages, COUNT, loss_fn=F.mse_loss)


def stages_of(pipeline: Any) -> list[PipelineStage]:
    return [pipeline._stage] if hasattr(pipeline, "_stage") else pipeline._stages


def step(pipeline: Any, seed: int, count: int = COUNT) -> list[Tensor]:
    """One step. Returns losses and gradients."""
    generator = torch.Generator().manual_seed(seed)
    batch, target = torch.randn(2, count * ROWS, WIDTH, generator=generator)
    parameters = [p for stage in stages_of(pipeline) for p in stage.submod.parameters()]
    for parameter in parameters:
        parameter.grad = None
    losses: list[Tensor] = []
    pipeline.step(batch, target=target, losses=losses)
    return [*(loss.detach() for loss in losses), *(p.grad for p in parameters)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.fixture(autouse=True)
def no_departure() -> Iterator[None]:
    """Steps follow their schedules; who departs says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


CASES = [(ScheduleGPipe, 1), (ScheduleLoopedBFS, 2), (ScheduleLoopedBFS, 3)]


@pytest.mark.parametrize(("kind", "num_stages"), CASES)
@pytest.mark.parametrize("resident", [1, 2, 3])
def test_same_bits_within_what_was_promised(kind: Any, num_stages: int, resident: int) -> None:
    plain, pipeline = build(kind, num_stages), build(kind, num_stages)
    handle = offload_stages(pipeline, resident=resident, activations=POLICY)
    for seed in range(3):
        assert_same(step(pipeline, seed), step(plain, seed))
    assert handle.layers == tuple(f"stage {number}" for number in range(num_stages))
    assert handle.schedule.peak_resident == resident
    assert handle.stats.peak_device_bytes == resident * UNIT_BYTES
    offloaded = len(handle.schedule.offloaded)
    assert offloaded >= num_stages * COUNT - resident
    assert handle.stats.offloaded_bytes == offloaded * UNIT_BYTES


class Tower(nn.Module):
    """A stage of several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("on", ["cpu", "device"])
@pytest.mark.parametrize("block", [Block, Tower])
@pytest.mark.parametrize(
    ("kind", "num_stages"),
    [(ScheduleGPipe, 1), (ScheduleInterleaved1F1B, 2), (ScheduleZBVZeroBubble, 2)],
)
def test_weights_rest_on_the_host(kind: Any, num_stages: int, block: Any, on: str) -> None:
    if on == "device":
        device = SimulatedDevice(num_stages)
        place: Any = on_device(device, lambda: PinnedStore(device, slab_bytes=2**16))
    else:
        place = contextlib.nullcontext()
    plain, pipeline = build(kind, num_stages, block=block), build(kind, num_stages, block=block)
    with place:
        handle = offload_stages(
            pipeline, resident=2, activations=POLICY, weights=ebbtide.WeightPolicy()
        )
    parameters = handle.inspect().parameters
    layers = 3 if block is Tower else 1
    assert len({each.group for each in parameters}) == num_stages * layers
    optimizers = []
    for each in (plain, pipeline):
        parameters = [p for stage in stages_of(each) for p in stage.submod.parameters()]
        optimizers.append(torch.optim.AdamW(parameters, lr=0.01))
    for seed in range(3):
        expected = step(plain, seed)
        found = step(pipeline, seed)
        assert_same(found, expected)
        for optimizer in optimizers:
            optimizer.step()
    assert handle.stats.peak_device_bytes > 0
    for mine, theirs in zip(*(o.param_groups[0]["params"] for o in optimizers), strict=True):
        assert torch.equal(mine, theirs)
    if num_stages == 1:  # torch cannot evaluate where one rank has several
        rows = torch.randn(COUNT * ROWS, WIDTH)
        with torch.no_grad():
            assert_same(*([each.eval(rows, target=rows)] for each in (pipeline, plain)))
    if on == "device":
        peak = handle.inspect().in_flight.peak_weight_groups
        assert peak == min(2, num_stages * layers)
    handle.detach()
    assert_same(step(pipeline, 9), step(plain, 9))
    if on == "device":
        device.finish_copies()
        handle.inspect()
        assert device.allocated_bytes() == 0


@pytest.mark.parametrize(
    ("policy", "resting"),
    [
        (ebbtide.WeightPolicy(num_layers=4), [0, 1, 2, 3]),
        (ebbtide.WeightPolicy(keep_last=2), [0, 1, 2, 3]),
        (ebbtide.WeightPolicy(num_layers=3, keep_last=2), [0, 1, 2]),
    ],
)
def test_a_weight_policy_counts_the_layers_of_all_stages(
    policy: ebbtide.WeightPolicy, resting: list[int]
) -> None:
    """Two towers of three layers are a row of six."""
    plain, pipeline = (build(ScheduleInterleaved1F1B, 2, block=Tower) for _ in range(2))
    handle = offload_stages(pipeline, resident=2, activations=POLICY, weights=policy)
    found = {each.name.rsplit(".", 2)[0] for each in handle.inspect().parameters}
    assert found == {f"stage {number // 3}.blocks.{number % 3}" for number in resting}
    for seed in range(2):
        assert_same(step(pipeline, seed), step(plain, seed))


def test_what_the_pipeline_keeps_does_not_move() -> None:
    pipeline = build(ScheduleLoopedBFS, 2)
    handle = offload_stages(pipeline, resident=1, activations=POLICY)
    step(pipeline, 0)
    # All inputs: the first stage's are parts of the batch, the second's come from the first.
    weights = 2 * COUNT * WIDTH * WIDE * 4  # of the second product; the first's is not
    second = COUNT * WIDTH * WIDE * 4  # ... but for the second stage, whose input wants a gradient
    assert handle.stats.parameter_bytes == 2 * COUNT * INPUT_BYTES + weights + second
    assert handle.stats.unique_bytes == 2 * COUNT * UNIT_BYTES


def test_forward_alone_passes_through() -> None:
    # Of stages that follow each other in one process torch's eval asks for gradients.
    plain, pipeline = build(ScheduleGPipe, 1), build(ScheduleGPipe, 1)
    handle = offload_stages(pipeline, resident=2, activations=POLICY)
    step(pipeline, 0)
    before = handle.stats
    batch = torch.randn(COUNT * ROWS, WIDTH)
    outputs = [each.eval(batch, target=batch) for each in (plain, pipeline)]  # autograd records
    with torch.no_grad():
        outputs += [each.eval(batch, target=batch) for each in (plain, pipeline)]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[2], outputs[3])
    assert handle.stats is before
    assert_same(step(pipeline, 1), step(plain, 1))
    assert handle.stats is not before
    assert handle.stats.saved_bytes == before.saved_bytes
    assert handle.stats.offloaded_bytes == before.offloaded_bytes > 0


@pytest.mark.parametrize("count", [2, 6])
def test_another_number_of_microbatches(count: int) -> None:
    """Of the last batch of an epoch, say: a second schedule runs the same stages."""
    pipeline, plain = build(ScheduleGPipe, 1), build(ScheduleGPipe, 1)
    handle = offload_stages(pipeline, resident=2, activations=POLICY)
    step(pipeline, 0)
    other = ScheduleGPipe(pipeline._stage, count, loss_fn=F.mse_loss)
    plain_other = ScheduleGPipe(plain._stage, count, loss_fn=F.mse_loss)
    with warned("schedule-departed"):
        found = step(other, 1, count)
    assert_same(found, step(plain_other, 1, count))
    # Steps are whole again; their figures are those of a step. (torch lets a stage go back to a
    # larger number with a new schedule alone.)
    pipeline = ScheduleGPipe(pipeline._stage, COUNT, loss_fn=F.mse_loss)
    plain = ScheduleGPipe(plain._stage, COUNT, loss_fn=F.mse_loss)
    for seed in (2, 3):
        assert_same(step(pipeline, seed), step(plain, seed))
        if seed == 3:  # in the first, copies of the step before may still be under way
            assert handle.stats.peak_device_bytes == 2 * UNIT_BYTES
        assert handle.stats.offloaded_bytes == len(handle.schedule.offloaded) * UNIT_BYTES


@pytest.mark.parametrize(("kind", "num_stages"), [(ScheduleGPipe, 1), (ScheduleLoopedBFS, 2)])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception(where: str, kind: Any, num_stages: int) -> None:
    plain, pipeline = build(kind, num_stages), build(kind, num_stages)
    handle = offload_stages(pipeline, resident=2, activations=POLICY)
    step(pipeline, 0)
    stage = stages_of(pipeline)[0]
    if where == "forward":
        stage.submod.fails = 3
        with pytest.raises(RuntimeError):
            step(pipeline, 1)
    else:
        hook = stage.submod.up.bias.register_hook(fail)
        with pytest.raises(RuntimeError):
            step(pipeline, 1)
        hook.remove()
    pipeline._internal_losses.clear()  # torch leaves those of the failed step there
    if num_stages > 1 and TORCH >= (2, 15):
        # Stages that receive cannot go on; torch asks for new ones. The first handle has to go.
        with pytest.raises(RuntimeError):
            step(pipeline, 1)
        handle.detach()
        pipeline = build_again(pipeline)
        handle = offload_stages(pipeline, resident=2, activations=POLICY)
    for seed in (2, 3):
        assert_same(step(pipeline, seed), step(plain, seed))
        if seed == 3:  # in the first, copies of the step before may still be under way
            assert handle.stats.peak_device_bytes == 2 * UNIT_BYTES
        assert handle.stats.offloaded_bytes == len(handle.schedule.offloaded) * UNIT_BYTES


def fail(_: Tensor) -> None:
    raise ValueError("no more")


class Sequence(nn.Module):
    """Its output is a view: torch cannot detach that when the backward is over."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).view(-1, WIDTH)


def test_outputs_hold_no_graph() -> None:
    """After a backward in two parts, all that was saved would live on in it."""
    pipeline = build(ScheduleZBVZeroBubble, 2, block=Sequence)
    handle = offload_stages(pipeline, resident=2, activations=POLICY)
    batch, target = torch.randn(2, COUNT * ROWS, WIDTH)
    gc.disable()
    try:
        output = pipeline.step(batch, target=target)
        assert handle.stats.peak_device_bytes == 2 * UNIT_BYTES  # so the step is over
        assert output.shape == (COUNT * ROWS, WIDTH)
    finally:
        gc.enable()


# ---- attaching and detaching ---------------------------------------------------------------------


def test_detach_restores_the_stages() -> None:
    pipeline = build(ScheduleLoopedBFS, 2)
    first, second = stages_of(pipeline)
    own = functools.partial(first.forward_one_chunk)
    first.forward_one_chunk = own  # somebody has wrapped it before
    before = set(vars(second))
    with offload_stages(pipeline, resident=2, activations=POLICY) as handle:
        assert vars(second).keys() - before == {
            "clear_runtime_states",
            "forward_one_chunk",
            "backward_one_chunk",
            "backward_weight_one_chunk",
        }
        step(pipeline, 0)
    assert vars(second).keys() == before
    assert first.forward_one_chunk is own
    counted = handle.stats
    step(pipeline, 1)
    assert handle.stats is counted
    handle.detach()
    with offload_stages(pipeline, resident=2, activations=POLICY):
        step(pipeline, 2)


def test_detach_between_forward_and_backward() -> None:
    plain, pipeline = build(ScheduleGPipe, 1), build(ScheduleGPipe, 1)
    handle = offload_stages(pipeline, resident=1, activations=POLICY)
    stage = pipeline._stage
    backward = type(stage).backward_one_chunk

    def detach(loss: Tensor, *_: Any) -> Tensor:
        if len(pipeline._internal_losses) == COUNT - 1:  # the last forward has been
            handle.detach()
        return loss

    pipeline._loss_fn = lambda output, target: detach(F.mse_loss(output, target))
    assert_same(step(pipeline, 0), step(plain, 0))
    assert stage.backward_one_chunk.__func__ is backward


def test_two_attaches_are_refused() -> None:
    pipeline = build(ScheduleLoopedBFS, 2)
    before = [dict(vars(stage)) for stage in stages_of(pipeline)]
    with offload_stages(pipeline, resident=2):
        with pytest.raises(PolicyError):
            offload_stages(pipeline, resident=2)
        single = ScheduleGPipe(stages_of(pipeline)[0], COUNT, loss_fn=F.mse_loss)
        with pytest.raises(PolicyError):
            offload_stages(single, resident=2)
    with (
        ebbtide.offload(stages_of(pipeline)[1].submod),
        pytest.raises(PolicyError),
    ):
        offload_stages(pipeline, resident=2)
    assert [dict(vars(stage)) for stage in stages_of(pipeline)] == before


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, PolicyError, "give resident"),
        ({"resident": 2, "schedule": ebbtide.schedule.default(1, 2)}, PolicyError, "one of them"),
        ({"resident": 0}, ScheduleError, "resident must be a whole number"),
        ({"resident": 2, "lead": -1}, ScheduleError, "lead must be"),
        ({"schedule": "order: F0 B0"}, PolicyError, "Schedule.parse"),
        ({"schedule": ebbtide.schedule.default(1, 2)}, ScheduleError, "for another order"),
        *(
            ({"resident": 2, "activations": policy}, PolicyError, "the schedule says what leaves")
            for policy in (
                ActivationPolicy(num_layers=1),
                ActivationPolicy(keep_last=1),
            )
        ),
        ({"resident": 2, "store": "host"}, PolicyError, "RAM to RAM"),
    ],
)
def test_wrong_arguments(arguments: Any, error: type[Exception], message: str) -> None:
    pipeline = build(ScheduleInterleaved1F1B, 2)
    before = [dict(vars(stage)) for stage in stages_of(pipeline)]
    with pytest.raises(error, match=message):
        offload_stages(pipeline, **arguments)
    assert [dict(vars(stage)) for stage in stages_of(pipeline)] == before


def test_what_is_no_schedule_or_tells_no_order() -> None:
    with pytest.raises(PolicyError):
        offload_stages(Block(), resident=2)
    pipeline = build(ScheduleGPipe, 1)
    pipeline.pipeline_order = None
    with pytest.raises(PolicyError):
        offload_stages(pipeline, resident=2)
    ready = ebbtide.schedule.from_pipeline("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", resident=2)
    with offload_stages(pipeline, schedule=ready, activations=POLICY) as handle:
        step(pipeline, 0)
        assert handle.stats.peak_device_bytes == 2 * UNIT_BYTES
