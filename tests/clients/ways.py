"""One way to train, without ebbtide and with it, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

import ebbtide
from run_program import weights_digest

Attach = Callable[[nn.Module], None]
"""Called with the model where its user would offload it."""

SMALL = ebbtide.ActivationPolicy(min_bytes=4096)


def assert_same_with_and_without(
    train: Callable[[Attach], tuple[Sequence[float], nn.Module]],
    *,
    moves: bool = True,
) -> ebbtide.OffloadHandle:
    """Train twice; losses and weights must be the same, and by default bytes were moved or rebuilt.

    Args:
        train: calls its argument with the model, trains from a seed of its own, and returns the
            losses and the model.
        moves: whether bytes must be moved; not so if the framework recomputes all layers itself.

    Returns:
        The handle, detached.
    """
    handles: list[ebbtide.OffloadHandle] = []
    plain = _results(*train(lambda _: None))
    offloaded = _results(
        *train(lambda model: handles.append(ebbtide.offload(model, activations=SMALL)))
    )
    assert plain == offloaded
    assert plain[0], "the losses were not recorded"
    (handle,) = handles
    assert not moves or handle.stats.offloaded_bytes + handle.stats.rebuilt_bytes > 0
    handle.detach()
    return handle


def _results(losses: Sequence[Any], model: nn.Module) -> tuple[list[str], str]:
    return [float(loss).hex() for loss in losses], weights_digest(model)
