"""Offload while a `Trainer` of Transformers trains: a callback for it."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ebbtide.errors import PolicyError, warn_user
from ebbtide.handle import OffloadHandle
from ebbtide.interop.training_offload import TrainingOffload, refuse_missing

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import CallbackHandler
except ModuleNotFoundError as error:
    refuse_missing(error, package="transformers", extra="transformers")


class OffloadCallback(TrainerCallback):
    """Offloads a `Trainer`'s model from the begin of training to its end.

    ::

        trainer = Trainer(model, args, train_dataset=data, callbacks=[OffloadCallback()])

    Losses, weights and saved files are those of training without it. The model is offloaded when
    training begins and put back when it ends. If training raises, Transformers tells no callback:
    the model stays offloaded, and works, until the next `train`, or until you call `detach`. Used
    as a context manager, the callback detaches on exit.

    Every log of the training loss also has ``ebbtide/peak_device_bytes``,
    ``ebbtide/offloaded_bytes`` and ``ebbtide/stall_s``; see `ebbtide.StepStats`. The peak is the
    highest since the last log, the others are means over its optimizer steps.

    Args:
        overlap: let the optimizer step inside backward, see `ebbtide.OffloadHandle.overlap`. The
            gradients are clipped to the ``max_grad_norm`` of the `Trainer`.
        **arguments: ``activations``, ``weights``, ``layers``, ``store``, ``host_budget``,
            ``trace``, ``schedule``, ``budget`` and ``plan``, as for `ebbtide.offload`.

    Raises:
        PolicyError: the arguments contradict each other; when training begins also, if they do not
            fit the model or its optimizer.
    """

    def __init__(self, *, overlap: bool = False, **arguments: Any) -> None:
        self._overlaps = overlap
        self._offload = TrainingOffload(**arguments)
        self._num_updates = 0
        self._has_warned = False  # that all layers are recomputed anyway

    @property
    def handle(self) -> OffloadHandle | None:
        """The handle of the last training run, also after its end; None before the first one."""
        return self._offload.handle

    def detach(self) -> None:
        """Put the model back as it was, where training has raised. A second call does nothing."""
        self._offload.end()

    def __enter__(self) -> OffloadCallback:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    # ---- events, called by the Trainer --------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Offload the model: the one that was given to the Trainer, or its sharded form."""
        if args.n_gpu > 1:
            raise PolicyError(
                f"the Trainer copies its model to {args.n_gpu} GPUs in one process "
                f"(nn.DataParallel), and a copy cannot be offloaded; start one process for each "
                f"GPU with torchrun, or choose a GPU with CUDA_VISIBLE_DEVICES"
            )
        budgeted = self._offload.arguments.get("budget") is not None
        if budgeted and _recomputes_all(args) and not self._has_warned:
            self._has_warned = True
            warn_user(
                "checkpointed-anyway",
                "with gradient checkpointing on, every layer is recomputed, whatever the budget "
                "allows; turn it off, and the plan recomputes layers where that pays",
                UserWarning,
            )
        self._num_updates = 0
        self._offload.begin(kwargs["model"], run=state)
        handler = _handler_of(self)
        if handler is not None:
            # Trainers call the callbacks of TensorBoard, Weights & Biases and so on before their
            # user's, and these would not see what a user's callback adds to a log. In place, and of
            # the callbacks before it: the loop that runs over them skips none.
            others = [each for each in handler.callbacks if each is not self]
            handler.callbacks[:] = [self, *others]
        if self._overlaps:
            trainer = _caller(lambda each: getattr(each, "callback_handler", None) is handler)
            self._overlap(args, kwargs["optimizer"], trainer)

    def _overlap(self, args: Any, optimizer: Any, trainer: Any) -> None:
        """Let the optimizer step inside backward, and clip where the Trainer does.

        Raises:
            PolicyError: it cannot.
        """
        if args.fp16 or args.world_size > 1 or trainer is None:
            raise PolicyError(
                "overlap=True needs a Trainer that alone has the gradients: train without fp16, "
                "whose scaler changes them, and in one process, or leave overlap out"
            )
        while hasattr(optimizer, "optimizer"):  # Accelerate has wrapped it
            optimizer = optimizer.optimizer
        assert self.handle is not None
        self.handle.overlap(optimizer, max_norm=args.max_grad_norm or math.inf)
        clip = trainer.accelerator.clip_grad_norm_

        def clip_grad_norm_(*values: Any, **others: Any) -> Any:
            overlaps = getattr(optimizer, "clip_grad_norm_", None)  # until training ends
            return clip(*values, **others) if overlaps is None else overlaps()

        trainer.accelerator.clip_grad_norm_ = clip_grad_norm_

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Count the step of a microbatch."""
        self._offload.count_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Count the step, after the optimizer."""
        self._offload.count_step()
        self._num_updates += 1

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Add the figures to a log of the training loss, and to the Trainer's history of logs."""
        logs = kwargs.get("logs")
        if logs is None or "loss" not in logs or not self._offload.is_attached:
            return
        metrics = self._offload.take_metrics(self._num_updates)
        self._num_updates = 0
        logs.update(metrics)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Put the model back as it was."""
        self._offload.end()


def _recomputes_all(args: Any) -> bool:
    # The second name is the one of Transformers before 5.
    names = ("activation_checkpointing", "gradient_checkpointing")
    return any(getattr(args, name, False) for name in names)


def _handler_of(callback: TrainerCallback) -> Any:
    """The handler that calls a callback now; a callback is given no reference to its Trainer."""
    return _caller(
        lambda each: (
            isinstance(each, CallbackHandler) and any(known is callback for known in each.callbacks)
        )
    )


def _caller(is_sought: Callable[[Any], bool]) -> Any:
    """The innermost object of which a method is running; None if there is none."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if is_sought(found):
            return found
        frame = frame.f_back
    return None
