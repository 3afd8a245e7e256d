"""Schedules on the device: the same bits, moved where they say, within the memory they promise."""

import warnings

import pytest
import torch
from ebbtide.compat.transformer_engine import get_cpu_offload_context
from torch import Tensor

import ebbtide
from ebbtide import schedule
from gpu_bench import (
    SIZE_BYTES,
    STORES,
    TIGHT,
    assert_parity,
    batch,
    finish_device,
    join,
    mean_square,
    needs_accelerator,
    on_stream,
    side_stream,
    tower,
)
from schedule_orders import PIPELINE_ORDER, TABLE
from zoo import assert_bitwise_equal, gradients

LAYERS = 8


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("num_layers", [1, 4, 7])
def test_a_model_under_the_default_schedule(
    device: torch.device, store: str, num_layers: int
) -> None:
    plan = schedule.default(num_layers, LAYERS)
    policy = ebbtide.ActivationPolicy(min_bytes=1, rebuild=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # it departs from nothing
        stats = assert_parity(
            tower(device, LAYERS), batch(device), activations=policy, schedule=plan, store=store
        )
    assert stats.offloaded_bytes == stats.reloaded_bytes > 0


def run_microbatches(
    session: ebbtide.OffloadSession | None, model: torch.nn.Module, inputs: list[Tensor]
) -> dict[str, Tensor]:
    model.zero_grad()
    outputs: dict[str, Tensor] = {}
    for name in PIPELINE_ORDER.split():
        number = name[1:]
        if name[0] == "B":
            outputs.pop(number).backward()
        elif session is None:
            outputs[number] = mean_square(model(inputs[int(number)]))
        else:
            with session.layer():
                output = model(inputs[int(number)])
            outputs[number] = mean_square(session.sync(output))
            del output
    return gradients(model, {})


@pytest.mark.parametrize("store", STORES)
def test_eight_microbatches_by_a_table(device: torch.device, store: str) -> None:
    model, inputs = tower(device, 2), [batch(device, seed=seed) for seed in range(8)]
    expected = run_microbatches(None, model, inputs)
    plan = schedule.from_table(TABLE, 8, order=PIPELINE_ORDER)
    with ebbtide.OffloadSession(
        schedule=plan, activations=TIGHT, device=device, store=store, trace=True
    ) as session:
        for _ in range(3):
            assert_bitwise_equal(run_microbatches(session, model, inputs), expected)
        assert session.stats.offloaded_bytes > 0
        released = {e.layer for e in session.trace.events if e.what == "release"}
        assert released == set(TABLE)


@needs_accelerator
def test_the_peak_is_the_layers_that_stay(device: torch.device) -> None:
    """For k of N equal layers the default schedule keeps N - k layers' activations."""
    rows = 8192
    size_bytes = rows * 256 * 4  # a layer saves its input and its linear map's result
    model, x = tower(device, LAYERS), batch(device, rows)
    policy = ebbtide.ActivationPolicy(min_bytes=1, rebuild=False)
    plan = schedule.default(5, LAYERS)
    with ebbtide.offload(model, activations=policy, schedule=plan) as handle:
        for _ in range(2):
            mean_square(model(x)).backward()
        finish_device(device)
        # A layer's input is the result of the layer before, which that one's GELU does not save.
        assert handle.stats.peak_device_bytes <= (LAYERS - 5) * 2 * size_bytes
        assert handle.stats.offloaded_bytes == 5 * 2 * size_bytes


@needs_accelerator
def test_backward_on_another_stream(device: torch.device) -> None:
    model, x = tower(device, LAYERS), batch(device)
    mean_square(model(x)).backward()
    expected = gradients(model, {})
    policy = ebbtide.ActivationPolicy(min_bytes=1)
    with ebbtide.offload(model, activations=policy, schedule=schedule.default(4, LAYERS)):
        for _ in range(3):
            model.zero_grad()
            loss = mean_square(model(x))
            stream = side_stream(device)
            with on_stream(stream):
                loss.backward()
            join(stream)
            del loss
            assert_bitwise_equal(gradients(model, {}), expected)


def test_transformer_engines_context(device: torch.device) -> None:
    model, x = tower(device, LAYERS), batch(device)
    mean_square(model(x)).backward()
    expected = gradients(model, {})
    context, sync = get_cpu_offload_context(
        True, 4, LAYERS, device=device, min_tensor_size_to_offload=SIZE_BYTES // 16
    )
    for _ in range(3):
        model.zero_grad()
        h = x
        for layer in model:
            with context:
                h = layer(h)
            h = sync(h)
        mean_square(h).backward()
        del h
        assert_bitwise_equal(gradients(model, {}), expected)
    assert context.session.stats.offloaded_bytes > 0
    context.session.close()
