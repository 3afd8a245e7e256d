"""Transformer Engine's spelling: change the import, keep the loop.

::

    from ebbtide.compat.transformer_engine import get_cpu_offload_context

Transformer Engine itself is not needed, and never imported. Where its quantized tensors are saved,
they are taken apart by their own protocol and their data move like any other tensor's.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar, final

import torch

from ebbtide.errors import PolicyError
from ebbtide.hooks.marks import mark_not_offload
from ebbtide.loops import OffloadSession
from ebbtide.policy import ActivationPolicy
from ebbtide.schedule import Pass, Schedule, default, find_order, from_table, manual
from ebbtide.schedule.builders import TableRow

__all__ = ["ManualOffloadController", "get_cpu_offload_context", "mark_not_offload"]

T = TypeVar("T")

_ELEMENT_BYTES = 4  # of float32, where sizes are given in elements


@final
class ManualOffloadController:
    """Says when each layer leaves, goes and comes back, where nothing moves by itself.

    Args:
        session: whose layers; None: offload is disabled, and nothing is done.
    """

    def __init__(self, session: OffloadSession | None) -> None:
        self._session = session

    def start_offload_layer(self, layer_id: int) -> None:
        """Start to copy down what a layer saved in this forward.

        Raises:
            ScheduleError: the layer has had no forward, or this was done already.
        """
        if self._session is not None:
            self._session.start_offload(layer_id)

    def release_activation_forward_gpu_memory(self, layer_id: int) -> None:
        """Let go of its device memory: what is computed next waits until its copy is complete.

        Raises:
            ScheduleError: its offload has not been started, or this was done already.
        """
        if self._session is not None:
            self._session.release(layer_id)

    def start_reload_layer(self, layer_id: int) -> None:
        """Start to bring it back.

        Raises:
            ScheduleError: it has not been released, or this was done already.
        """
        if self._session is not None:
            self._session.start_reload(layer_id)


@final
class _OffloadContext(contextlib.ContextDecorator):
    """The context of one layer at a time, to be entered again for the next.

    Attributes:
        session: what it stands for: statistics, trace, `close`.
    """

    def __init__(self, session: OffloadSession) -> None:
        self.session = session
        self._layer: AbstractContextManager[None] | None = None

    def __enter__(self) -> _OffloadContext:
        layer = self.session.layer()
        layer.__enter__()  # raises if another layer is open still
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
    """What `transformer_engine.pytorch.get_cpu_offload_context` gives, for any layers.

    ::

        context, sync = get_cpu_offload_context(True, num_layers=4, model_layers=20)
        for layer in layers:
            with context:
                x = layer(x)
            x = sync(x)

    The order of arguments past ``double_buffering`` differs between Transformer Engine's releases,
    so they are keywords here.

    Args:
        enabled: False: the context and the function do nothing.
        num_layers: offload the first ``num_layers`` layers; at most ``model_layers - 1``. Ignored
            with a table, or by hand.
        model_layers: layers in a forward.
        offload_activations: what this is for.
        offload_weights: deprecated there, without effect here; see `ebbtide.compat.megatron` for
            weights.
        double_buffering: deprecated, without effect.
        synchronization_dict: ``{layer: (offload_fwd, offload_num, reload_fwd, reload_num)}``: out
            before layer ``offload_num`` starts its forward (True) or backward (False), back from
            when ``reload_num`` starts its forward or backward.
        manual_synchronization: nothing moves but as the controller is told.
        retain_pinned_cpu_buffers: host memory is reused from step to step anyway, whatever the
            shapes.
        min_tensor_size_to_offload: elements of the smallest tensor that leaves, counted as 4 bytes
            each; None: 1 MiB.
        offload_stream: without effect: each direction has a stream of its own.
        order: with a table, in which passes come (``"F0 F1 B0 F2 ..."``), if that is known: then
            departures from it are noticed. None: what the table says is done as passes come.
        device: where the layers compute; None: the current accelerator, else the CPU.
        store: as for `ebbtide.offload`.
        trace: as for `ebbtide.offload`: ``context.session.trace``.

    Returns:
        ``(context, sync)``, and with ``manual_synchronization`` ``(context, sync, controller)``.
        ``context.session`` is the `OffloadSession`.

    Raises:
        PolicyError: the arguments contradict each other.
        ScheduleError: a count is out of range, or no order of passes fits the table.

    Source: Transformer Engine 2.x, `transformer_engine/pytorch/cpu_offload.py`.
    """
    if not offload_weights and not offload_activations:
        raise PolicyError(
            "CPU offloading is asked for, but neither of activations nor of weights; set "
            "offload_activations=True"
        )
    _warn_of_deprecated(offload_weights, double_buffering, offload_stream)
    if synchronization_dict is not None and manual_synchronization:
        raise PolicyError(
            "synchronization_dict says when layers move, and manual_synchronization that you do; "
            "give one of them"
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
        raise PolicyError("order belongs to a synchronization_dict; leave it out")
    if num_layers is None:
        return manual({}, model_layers)
    return default(num_layers, model_layers)


def _warn_of_deprecated(offload_weights: bool, double_buffering: bool, stream: Any) -> None:
    if offload_weights:
        warnings.warn(
            "offload_weights=True has no effect in get_cpu_offload_context, here as in Transformer "
            "Engine, where it is deprecated",
            DeprecationWarning,
            stacklevel=3,
        )
    if double_buffering:
        warnings.warn(
            "double_buffering is deprecated and has no effect", DeprecationWarning, stacklevel=3
        )
    if stream is not None:
        warnings.warn(
            "offload_stream has no effect: copies run on streams of ebbtide's own, one each way",
            stacklevel=3,
        )


def _identity(tensor: T) -> T:
    return tensor
