"""Recipes, which recompute an operation's output from inputs that autograd saves anyway."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor

from ebbtide.errors import PolicyError
from ebbtide.interface.arguments import refuse

KernelSettings = tuple[int, bool, bool] | None
"""What kernels depend on beside their arguments: the number of threads, whether oneDNN is used, and
whether subnormal numbers become zero. None on an accelerator, whose kernels depend on none of them.

A kernel on a CPU gives each thread a part of a tensor. It computes the end of a part, which does
not fill a vector register, by other code than the rest: the last bit of a tanh or an exp may differ
between the two. So these bits depend on the number of threads.
"""

_SMALLEST_NORMAL = 2.0**-1022

Constants = Mapping[str, Any]
Rebuild = Callable[[Sequence[Tensor], Constants, torch.dtype], Tensor]


@final
@dataclass(frozen=True)
class RebuildRecipe:
    """Recognises one operation in autograd's graph and runs it again.

    A recipe must run the kernel that the forward ran, on the same input, so that its output is the
    same to the bit. Its first output for each shape and type is compared with the original; if they
    differ, the recipe is not used for that shape and type again.

    Args:
        node: the name of the operation's backward node, ``tensor.grad_fn.name()``.
        inputs: names of the operation's tensor arguments, in the order of the node's
            ``next_functions``. An input can be used if the node saved it (``_saved_<name>``) or if
            it is the result that the operation before saved (``_saved_result``); if one is missing,
            the output is not rebuilt.
        rebuild: computes the output, called with the inputs, the constants and the type of the
            output while autograd and autocast are off. It must not change its inputs.
        constants: names of other values that the node saved, such as ``approximate``.

    Raises:
        PolicyError: ``node`` or ``inputs`` is empty.
    """

    node: str
    inputs: tuple[str, ...]
    rebuild: Rebuild
    constants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.node or not self.inputs:
            raise PolicyError(
                "a RebuildRecipe needs the name of a backward node and of at least one input, "
                'such as RebuildRecipe("SinBackward0", ("self",), rebuild)'
            )

    def traffic_bytes(self, inputs_bytes: Sequence[int], output_bytes: int) -> int:
        """Return the cost of running the recipe: bytes read from and written to device memory."""
        return sum(inputs_bytes) + output_bytes


def kernel_settings() -> KernelSettings:
    """Return the settings that kernels on the CPU depend on now, on the calling thread."""
    # Python multiplies by the same unit of the processor, which is told to flush or not.
    flushes = _SMALLEST_NORMAL * 0.5 == 0.0
    return torch.get_num_threads(), torch._C._get_mkldnn_enabled(), flushes


@contextlib.contextmanager
def in_force(settings: KernelSettings) -> Iterator[None]:
    """Have kernels depend on these settings, as they did in forward."""
    present = kernel_settings()
    _put_in_force(settings, present)
    try:
        yield
    finally:
        _put_in_force(present, settings)


def _put_in_force(settings: KernelSettings, present: KernelSettings) -> None:
    assert settings is not None and present is not None
    num_threads, uses_onednn, flushes = settings
    if num_threads != present[0]:
        torch.set_num_threads(num_threads)
    if uses_onednn != present[1]:
        torch._C._set_mkldnn_enabled(uses_onednn)
    if flushes != present[2]:
        torch.set_flush_denormal(flushes)


MOST_STEPS: Final = 4
"""Length of the longest chain of rebuilds, each of which waits for the one before."""

RECIPES: dict[str, RebuildRecipe] = {}
"""The registered recipes, by the name of the backward node."""


def register_rebuild(recipe: RebuildRecipe) -> None:
    """Register a recipe, so that outputs of its operation are rebuilt, not kept or offloaded.

    It applies to every model offloaded with ``ActivationPolicy(rebuild=True)``, from the next
    forward on. It replaces an earlier recipe for the same node.
    """
    if not isinstance(recipe, RebuildRecipe):
        refuse("recipe", "an ebbtide.RebuildRecipe", recipe)
    RECIPES[recipe.node] = recipe


def _unary(node: str, function: Callable[..., Tensor], *constants: str) -> None:
    """Register a function of one tensor whose other arguments are named as the node's constants."""

    def rebuild(inputs: Sequence[Tensor], saved: Constants, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
        return function(inputs[0], **saved)

    register_rebuild(RebuildRecipe(node, ("self",), rebuild, constants))


def _binary(node: str, function: Callable[..., Tensor], *constants: str) -> None:
    def rebuild(inputs: Sequence[Tensor], saved: Constants, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
        return function(*inputs, **saved)

    register_rebuild(RebuildRecipe(node, ("self", "other"), rebuild, constants))


def _cast(inputs: Sequence[Tensor], saved: Constants, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    return inputs[0].to(dtype)


def _clone(inputs: Sequence[Tensor], saved: Constants, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    # `clone` is mostly called to get a contiguous copy. If the original is not contiguous, the
    # check of the recipe's first output notices the difference.
    return inputs[0].clone(memory_format=torch.contiguous_format)


def _elu(x: Tensor, alpha: float, scale: float, input_scale: float) -> Tensor:
    return torch.ops.aten.elu(x, alpha, scale, input_scale)  # type: ignore[no-any-return]


_unary("GeluBackward0", F.gelu, "approximate")
_unary("SiluBackward0", F.silu)
_unary("MishBackward0", F.mish)
_unary("HardswishBackward0", F.hardswish)
_unary("SoftplusBackward0", F.softplus, "beta", "threshold")
_unary("LeakyReluBackward0", F.leaky_relu, "negative_slope")
_unary("EluBackward0", _elu, "alpha", "scale", "input_scale")
_unary("SinBackward0", torch.sin)
_unary("CosBackward0", torch.cos)
# The next four operations save their own result, so an output that they saved has a record already.
# Their recipes serve saved views and copies of the result.
_unary("ReluBackward0", torch.relu)
_unary("TanhBackward0", torch.tanh)
_unary("SigmoidBackward0", torch.sigmoid)
_unary("ExpBackward0", torch.exp)
_unary("NegBackward0", torch.neg)
_unary("PowBackward0", torch.pow, "exponent")
_binary("MulBackward0", torch.mul)
_binary("AddBackward0", torch.add, "alpha")
_binary("SubBackward0", torch.sub, "alpha")
register_rebuild(RebuildRecipe("ToCopyBackward0", ("self",), _cast))
register_rebuild(RebuildRecipe("CloneBackward0", ("self",), _clone))
