"""Calls of layers that run again in the backward of a step with fake tensors, as the engine does.

What is alive then is found by running the step so. A second forward has its own output and the
gradient of the first one's beside what it saves, and a forward that saves nothing needs less than
one that does: neither follows from a step in which everything is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Set
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ebbtide.planning.profiling.layer_calls import LayerCalls
from ebbtide.tensors.call_arguments import Arguments


def recompute_calls(
    model: nn.Module, names: Iterable[str], calls: LayerCalls, recomputed: Set[int]
) -> None:
    """Have calls of layers run again in backward, for good.

    Args:
        model: a copy of the model, which is used once. Its layers are hooked by ``calls``.
        names: names of the layers.
        calls: numbers the calls.
        recomputed: which calls run again. What is inside one of these runs again with it.
    """
    for name in names:
        module = model.get_submodule(name)
        module.forward = functools.partial(_forward, module.forward, name, calls, recomputed)


def _forward(
    forward: Callable[..., Any],
    name: str,
    calls: LayerCalls,
    recomputed: Set[int],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    opened = calls.open
    if not opened or opened[-1] not in recomputed or not recomputed.isdisjoint(opened[:-1]):
        return forward(*args, **kwargs)
    arguments = Arguments(args, kwargs, name)
    tensors = arguments.take_tensors()
    first = [(args, kwargs)]  # held no longer than until the first call

    def run(*saved: Tensor) -> Any:
        given = first.pop() if first else arguments.put_together(saved)
        return forward(*given[0], **given[1])

    # There are no random numbers to bring back.
    return checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=False)
