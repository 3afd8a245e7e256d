"""Copies of tensors that have no memory: shapes, types and shared storages, but no values."""

from __future__ import annotations

import copy
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from ebbtide.errors import PolicyError


@final
class FakeCopies:
    """Makes fake copies of a model's tensors and of its batch.

    Tensors that share a storage get copies that share one. Copies of tensors on the meta device are
    on another one, so a model that was built there can be profiled.

    Args:
        mode: the mode that makes fake tensors.
        meta_as: the device that tensors on the meta device are taken to be on.
    """

    def __init__(self, mode: FakeTensorMode, meta_as: torch.device) -> None:
        self._mode = mode
        self._meta_as = meta_as
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # with the original, by its id
        self._storages: dict[tuple[int, torch.dtype], Tensor] = {}

    def model(self, model: nn.Module) -> nn.Module:
        """Return a copy of a model whose parameters and buffers are fake.

        Whatever the copy's code stores in its attributes, the model itself stays as it is.

        Raises:
            PolicyError: a parameter has no shape yet, or is no plain tensor, or the model cannot be
                copied.
        """
        named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
        for name, tensor in named:
            if is_lazy(tensor):
                raise PolicyError(f"{name} has no shape yet; run the model once, then profile it")
            self.copy(tensor, name)
        # What is in the memo is not copied but replaced.
        memo = {address: fake for address, (fake, _) in self._copies.items()}
        try:
            return copy.deepcopy(model, memo)
        except Exception as error:
            raise PolicyError(
                f"a model is copied to be profiled, and this {type(model).__name__} cannot be "
                f"copied ({type(error).__name__}: {error}). ebbtide.offload(model, budget=...) "
                f"plans it from its first training step"
            ) from error

    def batch(self, values: Any) -> Any:
        """Return nested containers with fake copies of their tensors."""
        return tree_map_only(Tensor, lambda tensor: self.copy(tensor, "a tensor of batch"), values)

    def copy(self, tensor: Tensor, name: str) -> Tensor:
        """Return the fake copy of a tensor.

        Raises:
            PolicyError: it is no plain tensor.
        """
        known = self._copies.get(id(tensor))
        if known is None:
            if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
                raise PolicyError(
                    f"{name} is a {type(tensor).__name__} of layout {tensor.layout}, which cannot "
                    f"be profiled with fake tensors; profile before the model is sharded, "
                    f"quantized or compiled"
                )
            known = self._copies[id(tensor)] = self._make(tensor), tensor
        return known[0]

    def _make(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        place = storage._cdata, tensor.dtype
        device = self._meta_as if tensor.device.type == "meta" else tensor.device
        with self._mode, torch.no_grad():
            if place not in self._storages:
                count = storage.nbytes() // tensor.itemsize
                self._storages[place] = torch.empty(count, dtype=tensor.dtype, device=device)
            view = self._storages[place].as_strided(
                tensor.shape, tensor.stride(), tensor.storage_offset()
            )
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(view.detach(), requires_grad=tensor.requires_grad)
        return view.detach().requires_grad_(tensor.requires_grad)
