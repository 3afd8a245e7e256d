"""Offload for the stages of `torch.distributed.pipelining`, in the order of their schedule.

The forward of one microbatch on one stage is one unit, ``F2.m5``. Three methods of a stage that run
a forward or a backward are wrapped, and the one that begins a step; nothing else is changed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.pipelining.stage import _PipelineStageBase

from ebbtide.api import refuse_second_offload
from ebbtide.errors import PolicyError, ScheduleError
from ebbtide.handle import OffloadHandle
from ebbtide.observe.recording import record_model
from ebbtide.policy import (
    ActivationPolicy,
    WeightPolicy,
    check_arguments,
    refuse_choice,
)
from ebbtide.runtime.engine import Engine
from ebbtide.runtime.executor import ScheduleMode
from ebbtide.runtime.layers import LayerModules, find_layers
from ebbtide.runtime.torch_internals import tree_leaves, tree_map
from ebbtide.schedule import Direction, Schedule, Unit, from_pipeline
from ebbtide.weights.hooks import AbstractWeights
from ebbtide.weights.model_weights import offload_weights

PipelineSchedule = PipelineScheduleSingle | PipelineScheduleMulti


def offload_stages(
    pipeline: PipelineSchedule,
    *,
    resident: int | None = None,
    lead: int = 1,
    schedule: Schedule | None = None,
    activations: ActivationPolicy | None = None,
    weights: WeightPolicy | None = None,
    store: str = "auto",
    host_budget: int | str | None = None,
    trace: bool = False,
) -> OffloadHandle:
    """Offload the tensors that this rank's stages save for backward while other microbatches run.

    ::

        pipeline = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
        handle = offload_stages(pipeline, resident=2)
        pipeline.step(batch)

    Losses and gradients stay bitwise the same. Each rank calls this function for its own stages and
    may choose its own ``resident``. Nothing is offloaded in `eval`, under `no_grad`, and in the run
    by which a stage infers its shapes.

    The inputs and outputs of a stage are not counted, because the pipeline itself keeps them on the
    device until backward. Tensors that autograd saves of an input are therefore not offloaded.

    Args:
        pipeline: any schedule of `torch.distributed.pipelining`, as built on this rank.
        resident: the most units whose saved tensors are on the device at once, including the one
            that runs. A unit is one microbatch on one of the rank's stages.
        lead: as for `ebbtide.schedule.from_pipeline`.
        schedule: the complete offload schedule, instead of ``resident``; it must have the order of
            this rank.
        activations: `min_bytes` and `rebuild` apply. `num_layers` and `keep_last` must be left at
            their defaults, because the schedule decides which units are offloaded.
        weights: which weights of the stages' layers are offloaded, as for `ebbtide.offload`; None:
            none. The layers of a stage are its repeated blocks, or the whole stage if it has none.
            `num_layers` and `keep_last` count the layers of all the rank's stages together,
            beginning with the first stage.
        store: as for `ebbtide.offload`.
        host_budget: as for `ebbtide.offload`.
        trace: as for `ebbtide.offload`; layers are numbered by their stage.

    Returns:
        A handle with the schedule, the statistics of the last step and `detach`.

    Raises:
        PolicyError: arguments contradict each other, the stages are on several devices, or a stage
            or a part of it is offloaded already. Nothing was changed.
        ScheduleError: ``resident`` is too small for this rank's order, or the schedule is for
            another order. Nothing was changed.
    """
    stages = _find_stages(pipeline)
    check_arguments(activations=activations, weights=weights, trace=trace)
    policy = ActivationPolicy() if activations is None else activations
    refuse_choice(
        policy,
        "for a pipeline's stages the schedule says what leaves the device; give "
        "offload_stages(..., resident=...) or a schedule",
    )
    for stage in stages:
        _refuse_second_offload(stage)
    engine = Engine(
        [stage.submod for stage in stages],
        policy,
        store,
        torch.device(stages[0].device),
        host_budget=host_budget,
        traced=trace,
        record=record_model,
        mode=ScheduleMode(_choose_schedule(pipeline, stages[0], resident, lead, schedule)),
    )
    names = [f"stage {stage.stage_index}" for stage in stages]
    resting = None
    if weights is not None:
        modules = nn.ModuleDict(
            {name: stage.submod for name, stage in zip(names, stages, strict=True)}
        )
        resting = offload_weights(modules, _find_layers(modules), weights, engine.transfers)
        engine.rest(resting)
    hooks = [StageHook(stage, engine, resting) for stage in stages]
    undo: list[Callable[[], None]] = [hook.detach for hook in hooks]
    if resting is not None:
        undo.append(resting.detach)
    return OffloadHandle(engine, names, undo)


@final
class StageHook:
    """Wraps methods of one stage to tell the engine which forward or backward runs.

    Args:
        stage: the stage; the wrappers are attributes of this one object, not of its class.
        engine: the engine to tell.
        weights: the hooks of the stage's offloaded weights; None if there are none.
    """

    def __init__(
        self, stage: _PipelineStageBase, engine: Engine, weights: AbstractWeights | None = None
    ) -> None:
        self._stage = stage
        self._engine = engine
        self._weights = weights
        self._active = True
        self._outputs: dict[int, list[Any]] = {}  # of the last stage, by microbatch
        self._wrapped = {
            wrapper.__name__: wrapper
            for wrapper in (
                self.clear_runtime_states,
                self.forward_one_chunk,
                self.backward_one_chunk,
                self.backward_weight_one_chunk,
            )
        }
        self._plain: dict[str, Callable[..., Any]] = {
            name: getattr(stage, name) for name in self._wrapped
        }
        own = vars(stage)
        self._before = {name: own[name] for name in self._wrapped if name in own}
        own.update(self._wrapped)

    def detach(self) -> None:
        """Restore the stage's methods."""
        self._active = False
        attributes = vars(self._stage)
        for name, wrapper in self._wrapped.items():
            if attributes.get(name) != wrapper:
                continue  # other code wrapped our wrapper, which only passes calls on from now on
            if name in self._before:
                attributes[name] = self._before[name]
            else:
                del attributes[name]

    # ---- wrappers of the stage's methods ------------------------------------------------------

    def clear_runtime_states(self) -> None:
        """Begin a step, and abandon passes that the last one did not run, as after an exception."""
        if self._active:
            self._engine.scheduled.abandon()
        self._outputs.clear()
        self._plain["clear_runtime_states"]()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a microbatch, as a unit if a backward will follow."""
        with self._weights_in_forward(), self._forward(fwd_chunk_id, args, kwargs):
            output = self._plain["forward_one_chunk"](fwd_chunk_id, *args, **kwargs)
        if self._active and self._returns_outputs():
            self._outputs[fwd_chunk_id] = tree_leaves(output)
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:
        """Run the backward of a microbatch, or only the part that the previous stage waits for."""
        part = Direction.BACKWARD if full_backward else Direction.BACKWARD_INPUT
        outputs = self._outputs.pop(bwd_chunk_id, None)
        with self._backward(bwd_chunk_id, part):
            result = self._plain["backward_one_chunk"](
                bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
            )
        if outputs:
            self._free_graph(outputs)
        return result

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        """Run the rest of a split backward. On the first stage, torch runs the whole of it here."""
        with self._backward(bwd_chunk_id, Direction.BACKWARD_WEIGHT):
            return self._plain["backward_weight_one_chunk"](
                bwd_chunk_id, last_backward=last_backward
            )

    def _weights_in_forward(self) -> contextlib.AbstractContextManager[None]:
        if self._weights is None or not self._active:
            return contextlib.nullcontext()
        return self._weights.in_forward()

    @contextlib.contextmanager
    def _forward(self, microbatch: int, *arguments: Any) -> Iterator[None]:
        opened = None
        if self._active and self._stage.has_backward:
            unit = Unit(self._stage.stage_index, microbatch)
            opened = self._engine.open_layer(unit, self._inputs(microbatch, arguments))
        if opened is None:
            yield
            return
        try:
            yield
        finally:
            # Passes that do not run after an exception are abandoned when the next step begins.
            self._engine.close_layer(interrupted=False)

    @contextlib.contextmanager
    def _backward(self, microbatch: int, part: Direction) -> Iterator[None]:
        if not (self._active and self._stage.has_backward):
            yield
            return
        self._engine.scheduled.begin_backward_of(Unit(self._stage.stage_index, microbatch), part)
        try:
            yield
        finally:
            self._engine.scheduled.end_backward()

    def _returns_outputs(self) -> bool:
        """Whether the step returns this stage's outputs after their backward."""
        return self._stage.has_backward and self._stage.is_last and not self._stage.is_first

    def _free_graph(self, outputs: Sequence[Any]) -> None:
        """Detach outputs that are views; torch itself detaches only the other outputs.

        The pipeline keeps the outputs until the step returns them. They would keep the graph alive,
        and after a split backward also the tensors that the graph has saved.
        """
        views = {id(leaf) for leaf in outputs if getattr(leaf, "grad_fn", None) is not None}
        if views:
            chunks = self._stage.output_chunks
            chunks[:] = tree_map(lambda leaf: leaf.detach() if id(leaf) in views else leaf, chunks)

    def _inputs(self, microbatch: int, arguments: Any) -> list[torch.Tensor]:
        """The stage's inputs for a microbatch, which the pipeline keeps on the device anyway.

        It keeps them until backward, and its receive buffers permanently.
        """
        infos = tree_leaves(self._stage.args_recv_info.get(microbatch, ()))
        received = [getattr(info, "buffer", None) for info in infos]
        return [leaf for leaf in tree_leaves([received, arguments]) if type(leaf) is torch.Tensor]


def _find_stages(pipeline: PipelineSchedule) -> Sequence[_PipelineStageBase]:
    if isinstance(pipeline, PipelineScheduleSingle):
        return [pipeline._stage]
    if isinstance(pipeline, PipelineScheduleMulti):
        return pipeline._stages
    raise PolicyError(
        f"offload_stages takes a schedule of torch.distributed.pipelining, such as "
        f"Schedule1F1B(stage, n_microbatches, loss_fn), got {type(pipeline).__name__}"
    )


def _find_layers(stages: nn.ModuleDict) -> LayerModules:
    """The repeated blocks of each stage, or the stage itself if it has none."""
    named: list[tuple[str, nn.Module]] = []
    for name, stage in stages.items():
        found = find_layers(stage)
        inner = [f"{name}.{layer}" for layer in found.names]
        named += zip(inner, found.modules, strict=True) if inner else [(name, stage)]
    return LayerModules(named)


def _refuse_second_offload(stage: _PipelineStageBase) -> None:
    owner = getattr(vars(stage).get("forward_one_chunk"), "__self__", None)
    if isinstance(owner, StageHook):
        raise PolicyError(
            f"stage {stage.stage_index} is offloaded already; call detach() on the handle of that "
            f"offload first"
        )
    refuse_second_offload(stage.submod)


def _choose_schedule(
    pipeline: PipelineSchedule,
    stage: _PipelineStageBase,
    resident: int | None,
    lead: int,
    schedule: Schedule | None,
) -> Schedule:
    """Return the given schedule after checking it, or derive one from ``resident``."""
    if (resident is None) == (schedule is None):
        raise PolicyError(
            "give resident, how many microbatches of a stage may be on the device at once, or a "
            "schedule; exactly one of them"
        )
    if schedule is not None and not isinstance(schedule, Schedule):
        raise PolicyError(
            f"schedule must be an ebbtide.Schedule, got {schedule!r}; text is read by "
            f"ebbtide.Schedule.parse(text)"
        )
    # If there is an order with communication, that is the one which torch runs.
    order = getattr(pipeline, "pipeline_order_with_comms", None) or pipeline.pipeline_order
    if not order:
        if schedule is not None:
            return schedule
        raise PolicyError(
            f"{type(pipeline).__name__} does not tell its order (pipeline_order is empty); give "
            f"schedule=ebbtide.schedule.from_pipeline('0F0 0F1 0B0 0B1 ...', resident=...)"
        )
    number = stage.stage_index
    if schedule is None:
        assert resident is not None
        return from_pipeline(order, number, resident=resident, lead=lead)
    due = from_pipeline(order, number, resident=sys.maxsize).order
    if schedule.order != due:
        raise ScheduleError(
            f"the schedule is for another order than this rank's. The schedule:\n{schedule}\n"
            f"This rank:\n{Schedule(due)}"
        )
    return schedule
