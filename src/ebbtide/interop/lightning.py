"""Offload while a `Trainer` of Lightning trains: a callback for it."""

from __future__ import annotations

from typing import Any

from torch import nn

from ebbtide.errors import PolicyError
from ebbtide.handle import OffloadHandle
from ebbtide.interop.training_offload import TrainingOffload, refuse_missing
from ebbtide.policy import check_switch

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    try:
        from pytorch_lightning import Callback
    except ModuleNotFoundError as error:
        refuse_missing(error, package="pytorch_lightning", extra="lightning")


class OffloadCallback(Callback):
    """Offloads a `LightningModule` while `Trainer.fit` trains it.

    ::

        trainer = lightning.Trainer(callbacks=[OffloadCallback()])

    Losses, weights and checkpoint files are those of training without it. The module is offloaded
    when fitting begins, after the strategy has moved, sharded and wrapped it, and put back when
    training ends or raises. Validation, test and prediction compute without autograd, and nothing
    is offloaded there.

    After each batch, ``ebbtide/peak_device_bytes``, ``ebbtide/offloaded_bytes`` and
    ``ebbtide/stall_s`` of the last step are logged; see `ebbtide.StepStats`.

    Args:
        module: name of the part of the `LightningModule` to offload, such as ``"net"``. None means
            all of it. A budget needs the part whose forward the training step calls; None then
            means the `LightningModule` itself if it has a forward, or else its only submodule with
            parameters.
        prog_bar: show the figures in the progress bar.
        **arguments: ``activations``, ``weights``, ``layers``, ``store``, ``host_budget``,
            ``trace``, ``schedule``, ``budget`` and ``plan``, as for `ebbtide.offload`. Patterns
            of layers are names within ``module``.

    Raises:
        PolicyError: the arguments contradict each other; when fitting begins also, if they do not
            fit the module.
    """

    def __init__(
        self, *, module: str | None = None, prog_bar: bool = False, **arguments: Any
    ) -> None:
        check_switch("prog_bar", prog_bar)
        if module is not None and not isinstance(module, str):
            raise PolicyError(f'module must be a name such as "net", got {module!r}')
        self._module = module
        self._prog_bar = prog_bar
        self._offload = TrainingOffload(**arguments)

    @property
    def handle(self) -> OffloadHandle | None:
        """The handle of the last fit, also after its end; None before the first one."""
        return self._offload.handle

    # ---- hooks, called by the Trainer ---------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Put the callback first, before the tuner's, whose trials are to be offloaded as well."""
        if stage == "fit":
            # A new list: Lightning is iterating over the old one.
            trainer.callbacks = [self, *(each for each in trainer.callbacks if each is not self)]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Offload the module."""
        chosen = self._find_module(pl_module)
        self._offload.begin(chosen, run=trainer)

    def on_train_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Log the figures of the last step."""
        if trainer.barebones:
            return  # it logs nothing, and warns of each attempt
        self._offload.count_step()
        for name, value in self._offload.take_metrics(num_updates=1).items():
            pl_module.log(name, float(value), prog_bar=self._prog_bar, batch_size=1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Put the module back as it was, before the strategy moves it to the CPU."""
        self._offload.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Put the module back as it was."""
        self._offload.end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Put the module back as it was, where a tuner has ended the fit."""
        self._offload.end()

    # ---- the part of the module to offload ----------------------------------------------------

    def _find_module(self, pl_module: nn.Module) -> nn.Module:
        if self._module is not None:
            try:
                return pl_module.get_submodule(self._module)
            except AttributeError:
                names = ", ".join(name for name, _ in pl_module.named_children())
                raise PolicyError(
                    f"{type(pl_module).__name__} has no module {self._module!r}; it has {names}"
                ) from None
        if self._offload.arguments.get("budget") is None or _has_forward(pl_module):
            return pl_module
        parts = [part for part in pl_module.children() if next(part.parameters(), None) is not None]
        return parts[0] if len(parts) == 1 else pl_module


def _has_forward(pl_module: nn.Module) -> bool:
    """Whether a module defines a forward; the one of `LightningModule` itself defines nothing."""
    home = next(kind for kind in type(pl_module).__mro__ if "forward" in vars(kind))
    return not home.__module__.startswith(("lightning.", "pytorch_lightning.", "torch."))
