"""What ebbtide uses of torch that torch does not document, each with its reason.

Checked with torch 2.11, 2.13 and 2.15. No public call does the same in any of them, where none is
named. `devices` is below this file and asks torch itself whether the profiler runs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any, Final

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import TracingContext
from torch._subclasses import FakeTensorMode as FakeTensorMode
from torch.autograd import forward_ad
from torch.nested._internal.nested_tensor import NestedTensor as NestedTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._device import DeviceContext
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype, _has_foreach_support
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten
from torch.utils.hooks import RemovableHandle

from ebbtide.devices.process import num_processes

_AUTOGRAD: Final[Any] = torch._C._autograd

# ---- Which backward runs

current_graph_task: Final = torch._C._current_graph_task_id
"""The number of the backward in which the calling thread runs a node; -1 outside of one."""


def in_backward() -> bool:
    """Whether the calling thread runs a node of a backward."""
    return current_graph_task() != -1


current_node: Final[Any] = torch._C._current_autograd_node
"""The node that the calling thread runs; None outside of a backward."""

call_after_backward: Final = torch.autograd.Variable._execution_engine.queue_callback
"""Calls a function when the running backward has ended. FSDP and DDP use it, too."""

sequence_number: Final[Any] = _AUTOGRAD._get_sequence_nr
"""The number that the next node of the calling thread gets. Nodes are numbered in order."""

# ---- Saved-tensor hooks. The public context manager cannot be left in another order.

top_hooks: Final[Any] = functools.partial(_AUTOGRAD._top_saved_tensors_default_hooks, True)
"""The pair of hooks that autograd calls now; None without one."""

push_hooks: Final[Any] = _AUTOGRAD._push_saved_tensors_default_hooks
pop_hooks: Final[Any] = _AUTOGRAD._pop_saved_tensors_default_hooks

hooks_are_enabled: Final[Any] = _AUTOGRAD._saved_tensors_hooks_is_enabled
"""Whether autograd calls hooks at all. `torch.func.grad` disables them."""


def remove_hooks(pack: Callable[..., Any]) -> bool:
    """Take hooks from autograd's stack, and what an interrupt has left above them.

    Args:
        pack: the pack hook.

    Returns:
        False if they are not there: the stack is then as it was.
    """
    above = []
    while (top := top_hooks()) is not None:
        if top[0] != pack and not hooks_are_enabled():
            break  # what is taken could not be put back
        pop_hooks()
        if top[0] == pack:
            return True
        above.append(top)
    for hooks in reversed(above):
        push_hooks(*hooks)
    return False


def tolerate_hooks(are_harmless: Callable[[Any, Any], bool]) -> None:
    """Have torch disable some hooks where it would raise because they are pushed.

    Args:
        are_harmless: whether a pair of hooks is to be disabled. Calling this again does nothing.
    """
    disable = _AUTOGRAD._saved_tensors_hooks_disable
    if hasattr(disable, "__wrapped__"):
        return

    @functools.wraps(disable)
    def disable_hooks(message: str, fail_if_non_empty: bool = True) -> None:
        hooks = top_hooks()
        harmless = hooks is not None and are_harmless(*hooks)
        disable(message, fail_if_non_empty and not harmless)

    _AUTOGRAD._saved_tensors_hooks_disable = disable_hooks


# ---- Tensors


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the number of in-place changes that a tensor has counted."""
    _AUTOGRAD._unsafe_set_version_counter((tensor,), (version,))


def address_of(tensor: torch.Tensor) -> int:
    """Return what identifies a tensor's storage; 0 if it has none of its own."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return 0
    if tensor._is_zerotensor():  # a tangent of forward-mode AD that is zero has no memory
        return 0
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a wrapper of torch.func, or an opaque tensor
        return 0


def count_storage_users(tensor: torch.Tensor) -> int:
    """Return the reference count of a tensor's storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def count_tensor_users(tensor: torch.Tensor) -> int:
    """Return the reference count of the tensor under a Python object, which is one of them."""
    return int(torch.Tensor._use_count(tensor))  # type: ignore[attr-defined]


make_subclass: Final[Any] = torch.Tensor._make_subclass
"""Makes a tensor of a class that shares the memory of another one, as `nn.Parameter` does."""

neg_view: Final = torch._neg_view
"""Sets a tensor's negative bit, as `conj` sets the conjugate one."""

identity_of: Final[Any] = torch.UntypedStorage._weak_ref
"""Makes a weak reference to a storage. While it exists, no other storage has the address.

`StorageWeakRef` is public in fact if not by name, and a Python object more for each saved storage.
"""

release_identity: Final[Any] = torch.UntypedStorage._free_weak_ref
storage_of_identity: Final[Any] = torch.UntypedStorage._new_with_weak_ptr

exchange_tensors: Final[Any] = torch._C._swap_tensor_impl
"""Exchanges two tensors under their Python objects.

`torch.utils.swap_tensors` is public. It refuses tensors that are referred to weakly.
"""


def has_hook(tensor: Any, handle: RemovableHandle) -> bool:
    """Whether a tensor has the hook that `register_post_accumulate_grad_hook` gave a handle of."""
    hooks = tensor._post_accumulate_grad_hooks
    return hooks is not None and handle.hooks_dict_ref() is hooks


without_function_subclasses: Final[Any] = torch._C.DisableTorchFunctionSubclass
no_torch_function: Final[Any] = torch._C._disabled_torch_function_impl

# ---- Modes of the calling thread

transform_level: Final[Any] = torch._C._functorch.maybe_current_level
"""The level of the innermost transform of `torch.func` that runs; None without one."""


_is_included: Final[Any] = torch._C._dispatch_tls_is_dispatch_key_included
_BATCHES: Final[Any] = torch._C._parse_dispatch_key("VmapMode")


def is_transformed() -> bool:
    """Whether a transform of `torch.func` runs, or a backward of several gradients at once."""
    return transform_level() is not None or bool(_is_included(_BATCHES))


def has_tangents() -> bool:
    """Whether forward-mode AD runs on the calling thread."""
    return forward_ad._current_level >= 0


def is_exported() -> bool:
    """Whether a model is exported.

    Not `torch.compiler.is_exporting`: before torch 2.13 the compiler takes it for true in all code
    that it traces, and a compiled function that calls an offloaded model would offload nothing.
    """
    return torch.compiler._is_exporting_flag


def is_written_down() -> bool:
    """Whether operations are only written down: exported, traced, or run with fake tensors."""
    modes = torch._C._TorchDispatchModeKey
    return (
        is_exported()
        or torch._C._get_tracing_state() is not None
        or torch._C._get_dispatch_mode(modes.PROXY) is not None
        or torch._C._get_dispatch_mode(modes.FAKE) is not None
    )


def let_compiled_code_take(kind: type[torch.Tensor]) -> None:
    """Have compiled code take tensors of a class as plain ones, as it takes parameters.

    torch 2.13 puts a mode around the first run of what was compiled, which refuses classes that it
    does not know, also those without a `__torch_dispatch__`.
    """
    wrappers: Any = sys.modules.get("torch._functorch._aot_autograd.runtime_wrappers")
    known = getattr(wrappers, "HANDLED_TYPES", (kind,))
    if kind not in known:
        wrappers.HANDLED_TYPES = (*known, kind)


def compiler_looks() -> bool:
    """Whether `torch.compile` looks at what code will run with, on the calling thread."""
    return TracingContext.try_get() is not None


count_dispatch_modes: Final[Callable[[], int]] = torch._C._len_torch_dispatch_stack
"""Counts the modes that see the operations of the calling thread."""

_push: Final[Any] = torch._C._push_on_torch_dispatch_stack
_pop: Final[Any] = torch._C._pop_torch_dispatch_stack


Operator: Final = torch._ops.OpOverload
"""The class of operators that reach kernels, each with a schema."""


class OwnMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode of this package.

    It is pushed by `push_mode`: to enter a mode by `with` sets what the whole process is told of
    modes, which threads then set back in another order.
    """


def push_mode(mode: OwnMode) -> None:
    """Have a mode see the operations of the calling thread from now on, before all others do."""
    _push(mode)


def pop_mode(mode: OwnMode) -> None:
    """Take a mode from those of the calling thread, and leave those that came after it."""
    above = []
    while count_dispatch_modes():
        top = _pop(None)
        if top is mode:
            break
        above.append(top)
    for each in reversed(above):
        _push(each)


_is_excluded: Final[Any] = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_excluded: Final[Any] = torch._C._dispatch_tls_set_dispatch_key_excluded
_has_kernel: Final[Any] = torch._C._dispatch_has_kernel_for_dispatch_key
_as_called: Final[Any] = torch._C._RestorePythonTLSSnapshot  # type: ignore[attr-defined]
_Keys = tuple[torch._C.DispatchKey, ...]
_RESOLVE: Final[_Keys] = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)
_CAST: Final[_Keys] = tuple(
    key for name, key in torch._C.DispatchKey.__members__.items() if name.startswith("Autocast")
)


def compute_as_without_modes(called: str = "") -> None:
    """Let the operator that a mode calls compute what it computes where no mode is.

    For the beginning of a mode's `__torch_dispatch__`; when that returns, torch puts back what it
    had. torch (2.11 to 2.15) calls a mode with those dispatch keys excluded that resolve lazily
    conjugated and negated tensors, and those that cast. A kernel that makes such tensors, as that
    of a complex `linalg.pinv` does, would give wrong values without a word.

    Args:
        called: what programs call to run the operator, if that calls others. Where autocast is on,
            it casts inside unless it has a kernel for what was called, which casts before.
    """
    keys = _RESOLVE
    if called:
        with _as_called():
            wanted = [key for key in _CAST if not _is_excluded(key)]
        keys += tuple(key for key in wanted if not _has_kernel(called, key.name))
    for key in keys:
        _set_excluded(key, False)


def drop_own_modes() -> None:
    """Take the modes of this package from the calling thread, which an interrupt has left there."""
    while (count := count_dispatch_modes()) and isinstance(
        torch._C._get_dispatch_stack_at(count - 1), OwnMode
    ):
        _pop(None)


def aside() -> contextlib.AbstractContextManager[object]:
    """Return a block that the innermost mode does not see, if it belongs to this package."""
    count = count_dispatch_modes()
    mode = torch._C._get_dispatch_stack_at(count - 1) if count else None
    return _without(mode) if isinstance(mode, OwnMode) else _AS_IT_IS


@contextlib.contextmanager
def _without(mode: OwnMode) -> Iterator[None]:
    _pop(None)
    try:
        yield
    finally:
        _push(mode)


def has_dispatch_modes() -> bool:
    """Whether a mode sees the operations of the calling thread, and may change their results."""
    return bool(count_dispatch_modes())


def has_modes() -> bool:
    """Whether a mode sees what the calling thread does, and may change it.

    The mode of `torch.set_default_device` is none of these.
    """
    if has_dispatch_modes():
        return True
    if not torch._C._len_torch_function_stack():
        return False
    overrides: Any = torch.overrides
    modes = overrides._get_current_function_mode_stack()
    return not all(isinstance(mode, DeviceContext) for mode in modes)


_AS_IT_IS: Final = contextlib.nullcontext()


def outside_modes() -> contextlib.AbstractContextManager[object]:
    """Return a block in which no mode sees the thread's operations, and inference mode is off.

    A selective checkpoint (`create_selective_checkpoint_contexts`) has modes that count operations,
    and each must occur as often when it runs again. Nor is there a transform of `torch.func`, nor
    the `vmap` in which a backward with ``is_grads_batched=True`` runs: it draws no random numbers.
    """
    is_seen = has_dispatch_modes() or torch.is_inference_mode_enabled()
    return _without_modes() if is_seen or is_transformed() else _AS_IT_IS


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    with (
        _disable_current_modes(),
        torch.inference_mode(False),
        temporarily_clear_interpreter_stack(),
        torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_BATCHES)),
    ):
        yield


group_by_device_and_dtype: Final[Any] = _group_tensors_by_device_and_dtype
has_foreach_support: Final[Any] = _has_foreach_support
"""How `torch.nn.utils.get_total_norm` groups gradients, which decides the bits of the norm."""

# ---- Settings of the process that kernels depend on


_SMALLEST_NORMAL = 2.0**-1022


def _kernel_settings() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    found: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_num_threads, torch.set_num_threads),
        # Python multiplies by the same unit of the processor, which is told to flush or not.
        (lambda: _SMALLEST_NORMAL * 0.5 == 0.0, torch.set_flush_denormal),
    ]
    core: Any = torch._C
    names = {
        **{name: name for name in (
            "mkldnn_enabled", "mkldnn_deterministic", "cudnn_enabled", "cudnn_benchmark",
            "cudnn_deterministic", "nnpack_enabled",
            "cublas_allow_fp16_accumulation", "cpu_allow_fp16_reduced_precision_reduction",
            "math_sdp_allow_fp16_bf16_reduction",
        )},
        **{f"{name}_sdp_enabled": f"sdp_use_{name}" for name in (
            "flash", "mem_efficient", "math", "cudnn", "overrideable", "fa3",
        )},
    }  # fmt: skip
    for read, write in names.items():
        if hasattr(core, f"_get_{read}") and hasattr(core, f"_set_{write}"):
            found.append((getattr(core, f"_get_{read}"), getattr(core, f"_set_{write}")))
    if hasattr(core, "_set_sdp_priority_order"):
        write_order = lambda order: core._set_sdp_priority_order([*order])  # noqa: E731
        found.append((lambda: tuple(core._get_sdp_priority_order()), write_order))
    for name in ("bf16", "fp16"):
        name = f"cublas_allow_{name}_reduced_precision_reduction"
        found.append((getattr(core, f"_get_{name}"), _spread(getattr(core, f"_set_{name}"))))
    for place in (("cuda", "matmul"), ("cuda", "conv"), ("mkldnn", "matmul")):
        read_precision = functools.partial(core._get_fp32_precision_getter, *place)
        found.append((read_precision, functools.partial(core._set_fp32_precision_setter, *place)))
    found.append((_deterministic, _spread(_set_deterministic)))
    return found


def _spread(function: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda value: function(*value) if isinstance(value, tuple) else function(value)


def _deterministic() -> tuple[bool, bool]:
    core: Any = torch._C
    return core._get_deterministic_algorithms(), core._get_deterministic_algorithms_warn_only()


def _set_deterministic(mode: bool, warn_only: bool) -> None:
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)


KERNEL_SETTINGS: Final = _kernel_settings()
"""The settings that kernels depend on: what reads each of them, and what sets it."""


# ---- Modules

MODULE_CALL: Final[CodeType] = nn.Module._call_impl.__code__
"""The code that runs when a module is called, to find calls on a stack."""

MODULE_APPLY: Final[CodeType] = nn.Module._apply.__code__
"""The code of `module.to`, `cuda`, `half` and so on, whose variable ``fn`` converts a tensor."""


def wrap_conversion(wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace what `module.to`, `cuda`, `half` and so on of all modules call.

    Args:
        wrap: returns the replacement of the function that it is given.

    Returns:
        What puts that function back. If other code has replaced it meanwhile, that stays.
    """
    before: Any = nn.Module._apply
    after = wrap(before)

    def put_back() -> None:
        if nn.Module._apply is after:
            nn.Module._apply = before  # type: ignore[method-assign]

    nn.Module._apply = after  # type: ignore[method-assign]
    return put_back


# ---- What holds the memory of tensors of any kind, and of modules

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_PLAIN = frozenset({torch.Tensor, nn.Parameter})
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


_CALL: Final = nn.Module._call_impl.__code__
_CALLS: Final = {
    _CALL,
    *(each for each in _CALL.co_consts if isinstance(each, CodeType)),
    nn.Module._slow_forward.__code__,
}


def find_called(depth: int) -> Any:
    """Return the module in whose call the caller was called by torch; None if code has called it.

    Args:
        depth: number of functions between the caller and torch.
    """
    frame = sys._getframe(depth + 2)
    return frame.f_locals.get("self") if frame.f_code in _CALLS else None


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


def find_data_parallel(model: nn.Module) -> DistributedDataParallel | None:
    """Return what adds up a model's gradients over processes: a part of it, or what calls it now.

    It has hooks on the nodes that accumulate the gradients of its parameters. Torch gives a
    parameter that moves to a device of another type a new node, without them, and says nothing.
    """
    if num_processes() == 1:
        return None
    around, modules = DistributedDataParallel._active_ddp_module, model.modules()
    wrappers = [each for each in (around, *modules) if isinstance(each, DistributedDataParallel)]
    own = set(map(id, model.parameters())) if wrappers else ()
    knows = (each for each in wrappers if any(id(p) in own for p in each._module_parameters))
    return next(knows, None)


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


# ---- Learning rate schedulers, which replace the step of their optimizer by one that notes a call

SCHEDULED: Final = "_wrapped_by_lr_sched"
"""The attribute of a step that notes its calls; a scheduler leaves such a step as it is."""


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Note that an optimizer steps, for a scheduler that warns if it is stepped first."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
