"""Ctrl-C at any line of the hot path: the next step is right, and nothing is left over."""

import contextlib
import dis
import functools
import gc
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide import ActivationPolicy, WeightPolicy
from ebbtide.devices import AbstractLane, CpuDevice, SimulatedDevice, WorkLane
from ebbtide.stores import PinnedStore
from loops import on_device
from open_files import num_open
from waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.usefixtures("frozen_imports")

SOURCE, TORCH = (str(Path(each.__file__).parent) for each in (ebbtide, nn))
LEAST_LINES = {SOURCE: 1000, TORCH: 100}
NOT_OURS = sys.modules[SimulatedDevice.__module__].__file__
"""It stands for hardware, which no interrupt stops halfway."""
STRIDE = int(os.environ.get("EBBTIDE_INTERRUPT_STRIDE", "67"))
"""Lines from one interrupt to the next; `make test-seeds` takes more, and `make soak` each line."""


class Interrupt(BaseException):
    """What a signal handler raises."""


def _begins_to_handle(frame: types.FrameType) -> bool:
    """Whether an exception is about to leave a `with` block.

    Python 3.11 never frees it if a trace function raises there.
    """
    return frame.f_code.co_code[frame.f_lasti] == dis.opmap.get("PUSH_EXC_INFO")


class Interrupter:
    """Raises at the n-th line of some code that the main thread comes to.

    Args:
        at: number of the line, from 0.
        source: the folder of the code.

    Attributes:
        where: the line at which it raised; empty if the code has fewer lines.
    """

    def __init__(self, at: int, source: str = SOURCE) -> None:
        self._left = at
        self._source = source
        self.where = ""

    def __enter__(self) -> "Interrupter":
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: types.FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(self._source) or name == NOT_OURS or self.where:
            return None
        if event in ("call", "line") and not _begins_to_handle(frame):
            # Before the first line, and before each.
            self._left -= 1
            if self._left < 0:
                self.where = f"{name}:{frame.f_lineno} ({event})"
                raise Interrupt
        return self._trace


@pytest.fixture(autouse=True)
def no_autocast_is_left() -> Iterator[None]:
    """An interrupt at the end of a block of autocast leaves its cache to all later blocks."""
    yield
    depth = torch.autocast_increment_nesting()
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()


def build() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)]
    return nn.Sequential(*blocks)


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


SETTINGS: dict[str, dict[str, Any]] = {
    "rebuild": {"activations": ActivationPolicy(min_bytes=1)},
    "offload": {"activations": ActivationPolicy(min_bytes=1, rebuild=False)},
    "some kept": {"activations": ActivationPolicy(min_bytes=1, rebuild=False, num_layers=1)},
    "schedule": {
        "activations": ActivationPolicy(min_bytes=1, rebuild=False),
        "schedule": ebbtide.schedule.default(1, 2),
    },
    "recompute": {"activations": ActivationPolicy(min_bytes=1, mode="recompute")},
    "weights": {"weights": WeightPolicy()},
    "both": {
        "activations": ActivationPolicy(min_bytes=1, rebuild=False),
        "weights": WeightPolicy(double_buffering=False),
    },
}


def step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().sum().backward()


@contextmanager
def any_store(kind: str) -> Iterator[Callable[[], None]]:
    """The CPU with a disk, or a simulated accelerator. Yields what waits for its copies."""
    if kind == "disk":
        lanes: weakref.WeakSet[AbstractLane] = weakref.WeakSet()

        def make_lane(_: CpuDevice, name: str, where: str) -> AbstractLane:
            lane = WorkLane(name, where)
            lanes.add(lane)
            return lane

        def finish_lanes() -> None:
            for lane in list(lanes):
                lane.drain(time.perf_counter() + PATIENCE_S)

        with mock.patch.object(CpuDevice, "lane", make_lane):
            yield finish_lanes
        return
    device = SimulatedDevice(0)
    with on_device(device, lambda: PinnedStore(device, slab_bytes=2**16), 2**20):
        yield device.finish_copies


def check_nothing_is_left(
    model: nn.Module, handle: ebbtide.OffloadHandle, wait: Callable[[], None]
) -> None:
    wait()
    if not handle.inspect().in_flight.is_idle:
        gc.collect()  # frames of other code may refer to the exception that refers to them
        wait()
    assert handle.inspect().in_flight.is_idle, str(handle.inspect())
    assert handle.stats.num_saved > 0, "the step has not ended"
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, "hooks are left"
    held = {type(p) for p in model.parameters()}
    assert held == {nn.Parameter}


@pytest.mark.parametrize("kind", ["disk", "simulated"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.timeout(300 if STRIDE > 10 else 3600)
def test_an_interrupt_at_any_line_leaves_nothing(
    setting: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest keeps what finalizers raise, and so the frames of the whole step.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    gc.collect()
    threads, files = threading.active_count(), num_files()
    interrupt_each_line(SETTINGS[setting], kind, SOURCE)

    def are_gone() -> bool:
        gc.collect()  # what waits for copies under way keeps a device for one collection more
        return threading.active_count() <= threads and num_files() <= files

    wait_until(are_gone, f"threads or files are left: {threading.enumerate()}")


@pytest.mark.parametrize("kind", ["disk", "simulated"])
@pytest.mark.parametrize("setting", ["offload", "weights"])
def test_an_interrupt_in_torchs_own_code_leaves_nothing(
    setting: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C between two hooks of a module's call, where no line of ebbtide's runs."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    interrupt_each_line(SETTINGS[setting], kind, TORCH)


def interrupt_each_line(settings: dict[str, Any], kind: str, source: str) -> None:
    """Interrupt a step at each line of some code in turn, and check the step after it."""
    x = torch.randn(8, 16)
    expected = gradients(build(), x)
    model = build()
    with any_store(kind) as wait:
        handle = ebbtide.offload(model, **settings)
        gradients(model, x)
        at = STRIDE // 2
        while True:
            with Interrupter(at, source) as interrupter, contextlib.suppress(Interrupt):
                step(model, x)
            if not interrupter.where:
                break
            found = gradients(model, x)
            assert all(map(torch.equal, found, expected)), interrupter.where
            try:
                check_nothing_is_left(model, handle, wait)
            except AssertionError as error:
                raise AssertionError(f"after an interrupt at {interrupter.where}") from error
            at += STRIDE
        assert at > LEAST_LINES[source], "the trace saw too little of the hot path"
        handle.detach()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["disk", "simulated"])
def test_an_interrupt_while_a_layer_is_verified_leaves_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first step of an offloaded model verifies that layers can be recomputed."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    x = torch.randn(8, 16)
    expected = gradients(build(), x)
    at = 0
    with any_store(kind) as wait:
        while True:
            model = build()
            with ebbtide.offload(model, **SETTINGS["recompute"]) as handle:
                with Interrupter(at) as interrupter, contextlib.suppress(Interrupt):
                    step(model, x)
                if not interrupter.where:
                    break
                assert torch.is_grad_enabled(), interrupter.where
                for _ in range(2):
                    found = gradients(model, x)
                    assert all(map(torch.equal, found, expected)), interrupter.where
                assert handle.stats.recomputed_bytes > 0, interrupter.where
                check_nothing_is_left(model, handle, wait)
            at += STRIDE
    assert at > 1000, "the trace saw too little of the hot path"


def test_no_other_error_hides_an_interrupt_of_the_begin_of_a_forward() -> None:
    x = torch.randn(8, 16)
    expected = gradients(build(), x)
    model = build()
    with any_store("disk") as wait, ebbtide.offload(model, **SETTINGS["offload"]) as handle:
        gradients(model, x)
        for at in range(0, 500, -(-STRIDE // 16)):
            with Interrupter(at), contextlib.suppress(Interrupt):
                step(model, x)
            assert all(map(torch.equal, gradients(model, x), expected))
        check_nothing_is_left(model, handle, wait)


def test_no_other_error_hides_an_interrupt_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step cuts the store to size. Of a norm, several tensors are copied later."""
    x = torch.randn(8, 16)
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))
    expected = gradients(model, x)
    give_back = PinnedStore._give_back

    def interrupt(store: PinnedStore, slab: Any) -> None:
        monkeypatch.undo()
        give_back(store, slab)
        raise Interrupt

    with any_store("simulated") as wait, ebbtide.offload(model, **SETTINGS["offload"]) as handle:
        gradients(model, x)
        monkeypatch.setattr(PinnedStore, "_give_back", interrupt)
        with pytest.raises(Interrupt):
            step(model, x)
        assert all(map(torch.equal, gradients(model, x), expected))
        check_nothing_is_left(model, handle, wait)


def test_gradients_after_an_interrupt_are_in_the_file_of_the_weights(tmp_path: Path) -> None:
    """The step that is interrupted is the first, so that all gradients come after it."""
    num_files = []
    for is_interrupted in (False, True):
        model = build()
        with ebbtide.offload(model, weights=WeightPolicy(), store=f"disk:{tmp_path}"):
            if is_interrupted:
                with Interrupter(300) as interrupter, contextlib.suppress(Interrupt):
                    model(torch.randn(8, 16))
                assert interrupter.where
            gradients(model, torch.randn(8, 16))
            num_files.append(num_open(tmp_path))
    assert num_files[0] == num_files[1] > 0


def test_a_saved_tensor_dies_without_running_python_code() -> None:
    """An interrupt that is raised in a finalizer is lost, and so is the finalizer's work."""
    called = []
    model = build()
    with ebbtide.offload(model, **SETTINGS["offload"]):
        loss = model(torch.randn(8, 16)).square().sum()
        sys.setprofile(lambda frame, event, _: called.append((frame.f_code.co_name, event)))
        del loss
        sys.setprofile(None)
    assert not [name for name, event in called if event == "call"]


def test_a_graph_that_outlives_an_interrupt_can_be_used() -> None:
    x = torch.randn(8, 16)
    expected = gradients(build(), x)
    model = build()
    with any_store("disk") as wait:
        handle = ebbtide.offload(model, **SETTINGS["offload"])
        before = model(x).square().sum()
        for at in range(200, 1000, 100):
            with Interrupter(at), contextlib.suppress(Interrupt):
                step(model, x)
        assert all(map(torch.equal, gradients(model, x), expected))
        model.zero_grad()
        before.backward()
        assert all(
            torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True)
        )
        del before
        gradients(model, x)
        check_nothing_is_left(model, handle, wait)
        handle.detach()


def test_a_saved_tensor_that_dies_in_a_cycle_is_noted() -> None:
    """The frames of an exception refer to each other, and to the saved tensor of a hook."""
    model = build()
    with any_store("disk") as wait, ebbtide.offload(model, **SETTINGS["offload"]) as handle:
        loss = model(torch.randn(8, 16)).square().sum()
        cycle: list[Any] = [loss.grad_fn, *_nodes_below(loss.grad_fn)]
        cycle.append(cycle)
        saved = [each for each in gc.get_objects() if type(each).__name__ == "RecordedTensor"]
        assert saved
        cycle += saved
        del loss, saved, cycle
        gc.collect()
        check_nothing_is_left(model, handle, wait)


def _nodes_below(node: Any) -> list[Any]:
    found = [below for below, _ in node.next_functions if below is not None]
    return found + [each for below in found for each in _nodes_below(below)]


@pytest.mark.parametrize("where", ["layer", "layer alone", "recomputation", "backward"])
def test_after_ctrl_c_in_a_layer_the_model_holds_its_parameters(where: str) -> None:
    """Torch calls no hook of a module that ends with KeyboardInterrupt."""
    x = torch.randn(8, 16)
    expected = gradients(build(), x)
    model = build()
    again = False

    def interrupt(*_: object) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        if not again and in_backward == (where == "recomputation"):
            raise KeyboardInterrupt

    class InBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
            return x * 1

        @staticmethod
        def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
            raise KeyboardInterrupt

    run: Callable[[torch.Tensor], torch.Tensor] = model
    layer = model[1]
    assert isinstance(layer, nn.Sequential)
    if where == "layer alone":
        run = layer
    if where == "recomputation":
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    if where == "backward":
        layer[1].register_forward_hook(
            lambda *call: call[-1] if again else InBackward.apply(call[-1])
        )
    else:
        layer[1].register_forward_pre_hook(interrupt)
    with any_store("simulated") as wait:
        handle = ebbtide.offload(model, weights=WeightPolicy())
        with pytest.raises(KeyboardInterrupt):
            run(x).square().sum().backward()
        if where != "layer alone":  # no code of ebbtide runs then, until the next forward
            assert {type(p) for p in model.parameters()} == {nn.Parameter}
        again = True
        assert all(map(torch.equal, gradients(model, x), expected))
        check_nothing_is_left(model, handle, wait)
        handle.detach()
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
