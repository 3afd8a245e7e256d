"""The random programs of tests/simulation on the software accelerator, against plain training.

A check takes a seed and an order of execution. It says both if it fails, and the two replay it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import gc
import os
import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import softdevice
from ebbtide.devices import AcceleratorDevice
from harness import (
    FaultyOs,
    Knobs,
    Simulation,
    _bits,
    _comparable,
    _failing_again,
    _noting_failures,
    check_failed_reads,
    drain_autograd,
    poll_weakly,
    without_collector,
)
from programs import WIDTH, Outcome, Program
from schedule_programs import Tally, check_schedule
from soft_bench import on

WAIT_S = 10.0
"""For threads to let go of what they hold; reached only by a check that fails."""
LARGEST_DELAY = 2_000_000
"""Cycles that a stream sleeps, in the order "threads": 10 ms."""


def order_of(name: str, seed: int) -> str:
    """The order of execution by its name; "random" is drawn anew for each seed."""
    return f"random:{seed}" if name == "random" else name


@contextlib.contextmanager
def running(kind: str, seed: int, order: str) -> Iterator[None]:
    """Programs within compute on the device. What fails says what replays it.

    It leaves no other stream to what is run next.
    """
    _freeze()
    order = order_of(order, seed)
    softdevice.choose_order(order)
    try:
        with (
            torch.device("softdevice"),
            on(torch.accelerator.current_stream()),
            without_collector(),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "the system refused to page-lock", RuntimeWarning)
            warnings.filterwarnings("ignore", ".*AccumulateGrad.*stream", UserWarning)
            yield
    except Exception as error:
        raise AssertionError(
            f"{kind} seed {seed}, order {order}: {type(error).__name__}: {error}"
        ) from error


@functools.cache
def _freeze() -> None:
    """Spare the collector what has been imported: a program takes less time than looking at it."""
    gc.freeze()


def wait_until(condition: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    """Wait for what other threads are about to do."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, otherwise()
        time.sleep(0.001)


class Leftovers:
    """What the device and the process have now, to be compared with later."""

    def __init__(self) -> None:
        torch.accelerator.synchronize()
        self._memory_bytes = torch.accelerator.memory_allocated()

    def left_bytes(self) -> int:
        """Device memory that has been allocated since, and is still."""
        return int(torch.accelerator.memory_allocated()) - self._memory_bytes

    def check(self, device: Any) -> None:
        """Nothing of the engine's is left: device memory, page-locked memory, threads."""
        torch.accelerator.synchronize()
        wait_until(
            self._has_memory_back, lambda: f"{self.left_bytes()} bytes of the device are left"
        )
        wait_until(  # a thread of its own unlocks what a graph held that died after its engine
            lambda: not device.pinned,
            lambda: f"{len(device.pinned)} blocks of host memory are page-locked still",
        )
        wait_until(lambda: not _threads(), lambda: f"threads are left: {_threads()}")

    def _has_memory_back(self) -> bool:
        if self.left_bytes() > 0:
            # After a backward that raised, autograd's threads hold what is part of cycles, too.
            drain_autograd()
            gc.collect()
        return self.left_bytes() <= 0


def _threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("ebbtide-")]


def make_device(seed: int, refusals: float = 0.0) -> Any:
    """Make the engine's device, and know what it has page-locked.

    Args:
        seed: says when the system refuses.
        refusals: how often it refuses to page-lock memory.
    """
    device: Any = AcceleratorDevice(torch.device("softdevice", 0))
    pin, choices = device.pin, random.Random(seed)
    device.pinned = {}

    def watched_pin(address: int, size_bytes: int) -> Callable[[], None]:
        if choices.random() < refusals:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        unlock = pin(address, size_bytes)
        device.pinned[address] = size_bytes

        def watched_unlock() -> None:
            unlock()
            del device.pinned[address]

        return watched_unlock

    device.pin = watched_pin
    return device


# ---- activations --------------------------------------------------------------------------------


class SoftBench(Simulation):
    """Activations of programs on torch's own streams.

    An operation computes on the main stream or on one beside it, if the knobs say so. Its backward
    then computes there too, for so autograd does it.
    """

    def __init__(self, seed: int, knobs: Knobs) -> None:
        self.leftovers = Leftovers()
        self._stream_choices = random.Random(seed)
        self._beside = torch.Stream(device="softdevice")
        super().__init__(seed, knobs)
        self.store.on_progress = poll_weakly(self.transfers)

    def make_device(self) -> Any:
        return make_device(self.knobs.device_seed, self.knobs.refusals)

    def forward(self, function: Callable[[], Any]) -> Any:
        began = self.hooks.begin()
        try:
            return function()
        finally:
            if began:
                self.hooks.end()

    def apply(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        apply = super().apply
        if not self.knobs.mixed_streams or self._stream_choices.random() < 0.5:
            return apply(function, *tensors)
        return self._apply_beside(lambda: apply(function, *tensors), tensors)

    def _apply_beside(self, function: Callable[[], Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
        """As torch's notes on streams ask for: both ways a wait, and every use recorded."""
        main = torch.accelerator.current_stream()
        self._beside.wait_stream(main)
        for tensor in tensors:
            tensor.record_stream(self._beside)
        if self._stream_choices.random() < 0.3:
            with on(self._beside):
                softdevice.sleep(self._stream_choices.randrange(LARGEST_DELAY))
        with on(self._beside):
            result = function()
        main.wait_stream(self._beside)
        result.record_stream(main)
        return result

    def after_error(self) -> None:
        """Order the main stream after the gradients of a backward that raised.

        torch lets the caller's stream wait for the others only at the end of a backward that did
        not raise. Plain training on two streams then reads gradients too early as well.
        """
        torch.accelerator.current_stream().wait_stream(self._beside)

    def check_account(self) -> None:
        transfers = self.transfers
        transfers.settle()
        # Autograd's thread may hold the last node's for a moment after backward has returned.
        wait_until(lambda: not transfers.live, lambda: f"{transfers.live} handles are alive")
        super().check_account()

    def after_step(self, outcome: Outcome) -> None:
        if outcome.errors:
            drain_autograd()
        self.check_account()

    def check_at_rest(self) -> None:
        if self.knobs.closes_early:
            self.transfers.close()  # with copies still under way
            assert not self.transfers.offloads.queue, "memory is held after close"
        self.device.finish_copies()
        self.check_account()
        wait_until(self._is_idle, lambda: "copies did not end")
        self.transfers.close()
        assert self.store.host_capacity_bytes == 0

    def _is_idle(self) -> bool:
        transfers = self.transfers
        transfers.poll()
        under_way = transfers.offloads.queue or transfers.reloads.abandoned
        return not under_way and self.store.used_bytes == 0


def check_activations(seed: int, order: str = "threads") -> Counter[str]:
    """Run a program plainly and offloaded, and compare everything.

    Returns:
        What the program did, and how often.
    """
    with running("activations", seed, order):
        knobs = Knobs.of(seed)
        check_failed_reads(seed, SoftBench)
        _check_readers(seed)
        _check_microbatches(seed)
        bench = SoftBench(seed, knobs)
        offloaded, failed = _run_offloaded(seed, bench)
        bench.check_at_rest()
        plainly = Program(seed, starts_over=knobs.rebuild).run(_failing_again(failed))
        assert _comparable(offloaded, knobs) == _comparable(plainly, knobs)
        _assert_same_bits(offloaded.tensors, plainly.tensors)
        content = offloaded.content + Counter(offloaded.errors)
        del offloaded, plainly
        bench.leftovers.check(bench.device)
    return content


def _run_offloaded(seed: int, bench: SoftBench) -> tuple[Outcome, set[int]]:
    program = Program(
        seed,
        bench.switch,
        starts_over=bench.knobs.rebuild,
        apply=bench.apply,
        after_error=bench.after_error,
    )
    failed: set[int] = set()
    with mock.patch("ebbtide.stores.disk_file.os", FaultyOs(bench.knobs)):
        return program.run(_noting_failures(bench.forward, failed), bench.after_step), failed


def _assert_same_bits(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    for number, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        same = torch.equal(_bits(mine.cpu()), _bits(theirs.cpu()))
        assert same, f"tensor {number} of {len(got)} differs from plain training"


def _check_readers(seed: int) -> None:
    """Results with several readers each, on two streams, of which one may be far behind."""
    knobs = dataclasses.replace(Knobs.of(seed), failures=0.0, mixed_streams=True)
    bench = SoftBench(seed, knobs)
    draw = random.Random(seed)
    x = torch.linspace(-1, 1, 64 * WIDTH).view(-1, WIDTH).requires_grad_()

    def late(gradient: Tensor) -> Tensor:
        sleep_at_times(draw)
        return gradient

    def readers(apply: Callable[..., Tensor]) -> Tensor:
        y = x
        for _ in range(3):
            result = torch.nn.functional.gelu(y * 0.5)
            parts = [apply(function, result) for function in (torch.sin, torch.tanh, torch.square)]
            for part in parts:
                part.register_hook(late)  # on the stream on which backward will read the result
            y = torch.stack(parts).sum(0)
        return y.sum()

    loss = bench.forward(lambda: readers(bench.apply))
    (got,) = torch.autograd.grad(loss, x)
    del loss
    bench.check_at_rest()
    (expected,) = torch.autograd.grad(readers(lambda function, *tensors: function(*tensors)), x)
    assert torch.equal(got, expected), "results with readers on two streams differ"


def _check_microbatches(seed: int) -> None:
    """Microbatches on two streams, of which neither ever waits for the other."""
    draw = random.Random(seed)
    bound_bytes = draw.choice((0, 4096, 16384, 65536))
    knobs = dataclasses.replace(Knobs.of(seed), failures=0.0, bound_bytes=bound_bytes)
    bench = SoftBench(seed, knobs)
    rows = (8, 16, 32)
    inputs = [torch.randn(draw.choice(rows), WIDTH, requires_grad=True) for _ in range(8)]
    expected = [torch.autograd.grad(_chain(x), x)[0] for x in inputs]
    main = torch.accelerator.current_stream()
    streams = [torch.Stream(device="softdevice") for _ in range(2)]
    for stream in streams:
        stream.wait_stream(main)
    losses: list[Tensor] = []
    got: list[Tensor] = []
    for number in range(len(inputs) + 1):
        if number < len(inputs):
            with on(streams[number % 2]):
                sleep_at_times(draw)
                losses.append(bench.forward(functools.partial(_chain, inputs[number])))
        if number:
            with on(streams[(number - 1) % 2]):
                sleep_at_times(draw)
                got += torch.autograd.grad(losses.pop(0), inputs[number - 1])
    for stream in streams:
        main.wait_stream(stream)
    bench.check_at_rest()
    _assert_same_bits(got, expected)


def _chain(x: Tensor) -> Tensor:
    for _ in range(5):
        x = x.sin() * 0.9
    return x.sum()


def sleep_at_times(draw: random.Random) -> None:
    """Queue a kernel that holds the current stream up, if chance says so."""
    if draw.random() < 0.5:
        softdevice.sleep(draw.randrange(LARGEST_DELAY))


# ---- schedules ----------------------------------------------------------------------------------


def check_schedules(seed: int, order: str = "threads") -> Counter[str]:
    """Run a step under its schedule, thrice, and compare with plain autograd."""
    tally, benches = Tally(), []

    def make_bench(seed: int, knobs: Knobs) -> SoftBench:
        benches.append(SoftBench(seed, knobs))
        return benches[-1]

    with running("schedules", seed, order):
        check_schedule(seed, tally, make_bench)
        benches[0].leftovers.check(benches[0].device)
    return tally.content
