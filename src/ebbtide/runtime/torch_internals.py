"""What ebbtide uses of torch that torch does not document, each with its reason.

Checked with torch 2.11, 2.13 and 2.15. No public call does the same in any of them, where none is
named. `devices` is below this file and asks torch itself whether the profiler runs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._device import DeviceContext
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype, _has_foreach_support

AUTOGRAD: Final[Any] = torch._C._autograd

# ---- Which backward runs

current_graph_task: Final = torch._C._current_graph_task_id
"""The number of the backward in which the calling thread runs a node; -1 outside of one."""

current_node: Final[Any] = torch._C._current_autograd_node
"""The node that the calling thread runs; None outside of a backward."""

call_after_backward: Final = torch.autograd.Variable._execution_engine.queue_callback
"""Calls a function when the running backward has ended. FSDP and DDP use it, too."""

sequence_number: Final[Any] = AUTOGRAD._get_sequence_nr
"""The number that the next node of the calling thread gets. Nodes are numbered in order."""

# ---- Saved-tensor hooks. The public context manager cannot be left in another order.

top_hooks: Final[Any] = functools.partial(AUTOGRAD._top_saved_tensors_default_hooks, True)
"""The pair of hooks that autograd calls now; None without one."""

push_hooks: Final[Any] = AUTOGRAD._push_saved_tensors_default_hooks
pop_hooks: Final[Any] = AUTOGRAD._pop_saved_tensors_default_hooks

hooks_are_enabled: Final[Any] = AUTOGRAD._saved_tensors_hooks_is_enabled
"""Whether autograd calls hooks at all. `torch.func.grad` disables them."""

# ---- Tensors


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the number of in-place changes that a tensor has counted."""
    AUTOGRAD._unsafe_set_version_counter((tensor,), (version,))


def count_storage_users(tensor: torch.Tensor) -> int:
    """Return the reference count of a tensor's storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


exchange_tensors: Final[Any] = torch._C._swap_tensor_impl
"""Exchanges two tensors under their Python objects.

`torch.utils.swap_tensors` is public. It refuses tensors that are referred to weakly.
"""

without_function_subclasses: Final[Any] = torch._C.DisableTorchFunctionSubclass
without_torch_function: Final[Any] = torch._C.DisableTorchFunction
no_torch_function: Final[Any] = torch._C._disabled_torch_function_impl

# ---- Modes of the calling thread

transform_level: Final[Any] = torch._C._functorch.maybe_current_level
"""The level of the innermost transform of `torch.func` that runs; None without one."""

onednn_is_enabled: Final[Any] = torch._C._get_mkldnn_enabled
"""Whether oneDNN may compute. The public name reads a flag of the whole backend."""

enable_onednn: Final[Any] = torch._C._set_mkldnn_enabled


def is_written_down() -> bool:
    """Whether operations are only written down: exported, traced, or run with fake tensors."""
    modes = torch._C._TorchDispatchModeKey
    return (
        torch.compiler.is_exporting()
        or torch._C._get_tracing_state() is not None
        or torch._C._get_dispatch_mode(modes.PROXY) is not None
        or torch._C._get_dispatch_mode(modes.FAKE) is not None
    )


def has_dispatch_modes() -> bool:
    """Whether a mode of the calling thread sees its operations. Autograd's threads have none."""
    return bool(torch._C._len_torch_dispatch_stack())


function_modes: Final[Any] = torch.overrides._get_current_function_mode_stack
"""The modes that see calls of torch's functions."""

DefaultDevice: Final = DeviceContext
"""The mode of `torch.set_default_device`."""

group_by_device_and_dtype: Final[Any] = _group_tensors_by_device_and_dtype
has_foreach_support: Final[Any] = _has_foreach_support
"""How `torch.nn.utils.get_total_norm` groups gradients, which decides the bits of the norm."""

# ---- What holds the memory of tensors of any kind, and of modules

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_PLAIN = frozenset({torch.Tensor, nn.Parameter})
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def modules_of(module: nn.Module) -> list[nn.Module]:
    """Return a module and its submodules, as `nn.Module.modules` does in six times the time."""
    found, known, rest = [], set(), [module]
    while rest:
        each = rest.pop()
        if each not in known:
            known.add(each)
            found.append(each)
            if each._modules:
                rest += [child for child in reversed(each._modules.values()) if child is not None]
    return found


def parts_of(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """Return the tensors that hold a tensor's memory: usually itself.

    For a wrapper subclass these are its inner tensors, for a sparse tensor its indices and values,
    for a tensor inside a transform of `torch.func` the tensor that is transformed. A lazy parameter
    that has no shape yet has none.
    """
    if type(tensor) in _PLAIN and tensor.layout is torch.strided and not _is_wrapped(tensor):
        return (tensor,)
    return _unusual_parts_of(tensor)


def _unusual_parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if is_lazy(tensor):
        return
    if _is_wrapped(tensor):
        inner = [torch._C._functorch.get_unwrapped(tensor)]
    elif hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif hasattr(tensor, "get_data_tensors"):  # Transformer Engine's
        inner = list(tensor.get_data_tensors())
    elif tensor.layout is torch.sparse_coo:
        plain = tensor.detach()
        inner = [plain._indices(), plain._values()]
    elif tensor.layout in _COMPRESSED:
        plain = tensor.detach()
        inner = [getattr(plain, name)() for name in (*_COMPRESSED[tensor.layout], "values")]
    else:
        yield tensor
        return
    for part in inner:
        if isinstance(part, torch.Tensor):
            yield from parts_of(part)


def addresses_of(tensor: torch.Tensor) -> Iterator[int]:
    """Yield where a tensor's memory begins, and where the storages begin that it is in.

    Tensors that have no memory in this process, such as those on the meta device, have none.
    """
    for part in parts_of(tensor):
        try:
            addresses = part.data_ptr(), part.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # mkldnn, fake and opaque tensors
            continue
        yield from addresses


def may_change_unseen(storage: torch.UntypedStorage) -> bool:
    """Whether other code than torch's can write a storage, so that no version tells of a change.

    Such is memory that torch did not allocate (from NumPy, DLPack or a mapped file), memory that
    was lent to NumPy, and memory that processes share.
    """
    if not storage.resizable():
        return True
    return storage.is_shared() and storage.device.type == "cpu"  # the type takes longest
