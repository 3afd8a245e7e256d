"""The plain tensors that hold the memory of an unusual one: sparse, nested, or a subclass."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.parameter import is_lazy

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold a tensor's memory: usually itself.

    For a wrapper subclass these are its inner tensors, for a sparse tensor its indices and values,
    for a tensor inside a transform of `torch.func` the tensor that is transformed. A lazy parameter
    that has no shape yet has none.
    """
    if is_lazy(tensor):
        return
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
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
