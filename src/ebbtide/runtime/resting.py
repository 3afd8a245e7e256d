"""Weights at rest: what a parameter is while its layer does not work.

[Note: a parameter never moves] The `nn.Parameter` is a tensor of the host from offload to detach.
While a module that uses it is open, the module holds a stand-in in the parameter's place: a tensor
of the device, which autograd knows as computed from the parameter. (To give the parameter itself
device memory and take it away would cut it off from graphs: autograd forgets where a leaf's
gradient goes when its device changes, so that `torch.autograd.grad` and `backward(inputs=...)`
would find nothing.)
"""

from __future__ import annotations

import sys
from typing import Any, final

import torch
from torch import nn

from ebbtide.errors import PolicyError

Place = tuple[nn.Module, str, Any]
"""A module, its list or dict that holds a parameter, and the index or key there."""

PARAMETERS = "_parameters"
"""The name of a module's dict of them."""


class StandIn(torch.Tensor):
    """What modules hold in a parameter's place: its values, in a buffer of the device.

    What is computed with it is a plain tensor. It is no `nn.Parameter`: modules that a forward
    makes of it (tensorly's slices of factorized weights) must not take it for one of theirs.

    Attributes:
        exposed: whether somebody was given its `data`, whose changes no version counter tells.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    exposed = False

    @staticmethod
    def of(values: torch.Tensor) -> StandIn:
        """A stand-in that shares the memory of these values."""
        made = torch.Tensor._make_subclass(StandIn, values)
        assert isinstance(made, StandIn)
        return made

    @property
    def data(self) -> torch.Tensor:
        """As that of any tensor."""
        self.exposed = True
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self.exposed = True
        self.refer_to(values)

    def refer_to(self, values: torch.Tensor) -> None:
        """Let it be these values, for all who hold it."""
        torch.Tensor.data.__set__(self, values)  # type: ignore[attr-defined]


@final
class Followed:
    """A stand-in that others have and can change.

    Args:
        stand_in: as it was brought.

    Attributes:
        stand_in: as given.
    """

    def __init__(self, stand_in: StandIn) -> None:
        self.stand_in = stand_in
        self._version = stand_in._version

    def is_changed(self) -> bool:
        """Whether somebody has changed its values, or may have."""
        return self.stand_in._version != self._version or self.stand_in.exposed

    def look(self) -> torch.Tensor:
        """Its values as they are, which count as seen."""
        self.stand_in.exposed = False
        self._version = self.stand_in._version
        return self.stand_in.detach()


@final
class RestingParameter:
    """A parameter, and where it rests.

    Attributes:
        parameter: the one object that model and optimizer know.
        name: in the model.
        offset_bytes: in the memory of its group, on the host and on the device.
        size_bytes: of its values.
        host: its values at rest, in a storage of their own.
        places: what holds it: modules' parameters, and their lists and dicts.
        shown: what modules hold while they are open; None while none is.
        lent: what code still has of it while no module is open that holds it.
        kept: the stand-in of this forward, for the calls that follow. It is without memory
            meanwhile, unless the model itself holds on to it.
        departed: whether it is the device's again.
        changes: how often a forward has changed its values.
        replacements: how often others took the place of its values.
    """

    def __init__(self, name: str, parameter: nn.Parameter, offset_bytes: int) -> None:
        self.name = name
        self.parameter = parameter
        self.offset_bytes = offset_bytes
        self.size_bytes = parameter.numel() * parameter.element_size()
        self._size, self._stride = parameter.shape, _dense_stride(parameter)
        self.host = parameter.data
        self.places: list[Place] = []
        self.shown: Followed | None = None
        self.lent: list[Followed] = []
        self.kept: StandIn | None = None
        self.departed = False
        self.changes = self.replacements = 0

    def view_of(self, memory: torch.Tensor) -> torch.Tensor:
        """Its values in the memory of its group, sharing the storage."""
        dtype = self.host.dtype
        view = torch.empty(0, dtype=dtype, device=memory.device)
        offset = self.offset_bytes // dtype.itemsize
        return view.set_(memory.untyped_storage(), offset, self._size, self._stride)

    def own_view_of(self, memory: torch.Tensor) -> torch.Tensor:
        """Its values in host memory of its group, in a storage of their own.

        So that `torch.save` writes this parameter and not its group.
        """
        return self.own_view_at(memory, self.offset_bytes)

    def own_view_at(self, memory: torch.Tensor, offset_bytes: int) -> torch.Tensor:
        """Values like its own at a place of host memory, in a storage of their own."""
        part = memory.numpy()[offset_bytes : offset_bytes + self.size_bytes]
        flat = torch.from_numpy(part).view(self.host.dtype)
        return flat.as_strided(self._size, self._stride)

    def rest_in(self, memory: torch.Tensor) -> None:
        """Move its values to host memory of its group, and its gradient to the host."""
        self.host = self.own_view_of(memory)
        self._rest()

    def _rest(self) -> None:
        parameter = self.parameter
        gradient, parameter.grad = parameter.grad, None
        self.host.copy_(parameter.data)
        parameter.data = self.host
        if gradient is not None:
            parameter.grad = gradient.to(self.host.device)

    def leave_for(self, home: torch.device) -> None:
        """Let the parameter, and its gradient, be tensors of the device again."""
        parameter = self.parameter
        gradient, parameter.grad = parameter.grad, None
        parameter.data = self.host = parameter.data.to(home, copy=True)
        if gradient is not None:
            parameter.grad = gradient.to(home, copy=True)
        self.departed = True

    def adopt_values(self) -> None:
        """Take values that somebody else has given it (`parameter.data = ...`, `model.to(...)`).

        Raises:
            PolicyError: they are of another shape or type.
        """
        given = self.parameter.data
        if given.data_ptr() != self.host.data_ptr():
            if not self._fits(given):
                raise self._misfit(given)
            self.replacements += 1
            self._rest()

    def find_given(self) -> list[nn.Parameter]:
        """Parameters that modules hold in its place, where somebody put them."""
        held = [held_at(vars(m).get(name), key) for m, name, key in self.places]
        given = {id(p): p for p in held if isinstance(p, nn.Parameter) and p is not self.parameter}
        return list(given.values())

    def take_place(self, given: nn.Parameter) -> None:
        """Let another parameter rest in its place.

        Raises:
            PolicyError: it is of another shape or type, or other modules hold another one.
        """
        if len(self.find_given()) > 1 or any(
            held_at(vars(module).get(name), key) is self.parameter
            for module, name, key in self.places
            if name == PARAMETERS
        ):
            raise PolicyError(
                f"{self.name} rests on the host and is shared by several modules, which hold "
                f"different parameters now; call detach() on the offload's handle first, change "
                f"the model, and offload it again"
            )
        if not self._fits(given.data):
            raise self._misfit(given.data)
        # The one from before is nobody's business here any more.
        self.parameter.data = self.parameter.data.clone()
        self.parameter = given
        self.replacements += 1
        self._rest()

    def _misfit(self, given: torch.Tensor) -> PolicyError:
        return PolicyError(
            f"{self.name} rests on the host as {self.host.dtype} of shape {tuple(self._size)}, and "
            f"was given {given.dtype} of shape {tuple(given.shape)}; call detach() on the "
            f"offload's handle first, change the model, and offload it again"
        )

    def _fits(self, values: torch.Tensor) -> bool:
        return values.shape == self._size and values.dtype == self.host.dtype

    def show(self, stand_in: StandIn) -> None:
        """Let the modules hold this in its place. What they hold of others' stays."""
        self._exchange(self.parameter, stand_in)
        self.shown = Followed(stand_in)

    def hide(self) -> None:
        """Let the modules hold the parameter again. Somebody else may still have what they held."""
        shown, self.shown = self.shown, None
        if shown is not None:
            self._exchange(shown.stand_in, self.parameter)
            if all(followed.stand_in is not shown.stand_in for followed in self.lent):
                self.lent.append(shown)

    def is_changed(self) -> bool:
        """Whether somebody has changed what stands for it now."""
        return any(followed.is_changed() for followed in self._followed())

    def _followed(self) -> list[Followed]:
        return self.lent if self.shown is None else [self.shown, *self.lent]

    def keep_changes(self, buffer: torch.Tensor | None) -> None:
        """What the forward itself has made of its values counts, at rest too.

        Args:
            buffer: of its group.
        """
        for followed in self._followed():
            if followed.is_changed():
                self._keep_changes(followed, buffer)

    def _keep_changes(self, followed: Followed, buffer: torch.Tensor | None) -> None:
        self.changes += 1
        values = followed.look()
        if not self._fits(values):
            self.parameter.data = values  # the next forward will say so
            return
        self.host.copy_(values)
        present = None if buffer is None else self.view_of(buffer)
        if present is not None and present.data_ptr() != values.data_ptr():
            present.copy_(values)
            # What was saved of the values before was not changed, but would not be found again.
            self.replacements += 1

    def forget(self) -> None:
        """Follow no longer what nobody has any more, and take its memory."""
        self.lent = [f for f in self.lent if _count(f) > _ALONE + (f.stand_in is self.kept)]
        if self.kept is not None and self.shown is None and not self.lent:
            # What autograd saved of it refers to the group, not to this memory.
            self.kept.refer_to(self.kept.new_empty(0))

    def _exchange(self, present: torch.Tensor, following: torch.Tensor) -> None:
        for module, name, key in self.places:
            container = vars(module).get(name)  # the model may have made another one
            if container is not None and held_at(container, key) is present:
                container[key] = following


def held_at(container: Any, key: Any) -> Any:
    """What a list or dict of a module holds, as it is; None if nothing is there."""
    if isinstance(container, dict):
        return dict.get(container, key)
    return container[key] if isinstance(container, list) and key < len(container) else None


def _dense_stride(parameter: torch.Tensor) -> tuple[int, ...]:
    """The parameter's strides if its elements fill their memory; else those of a packed one."""
    return torch.empty_like(parameter, device="meta").stride()


def _count(followed: Followed) -> int:
    return sys.getrefcount(followed.stand_in)


_ALONE = _count(Followed(StandIn.of(torch.empty(0))))
"""What this interpreter counts where nobody else holds a stand-in."""
