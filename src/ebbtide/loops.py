"""Offload for loops written by hand: the loop says where its layers are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeVar, final

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ebbtide.engine import Engine
from ebbtide.errors import PolicyError
from ebbtide.policy import ActivationPolicy
from ebbtide.runtime.ranges import Layer
from ebbtide.runtime.stats import StepStats
from ebbtide.runtime.units import Following, UnitRecords
from ebbtide.schedule import Action, Direction, Schedule, Unit, Verb, default, manual
from ebbtide.tracing.trace import Trace

T = TypeVar("T")


@final
class OffloadSession:
    """Offloads what the layers of a loop save, and when, by a schedule.

    ::

        session = ebbtide.OffloadSession(num_layers=4, model_layers=20)
        for layer in layers:
            with session.layer():
                x = layer(x)
            x = session.sync(x)

    Losses and gradients stay the same to the bit. Where autograd does not record (`eval` loops
    under `no_grad`, `inference_mode`) nothing is counted and nothing moves. Several forwards can be
    in flight, forwards and backwards can come in any order; the order that a schedule expects only
    decides how well copies hide.

    Args:
        num_layers: offload the first ``num_layers`` of ``model_layers`` layers, as
            `ebbtide.schedule.default` says when.
        model_layers: layers in a forward; the next one begins another forward.
        schedule: what moves when, instead of the two counts; or ``"manual"`` with
            ``model_layers``: nothing moves but by `start_offload`, `release` and `start_reload`.
        any_order: the order of the schedule is not known for sure: what hangs on an anchor is done
            when its pass comes, whatever came before.
        modules: whose parameters and buffers are not activations, for what is no `nn.Parameter`
            and follows from none; None: parameters are known as such anyway.
        device: where the loop computes; None: the device of ``modules``, else the current
            accelerator if there is one, else the CPU.
        activations: `min_bytes` and `rebuild` of it; the other fields belong to the schedule.
        store: as for `ebbtide.offload`.
        host_budget: as for `ebbtide.offload`.
        trace: as for `ebbtide.offload`.

    Raises:
        PolicyError: arguments contradict each other, or do not fit the device.
        ScheduleError: a count is out of range, or the schedule cannot be run.
    """

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
        chosen, by_hand = _choose_schedule(num_layers, model_layers, schedule)
        policy = ActivationPolicy() if activations is None else activations
        if policy.counts_layers:
            raise PolicyError(
                "num_layers and keep_last of the policy count layers of a model, and so does "
                "fraction; a session takes "
                "OffloadSession(num_layers=..., model_layers=...) or a schedule"
            )
        self._engine = Engine(
            list(modules),
            policy,
            store,
            None if device is None else torch.device(device),
            host_budget=host_budget,
            traced=trace,
            following=Following(chosen, manual=by_hand, any_order=any_order),
        )
        self._open: tuple[Layer, UnitRecords] | None = None
        self._closed: tuple[Layer, UnitRecords] | None = None

    @property
    def schedule(self) -> Schedule:
        """What moves when."""
        assert self._engine.schedule is not None
        return self._engine.schedule

    @property
    def stats(self) -> StepStats:
        """The last finished step; all zero before the first one."""
        return self._engine.stats

    @property
    def trace(self) -> Trace:
        """What the last finished step did and when; empty before the first one.

        Raises:
            PolicyError: the session was made without ``trace=True``.
        """
        return self._engine.trace

    @contextlib.contextmanager
    def layer(self, number: int | None = None, *, microbatch: int | None = None) -> Iterator[None]:
        """What runs in this block is one layer.

        Args:
            number: of the layer; None: the forward that is next in the order of the schedule.
            microbatch: that it belongs to, with ``number``.

        Raises:
            PolicyError: another layer of the session is open still, or there is a microbatch
                without a number.
            StoreFullError: a lower tier has no room. Nothing that was saved is lost.
        """
        if self._open is not None:
            raise PolicyError(
                f"layer {self._open[0].index} is open still: blocks of one session cannot be "
                f"nested; end one before the next, or use a session for each"
            )
        if number is None and microbatch is not None:
            raise PolicyError("give the number of the layer with its microbatch")
        unit = None if number is None else Unit(number, microbatch or 0)
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
        """Say what the layer before gave: its backward begins there. Call it after each block.

        Args:
            output: a tensor, or any nesting of tuples, lists and dicts with tensors in it.

        Returns:
            The same.

        Raises:
            PolicyError: called inside a block, or ``output`` is on another device than the
                session.
        """
        if self._open is not None:
            raise PolicyError("call sync after the block of the layer, not inside it")
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        closed, self._closed = self._closed, None
        if closed is not None:
            self._check_device(tensors)
            self._engine.note_outputs(*closed, tensors)
        return output

    def begin_backward(self, layer: int, *, microbatch: int = 0, part: str = "B") -> None:
        """Say that the backward of a layer begins, where `sync` cannot see it.

        Args:
            layer: its number.
            microbatch: that it belongs to.
            part: ``"B"``, or ``"I"`` and ``"W"`` for a backward split in two.
        """
        self._engine.begin_backward(Unit(layer, microbatch), Direction(part))

    # ---- by hand ------------------------------------------------------------------------------

    def start_offload(self, layer: int) -> None:
        """Start to copy down what a layer of this forward saved. For ``schedule="manual"``.

        Raises:
            ScheduleError: the layer has had no forward, or this was done already.
        """
        self._act(Verb.OFFLOAD, layer)

    def release(self, layer: int) -> None:
        """Let go of its device memory: what is computed next waits until its copy is complete.

        Raises:
            ScheduleError: its offload has not been started, or this was done already.
        """
        self._act(Verb.RELEASE, layer)

    def start_reload(self, layer: int) -> None:
        """Start to bring it back; before its backward, or that will wait for all of it.

        Raises:
            ScheduleError: it has not been released, or this was done already.
        """
        self._act(Verb.RELOAD, layer)

    def close(self) -> None:
        """Give the store back, at once or with the last graph that needs it."""
        self._engine.close()

    def __enter__(self) -> OffloadSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _act(self, verb: Verb, layer: int) -> None:
        following = self._engine.following
        if following is None or not following.manual:
            raise PolicyError(
                f'this session follows a schedule; make it with OffloadSession(schedule="manual", '
                f"model_layers=...) to {verb.value} by hand"
            )
        self._engine.act(Action(verb, Unit(layer)))

    def _check_device(self, tensors: Sequence[torch.Tensor]) -> None:
        home = self._engine.torch_device
        for tensor in tensors:
            if tensor.device != home:
                raise PolicyError(
                    f"the session is for {home}, and this layer gave a tensor on {tensor.device}; "
                    f"make it with OffloadSession(..., device={str(tensor.device)!r})"
                )


def _choose_schedule(
    num_layers: int | None, model_layers: int | None, schedule: Schedule | str | None
) -> tuple[Schedule, bool]:
    """The schedule that the arguments ask for, and whether all is done by hand."""
    if isinstance(schedule, Schedule):
        if num_layers is not None or model_layers is not None:
            raise PolicyError("the schedule says how many layers there are; leave the counts out")
        return schedule, False
    if model_layers is None:
        raise PolicyError("give model_layers, the number of layers in a forward, or a schedule")
    if schedule == "manual":
        if num_layers is not None:
            raise PolicyError('with schedule="manual" you say what leaves; leave num_layers out')
        return manual({}, model_layers), True
    if schedule is not None:
        raise PolicyError(
            f'schedule must be a Schedule or "manual", got {schedule!r}; text is read by '
            f"Schedule.parse(text)"
        )
    if num_layers is None:
        raise PolicyError("give num_layers, how many of the layers leave, or a schedule")
    return default(num_layers, model_layers), False
