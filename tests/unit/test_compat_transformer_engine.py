"""Transformer Engine's spelling: its loops run unchanged, its checks are made."""

import warnings

import pytest
import torch
from ebbtide.compat.transformer_engine import get_cpu_offload_context, mark_not_offload
from torch import Tensor, nn

import ebbtide
from ebbtide import PolicyError, ScheduleError
from schedule_orders import PIPELINE_ORDER, TABLE

SMALL = {"min_tensor_size_to_offload": 256, "device": "cpu"}


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(count)]


def gradients(model: list[nn.Module]) -> list[Tensor]:
    found = [p.grad.clone() for layer in model for p in layer.parameters()]
    for layer in model:
        layer.zero_grad()
    return found


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs)


def plain(model: list[nn.Module], x: Tensor) -> list[Tensor]:
    for layer in model:
        x = layer(x)
    x.sum().backward()
    return gradients(model)


def test_k_of_n() -> None:
    model, x = layers(6), torch.randn(64, 32)
    expected = plain(model, x)
    context, sync = get_cpu_offload_context(True, 2, 6, **SMALL)
    for _ in range(3):
        h = x
        for layer in model:
            with context:
                h = layer(h)
            h = sync(h)
        h.sum().backward()
        del h
        assert_same(gradients(model), expected)
    assert context.session.stats.offloaded_bytes > 0
    assert context.session.schedule == ebbtide.schedule.default(2, 6)
    context.session.close()


@pytest.mark.parametrize("order", [PIPELINE_ORDER, None])
def test_eight_microbatches_with_a_table(order: str | None) -> None:
    layer, inputs = layers(1), [torch.randn(64, 32) for _ in range(8)]
    for x in inputs:
        layer[0](x).sum().backward()
    expected = gradients(layer)
    context, sync = get_cpu_offload_context(
        True, model_layers=8, synchronization_dict=TABLE, order=order, trace=True, **SMALL
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            outputs: dict[str, Tensor] = {}
            for name in PIPELINE_ORDER.split():
                if name[0] == "F":
                    with context:
                        y = layer[0](inputs[int(name[1:])])
                    outputs[name[1:]] = sync(y)
                    del y
                else:
                    outputs.pop(name[1:]).sum().backward()
            assert_same(gradients(layer), expected)
    released = [e.layer for e in context.session.trace.events if e.what == "release"]
    assert sorted(set(released)) == sorted(TABLE)
    begins = {e.label: e.begin_s for e in context.session.trace.events}
    ends = {e.label: e.end_s for e in context.session.trace.events}
    # 1 and 2 are out when B0 begins. 1 is asked for when F4 begins, which a thread of its own then
    # copies; B1 waits for that, and so it may have begun first.
    assert begins["F3"] < begins["release 1"] < begins["F4"]
    assert begins["B0"] < begins["reload 1"] < ends["reload 1"] < ends["B1"]
    context.session.close()


def test_by_hand() -> None:
    model, x = layers(4), torch.randn(64, 32)
    expected = plain(model, x)
    context, sync, controller = get_cpu_offload_context(
        True, model_layers=4, manual_synchronization=True, **SMALL
    )
    h = x
    for number, layer in enumerate(model):
        with context:
            h = layer(h)
        h = sync(h)
        controller.start_offload_layer(number)
    for number in range(4):
        controller.release_activation_forward_gpu_memory(number)
    for number in reversed(range(4)):
        controller.start_reload_layer(number)
    with pytest.raises(ScheduleError):
        controller.start_reload_layer(0)
    h.sum().backward()
    del h
    assert_same(gradients(model), expected)
    stats = context.session.stats
    assert stats.offloaded_bytes == stats.reloaded_bytes > 0
    context.session.close()


def test_disabled_does_nothing() -> None:
    context, sync = get_cpu_offload_context()
    with context:
        x = torch.ones(3, requires_grad=True) * 2
    assert sync(x) is x
    context, sync, controller = get_cpu_offload_context(manual_synchronization=True)
    controller.start_offload_layer(0)
    controller.release_activation_forward_gpu_memory(0)
    controller.start_reload_layer(0)


def test_eval_passes_through() -> None:
    model = layers(2)
    context, sync = get_cpu_offload_context(True, 1, 2, **SMALL)
    with torch.no_grad():
        for layer in model:
            with context:
                h = layer(torch.randn(64, 32))
            h = sync(h)
    assert context.session.stats.num_saved == 0


def test_it_decorates() -> None:
    context, sync = get_cpu_offload_context(True, 1, 2, **SMALL)
    layer = layers(1)[0]

    @context
    def run(x: Tensor) -> Tensor:
        return layer(x)

    h = sync(run(torch.randn(64, 32)))
    sync(run(h)).sum().backward()
    del h
    assert context.session.stats.offloaded_bytes > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"offload_activations": False}, "offload_weights are both False"),
        ({"num_layers": 4, "model_layers": 4}, "model_layers - 1 = 3"),
        ({"model_layers": 0}, "model_layers"),
        (
            {"model_layers": 8, "synchronization_dict": TABLE, "manual_synchronization": True},
            "give one of them",
        ),
        ({"num_layers": 1, "model_layers": 2, "order": "F0 F1 B1 B0"}, "leave it out"),
        # Out before B1, but back from F2: F2 comes before any backward could.
        (
            {"model_layers": 3, "synchronization_dict": {1: (False, 2, True, 2)}},
            "the schedule cannot be run",
        ),
        ({"model_layers": 3, "synchronization_dict": {7: (True, 2, False, 1)}}, "7"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, object], words: str) -> None:
    with pytest.raises((PolicyError, ScheduleError), match=words):
        get_cpu_offload_context(True, **arguments)


def test_deprecated_arguments_warn() -> None:
    for name in ("offload_weights", "double_buffering", "offload_stream"):
        with pytest.warns(Warning, match=name):
            get_cpu_offload_context(True, 1, 2, **{name: True}, **SMALL)
    with pytest.warns(DeprecationWarning, match="offload_weights"):
        context, sync = get_cpu_offload_context(True, 1, 2, False, True)
    with context:
        assert sync(3) == 3


def test_the_name_in_compat_is_the_same_module() -> None:
    import ebbtide.compat.megatron
    import ebbtide.compat.transformer_engine

    import ebbtide.interop

    assert ebbtide.compat.transformer_engine is ebbtide.interop.transformer_engine
    assert ebbtide.compat.megatron is ebbtide.interop.megatron


# ---- marks, and quantized tensors ---------------------------------------------------------------


def test_marked_tensors_stay() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    policy = ebbtide.ActivationPolicy(min_bytes=1024, rebuild=False)
    x = torch.randn(64, 64)
    with ebbtide.offload(model, activations=policy) as handle:
        model(x).sum().backward()
        all_bytes, kept_bytes = handle.stats.offloaded_bytes, handle.stats.kept_bytes
        mark_not_offload(x.view(-1), None)  # a view: the storage counts
        model(x).sum().backward()
        assert handle.stats.offloaded_bytes == all_bytes - x.nbytes
        assert handle.stats.kept_bytes == kept_bytes + x.nbytes
    assert not vars(x), "nothing is set on the tensor"


def test_a_mark_ends_with_its_storage() -> None:
    from ebbtide.runtime import rebuild as marks

    for _ in range(300):
        mark_not_offload(torch.empty(3))
    assert len(marks._marked) <= 65


class Quantized(torch.Tensor):
    """Transformer Engine's protocol: data in parts, taken out and put back."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> "Quantized":
        made = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=torch.float32, device=data.device
        )
        made._data, made._scale = data, scale
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0]._data, args[0]._scale)
        plain = [a.dequantize() if isinstance(a, Quantized) else a for a in args]
        return func(*plain, **(kwargs or {}))

    def dequantize(self) -> Tensor:
        return self._data.float() * self._scale

    def prepare_for_saving(self) -> tuple[list[Tensor | None], "Quantized"]:
        parts = [self._data, None, self._scale]
        self._data = self._scale = None
        return parts, self

    def restore_from_saved(self, parts: list[Tensor | None]) -> list[Tensor | None]:
        self._data, _, self._scale = parts[:3]
        return parts[3:]

    def get_data_tensors(self) -> tuple[Tensor, Tensor]:
        return self._data, self._scale


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, quantized):
        ctx.save_for_backward(quantized)
        return x * quantized.dequantize()

    @staticmethod
    def backward(ctx, gradient):
        (quantized,) = ctx.saved_tensors
        return gradient * quantized.dequantize(), None


def test_the_data_of_quantized_tensors_move() -> None:
    values = torch.randint(-100, 100, (64, 64), dtype=torch.int8)
    quantized = Quantized(values, torch.tensor(0.5))
    x = torch.randn(64, 64, requires_grad=True)
    policy = ebbtide.ActivationPolicy(min_bytes=1024)
    forward = ebbtide.wrap_forward_with_offload(
        lambda: Times.apply(x, quantized).sum(), activations=policy, device="cpu"
    )
    loss = forward()
    for _ in range(2):
        x.grad = None
        loss.backward(retain_graph=True)
        assert torch.equal(x.grad, quantized.dequantize())
    assert quantized._data is values  # its own data were not taken out
    del loss
    assert forward.handle.stats.offloaded_bytes == values.nbytes
    mark_not_offload(quantized)
    forward().backward()
    assert forward.handle.stats.offloaded_bytes == 0
    forward.handle.detach()
