"""Transformer Engine's interface for CPU offloading: change the import and keep the loop.

::

    from ebbtide.interop.transformer_engine import get_cpu_offload_context

Transformer Engine need not be installed and is never imported. When its quantized tensors are
saved, they are flattened into plain tensors by their own protocol, and these move like any others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar, final

import torch

from ebbtide.errors import PolicyError, warn_user
from ebbtide.policy import ActivationPolicy, check_switch
from ebbtide.runtime.rebuild import mark_not_offload
from ebbtide.schedule import Pass, Schedule, default, find_order, from_table
from ebbtide.schedule.builders import TableRow
from ebbtide.session import OffloadSession

__all__ = ["ManualOffloadController", "get_cpu_offload_context", "mark_not_offload"]

T = TypeVar("T")

_ELEMENT_BYTES = 4  # size of a float32, for sizes that are given in elements


@final
class ManualOffloadController:
    """Starts offloads, releases and reloads by hand, for ``manual_synchronization``.

    Args:
        session: the session whose layers it moves; None if offloading is disabled, in which case
            the methods do nothing.
    """

    def __init__(self, session: OffloadSession | None) -> None:
        self._session = session

    def start_offload_layer(self, layer_id: int) -> None:
        """Start to copy to the host what a layer saved in this forward.

        Raises:
            ScheduleError: the layer has had no forward, or its offload was started already.
        """
        if self._session is not None:
            self._session.start_offload(layer_id)

    def release_activation_forward_gpu_memory(self, layer_id: int) -> None:
        """Release the layer's device memory; compute queued after this waits for the copy to end.

        Raises:
            ScheduleError: the layer's offload was not started, or it was released already.
        """
        if self._session is not None:
            self._session.release(layer_id)

    def start_reload_layer(self, layer_id: int) -> None:
        """Start to reload the layer.

        Raises:
            ScheduleError: the layer was not released, or its reload was started already.
        """
        if self._session is not None:
            self._session.start_reload(layer_id)


@final
class _OffloadContext(contextlib.ContextDecorator):
    """The context around one layer's forward; it is entered anew for every layer.

    Attributes:
        session: the session behind it, which has the statistics, the trace and `close`.
    """

    def __init__(self, session: OffloadSession) -> None:
        self.session = session
        self._layer: AbstractContextManager[None] | None = None

    def __enter__(self) -> _OffloadContext:
        layer = self.session.layer()
        layer.__enter__()  # raises if another layer is still open
        self._layer = layer
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        layer, self._layer = self._layer, None
        assert layer is not None
        layer.__exit__(kind, error, trace)


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    *,
    synchronization_dict: Mapping[int, TableRow] | None = None,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,  # noqa: ARG001
    min_tensor_size_to_offload: int | None = None,
    offload_stream: Any = None,
    order: str | Iterable[str | Pass] | None = None,
    device: torch.device | str | None = None,
    store: str = "auto",
    trace: bool = False,
) -> tuple[Any, ...]:
    """Return what `transformer_engine.pytorch.get_cpu_offload_context` returns, for any layers.

    ::

        context, sync = get_cpu_offload_context(True, num_layers=4, model_layers=20)
        for layer in layers:
            with context:
                x = layer(x)
            x = sync(x)

    The order of the arguments after ``double_buffering`` differs between releases of Transformer
    Engine, so here they are keyword-only.

    Args:
        enabled: if False, the context and the function do nothing.
        num_layers: offload the first ``num_layers`` layers; at most ``model_layers - 1``. Ignored
            with ``synchronization_dict`` or ``manual_synchronization``.
        model_layers: number of layers in a forward.
        offload_activations: if False, nothing is offloaded.
        offload_weights: has no effect, as in Transformer Engine, where it is deprecated; see
            `ebbtide.interop.megatron` for weights.
        double_buffering: deprecated; has no effect.
        synchronization_dict: ``{layer: (offload_fwd, offload_num, reload_fwd, reload_num)}``. The
            layer is released before layer ``offload_num`` starts its forward (True) or backward
            (False), and its reload starts when layer ``reload_num`` starts its forward (True) or
            backward (False).
        manual_synchronization: move layers only when the returned controller is told to.
        retain_pinned_cpu_buffers: has no effect, because host memory is always reused from step to
            step, whatever the shapes.
        min_tensor_size_to_offload: number of elements of the smallest tensor to offload, counted
            as 4 bytes each; None means 1 MiB.
        offload_stream: has no effect, because each direction has a stream of its own.
        order: order of the passes (``"F0 F1 B0 F2 ..."``), if it is known; only with
            ``synchronization_dict``. A warning reports the first pass that departs from it. With
            None, the passes may come in any order, and the table is followed as they come.
        device: device on which the layers compute; None means the current accelerator, else the
            CPU.
        store: as for `ebbtide.offload`.
        trace: as for `ebbtide.offload`; the trace is ``context.session.trace``.

    Returns:
        ``(context, sync)``, or with ``manual_synchronization`` ``(context, sync, controller)``.
        ``context.session`` is the `OffloadSession`.

    Raises:
        PolicyError: the arguments contradict each other.
        ScheduleError: a count is out of range, or no order of passes fits the table.

    Source: Transformer Engine 2.x, `transformer_engine/pytorch/cpu_offload.py`.
    """
    for name, switch in (
        ("enabled", enabled),
        ("offload_activations", offload_activations),
        ("manual_synchronization", manual_synchronization),
    ):
        check_switch(name, switch)
    if not offload_weights and not offload_activations:
        raise PolicyError(
            "offload_activations and offload_weights are both False, so there is nothing to "
            "offload; set offload_activations=True"
        )
    _warn_of_deprecated(offload_weights, double_buffering, offload_stream)
    if synchronization_dict is not None and manual_synchronization:
        raise PolicyError(
            "synchronization_dict and manual_synchronization both decide when layers move; give "
            "one of them"
        )
    if not enabled or not offload_activations:
        nothing = (contextlib.nullcontext(), _identity)
        return (*nothing, ManualOffloadController(None)) if manual_synchronization else nothing
    count = None if manual_synchronization else num_layers
    schedule = _choose(count, model_layers, synchronization_dict, order)
    policy = ActivationPolicy()
    if min_tensor_size_to_offload is not None:
        policy = ActivationPolicy(min_bytes=_ELEMENT_BYTES * min_tensor_size_to_offload)
    session = OffloadSession(
        None,
        model_layers if manual_synchronization else None,
        schedule="manual" if manual_synchronization else schedule,
        any_order=synchronization_dict is not None and order is None,
        activations=policy,
        device=device,
        store=store,
        trace=trace,
    )
    both = (_OffloadContext(session), session.sync)
    return (*both, ManualOffloadController(session)) if manual_synchronization else both


def _choose(
    num_layers: int | None,
    model_layers: int,
    table: Mapping[int, TableRow] | None,
    order: str | Iterable[str | Pass] | None,
) -> Schedule:
    if table is not None:
        known = find_order(table, model_layers) if order is None else order
        return from_table(table, model_layers, order=known)
    if order is not None:
        raise PolicyError("order is used only with a synchronization_dict; leave it out")
    return default(num_layers or 0, model_layers)


def _warn_of_deprecated(offload_weights: bool, double_buffering: bool, stream: Any) -> None:
    given = {
        "offload_weights=True": offload_weights,
        "double_buffering": double_buffering,
        "offload_stream": stream is not None,
    }
    for name in (name for name, is_given in given.items() if is_given):
        warn_user(
            "no-effect",
            f"{name} has no effect in get_cpu_offload_context: it moves no weights, here as in "
            f"Transformer Engine, and each direction has a stream of its own; leave it out",
            DeprecationWarning,
        )


def _identity(tensor: T) -> T:
    return tensor
