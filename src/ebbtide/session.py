"""Offloading for hand-written training loops, which mark their layers themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NoReturn, TypeVar, final

import torch
from torch import nn

from ebbtide.errors import PolicyError
from ebbtide.observe.inspection import Inspection, inspect_engine
from ebbtide.observe.recording import record_model, trace_of
from ebbtide.observe.trace import Trace
from ebbtide.policy import (
    ActivationPolicy,
    check_arguments,
    check_modules,
    check_switch,
    parse_device,
    parse_number,
    refuse,
    refuse_choice,
)
from ebbtide.runtime.engine import Engine
from ebbtide.runtime.executor import ScheduleMode
from ebbtide.runtime.handles import UnitRecords
from ebbtide.runtime.stats import StepStats
from ebbtide.runtime.torch_internals import tree_leaves
from ebbtide.schedule import Action, Direction, Schedule, Unit, Verb, default
from ebbtide.units import brief, count, labelled

T = TypeVar("T")


@final
class OffloadSession:
    """Offloads the activations that the layers of a hand-written loop save, by a schedule.

    ::

        session = ebbtide.OffloadSession(num_layers=4, model_layers=20)
        for layer in layers:
            with session.layer():
                x = layer(x)
            x = session.sync(x)

    Losses and gradients stay the same to the bit. Where autograd does not record (`eval` loops
    under `no_grad`, `inference_mode`), no layer is counted and nothing is offloaded. Several
    forwards can be in flight, and forwards and backwards can come in any order; the order that the
    schedule expects only decides how much of the copies is hidden behind compute.

    Args:
        num_layers: offload the first ``num_layers`` of ``model_layers`` layers, at the times that
            `ebbtide.schedule.default` sets.
        model_layers: number of layers in one forward; the layer after them begins another forward.
        schedule: the schedule to follow, instead of the two counts. ``"manual"``, together with
            ``model_layers``, means that only `start_offload`, `release` and `start_reload` move
            anything.
        any_order: passes may come in another order than the schedule's. The actions anchored at a
            pass are performed when that pass begins, whatever came before it.
        modules: modules whose parameters and buffers must not be offloaded. Trainable parameters,
            their views and their copies are recognised without this; buffers are not.
        device: device that the loop computes on. None means the device of ``modules``, else the
            current accelerator if there is one, else the CPU.
        activations: sets `min_bytes` and `rebuild`, and `max_inflight_bytes` for runs that depart
            from the schedule. The schedule replaces the other fields.
        store: as for `ebbtide.offload`.
        host_budget: as for `ebbtide.offload`.
        trace: as for `ebbtide.offload`.

    Raises:
        PolicyError: the arguments contradict each other or do not fit the device.
        ScheduleError: a count is out of range, or the schedule cannot be run.
    """

    # Long: it is one public object, and most of its lines are documentation.

    def __init__(
        self,
        num_layers: int | None = None,
        model_layers: int | None = None,
        *,
        schedule: Schedule | str | None = None,
        any_order: bool = False,
        modules: Sequence[nn.Module] = (),
        device: torch.device | str | None = None,
        activations: ActivationPolicy | None = None,
        store: str = "auto",
        host_budget: int | str | None = None,
        trace: bool = False,
    ) -> None:
        check_arguments(activations=activations, trace=trace)
        check_modules("modules", modules)
        check_switch("any_order", any_order)
        chosen, manual = _choose_schedule(num_layers, model_layers, schedule)
        policy = ActivationPolicy() if activations is None else activations
        advice = "a session takes OffloadSession(num_layers=..., model_layers=...) or a schedule"
        refuse_choice(policy, advice)
        self._engine = Engine(
            list(modules),
            policy,
            store,
            parse_device(device),
            host_budget=host_budget,
            traced=trace,
            record=record_model,
            mode=ScheduleMode(chosen, manual=manual, any_order=any_order),
        )
        self._is_closed = False
        self._open: UnitRecords | None = None
        self._closed: UnitRecords | None = None

    @property
    def schedule(self) -> Schedule:
        """The schedule that the session follows."""
        assert self._engine.schedule is not None
        return self._engine.schedule

    @property
    def stats(self) -> StepStats:
        """The statistics of the last finished step; all zero before the first step ends."""
        return self._engine.stats

    @property
    def trace(self) -> Trace:
        """The trace of the last finished step; empty before the first step ends.

        Raises:
            PolicyError: the session was made without ``trace=True``.
        """
        return trace_of(self._engine)

    def inspect(self) -> Inspection:
        """Report what became of the last step, as `OffloadHandle.inspect` does."""
        return inspect_engine(self._engine)

    @contextlib.contextmanager
    def layer(self, number: int | None = None, *, microbatch: int | None = None) -> Iterator[None]:
        """Mark the code in a ``with`` block as one layer.

        Args:
            number: number of the layer. None means the next forward in the schedule's order.
            microbatch: number of the layer's microbatch; it needs ``number``. None means 0.

        Raises:
            PolicyError: another layer of the session is still open, or ``microbatch`` is given
                without ``number``.
            StoreFullError: the store has no room. Nothing that was saved is lost.
        """
        if self._open is not None:
            raise PolicyError(
                f"layer {self._open.unit.layer} is open still: blocks of one session cannot be "
                f"nested; end one before the next, or use a session for each"
            )
        if number is None and microbatch is not None:
            raise PolicyError("give the number of the layer with its microbatch")
        unit = None if number is None else _unit(number, 0 if microbatch is None else microbatch)
        self._closed = None
        opened = self._engine.open_layer(unit)
        if opened is None:  # autograd does not record
            yield
            return
        self._open = opened
        try:
            yield
        except BaseException:
            self._open = None
            self._engine.close_layer(interrupted=True)
            raise
        self._closed, self._open = self._open, None
        self._engine.close_layer(interrupted=False)

    def sync(self, output: T) -> T:
        """Mark the output of the last layer, so that the begin of its backward is noticed.

        Call it after each block.

        Args:
            output: a tensor, or any nesting of tuples, lists and dicts with tensors in it.

        Returns:
            ``output``, unchanged.

        Raises:
            PolicyError: `sync` was called inside a block, or ``output`` is on another device than
                the session.
        """
        if self._open is not None:
            raise PolicyError("call sync after the block of the layer, not inside it")
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        closed, self._closed = self._closed, None
        if closed is not None:
            self._check_device(tensors)
            self._engine.note_outputs(closed, tensors)
        return output

    def begin_backward(self, layer: int, *, microbatch: int = 0, part: str = "B") -> None:
        """Declare that the backward of a layer begins, in loops where `sync` cannot notice it.

        Args:
            layer: number of the layer.
            microbatch: number of its microbatch.
            part: ``"B"`` for the whole backward; ``"I"`` (gradients of the inputs) or ``"W"``
                (gradients of the weights) for one part of a split backward.
        """
        if part not in ("B", "I", "W"):
            refuse("part", '"B", "I" or "W"', part)
        self._engine.scheduled.begin_backward_of(_unit(layer, microbatch), Direction(part))

    # ---- manual mode --------------------------------------------------------------------------

    def start_offload(self, layer: int) -> None:
        """Start copying what a layer of this forward saved to the store.

        Raises:
            PolicyError: the session was not made with ``schedule="manual"``.
            ScheduleError: the layer has had no forward, or its offload was started already.
        """
        self._act(Verb.OFFLOAD, layer)

    def release(self, layer: int) -> None:
        """Release the device memory of an offloaded layer.

        Kernels queued from now on wait until the layer's copy to the store is complete.

        Raises:
            PolicyError: the session was not made with ``schedule="manual"``.
            ScheduleError: the layer's offload has not been started, or it was released already.
        """
        self._act(Verb.RELEASE, layer)

    def start_reload(self, layer: int) -> None:
        """Start reloading a layer. Without this its backward waits for the whole copy.

        Raises:
            PolicyError: the session was not made with ``schedule="manual"``.
            ScheduleError: the layer has not been released, or its reload was started already.
        """
        self._act(Verb.RELOAD, layer)

    def close(self) -> None:
        """Free the store as soon as no autograd graph needs it any more."""
        self._is_closed = True
        self._engine.close()

    def __reduce__(self) -> NoReturn:
        raise PolicyError(
            "a session cannot be copied or pickled, because its threads and files belong to this "
            "process; make a session in each process"
        )

    def __repr__(self) -> str:
        about = self._engine.describe()
        place = about.pop("model")
        return brief("OffloadSession", [self._state, place, self._plan, *labelled(about)])

    @property
    def _state(self) -> str:
        if self._open is not None:
            return f"inside layer {self._open.unit.layer}"
        return "closed" if self._is_closed else "open"

    @property
    def _plan(self) -> str:
        layers = {unit.layer for unit in self.schedule.offloaded}
        mode = self._engine.mode
        manual = ", moved by hand" if mode is not None and mode.manual else ""
        leave = "" if manual else f"{len(layers)} of "
        return f"{leave}{count(self.schedule.num_layers, 'layer')}{manual or ' offloaded'}"

    def __enter__(self) -> OffloadSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _act(self, verb: Verb, layer: int) -> None:
        mode = self._engine.mode
        if mode is None or not mode.manual:
            raise PolicyError(
                f'this session follows a schedule; make it with OffloadSession(schedule="manual", '
                f"model_layers=...) to {verb.value} by hand"
            )
        self._engine.scheduled.act(Action(verb, _unit(layer, 0)))

    def _check_device(self, tensors: Sequence[torch.Tensor]) -> None:
        home = self._engine.torch_device
        for tensor in tensors:
            if tensor.device != home:
                raise PolicyError(
                    f"the session is for {home}, and this layer gave a tensor on {tensor.device}; "
                    f"make it with OffloadSession(..., device={str(tensor.device)!r})"
                )


def _unit(layer: int, microbatch: int) -> Unit:
    return Unit(parse_number("the layer", layer), parse_number("microbatch", microbatch))


def _choose_schedule(
    num_layers: int | None, model_layers: int | None, schedule: Schedule | str | None
) -> tuple[Schedule, bool]:
    """Return the schedule that the arguments ask for, and whether the mode is manual."""
    if isinstance(schedule, Schedule):
        if num_layers is not None or model_layers is not None:
            raise PolicyError("the schedule says how many layers there are; leave the counts out")
        return schedule, False
    if schedule not in (None, "manual"):
        advice = "text is read by Schedule.parse(text)"
        refuse("schedule", 'an ebbtide.Schedule or "manual"', schedule, advice)
    if isinstance(num_layers, nn.Module):
        refuse("num_layers", "the number of layers that leave", num_layers, "see modules=[model]")
    if model_layers is None:
        raise PolicyError("give model_layers, the number of layers in a forward, or a schedule")
    if schedule == "manual":
        if num_layers is not None:
            raise PolicyError('with schedule="manual" you say what leaves; leave num_layers out')
        return default(0, model_layers), True
    if num_layers is None:
        raise PolicyError("give num_layers, how many of the layers leave, or a schedule")
    return default(num_layers, model_layers), False
