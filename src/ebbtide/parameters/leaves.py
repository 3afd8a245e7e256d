"""Moves a parameter to another device while autograd graphs that use it are alive.

[Note: leaves] A parameter is a leaf of autograd's graphs. They end in a node that accumulates the
leaf's gradient, and `torch.autograd.grad` and `backward(inputs=...)` find a parameter in a graph by
that node. torch gives a leaf a new node when the leaf moves to another device: graphs from before
keep the old node, and the parameter is no longer found in them. A parameter is therefore not moved
while graphs are alive but becomes another leaf: the Python object, which model and optimizer refer
to, gets the tensor of a leaf that is on the other device already.

Graphs of offloaded weights have such a leaf from the beginning (`OffloadedParameter.device_leaf`).
It gets no gradient as long as the parameter rests on the host. After `detach` the parameter is this
leaf, and the gradients flow into it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def make_leaf(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Make a leaf with the shape and dtype of a parameter, and memory for one element."""
    one = torch.empty((), dtype=like.dtype, device=device)
    return one.expand(like.shape).detach().requires_grad_()


def is_in_graph(leaf: torch.Tensor) -> bool:
    """Whether an autograd graph that is alive refers to the leaf."""
    # The Python object is one user. A node that accumulates its gradient is another, and so is
    # each node that has saved the leaf itself.
    return int(leaf._use_count()) > 1  # type: ignore[attr-defined]


def become(parameter: torch.Tensor, leaf: torch.Tensor) -> None:
    """Let a parameter be another leaf; the Python object stays the same. See [Note: leaves].

    Gradients that graphs still accumulate in the parameter's former leaf go to the parameter.

    Args:
        parameter: a parameter without a gradient.
        leaf: has the parameter's values, on the same device or another. It refers to the
            parameter's former tensor afterwards.
    """
    leaf.requires_grad_(parameter.requires_grad)
    torch._C._autograd._unsafe_set_version_counter((leaf,), (parameter._version,))
    hooks, after = _hooks_of(parameter)
    torch._C._swap_tensor_impl(parameter, leaf)
    _set_hooks(leaf, {}, {0: functools.partial(_pass_on, parameter)})
    _set_hooks(parameter, hooks, after)
    if int(leaf._use_count()) <= 2:  # type: ignore[attr-defined]  # no node has saved it
        leaf.data = leaf.new_empty(()).expand(leaf.shape)


def _pass_on(parameter: torch.Tensor, former: torch.Tensor) -> None:
    """Add the gradient that a graph has accumulated in a former leaf to the parameter's.

    Raises:
        RuntimeError: the parameter has hooks, which would have to get the sum of both gradients.
    """
    gradient, former.grad = former.grad, None
    if gradient is not None:
        if any(_hooks_of(parameter)):
            raise RuntimeError(
                "a graph uses a parameter that was moved by ebbtide.offload, or by detach() of its "
                "handle, after the graph had been made; hooks on that parameter cannot get its "
                "whole gradient. Run the backward before that call, or remove the hooks"
            )
        create_graph = torch.is_grad_enabled()
        # Guard gradient-under-lock: the parameter's own node adds the gradient, because it takes a
        # lock. The parameter is on the other device, so another of autograd's threads may add to
        # its gradient at this moment, and one of the two sums would be lost.
        torch.autograd.backward(parameter, gradient.to(parameter.device), create_graph=create_graph)


def _hooks_of(tensor: torch.Tensor) -> tuple[Any, Any]:
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def _set_hooks(tensor: torch.Tensor, hooks: Any, after: Any) -> None:
    """Set the hooks that are called with a gradient, and those after it was accumulated."""
    tensor._backward_hooks = hooks
    tensor._post_accumulate_grad_hooks = after
