"""Offloaded parameters and their groups: where values are, and what replaces a parameter.

First come two things that moving a parameter needs: who else refers to the memory of a tensor, and
how a parameter becomes another leaf of autograd's graphs. Then one offloaded parameter, the groups
that are copied together, and the places where a model holds its parameters.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import nn
from torch.autograd.graph import Node, increment_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from ebbtide.devices.device import Layer
from ebbtide.errors import PolicyError
from ebbtide.runtime.record import STORED, WEIGHT, Record
from ebbtide.runtime.torch_internals import (
    compiler_looks,
    count_storage_users,
    count_tensor_users,
    exchange_tensors,
    make_subclass,
    no_torch_function,
    set_version,
)
from ebbtide.stores.store import AbstractStore, RestingSlot

# ---- Who else refers to the memory of a tensor: other tensors, NumPy arrays, other processes
#
# Values may be moved to other memory only where nobody could notice. What else refers to the memory
# would not see later changes of the values any more, and its own changes would be lost.

ALONE = count_storage_users(torch.empty(1, device="cpu"))
"""What `count_storage_users` returns for a tensor that shares its memory with no other."""


def find_shared(
    tensors: Sequence[torch.Tensor], *, aliases: int = 0, collects: bool = False
) -> set[int]:
    """Find the tensors whose memory somebody else refers to.

    Args:
        tensors: distinct tensors. They may be parts of one storage if they do not overlap.
        aliases: how many tensors the caller has for each of them that share its memory.
        collects: have Python collect garbage before anything counts as shared. A tensor that nobody
            can reach shares nothing.

    Returns:
        The positions of the tensors that share their memory.
    """
    by_storage: dict[int, list[int]] = {}
    for position, tensor in enumerate(tensors):
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(position)

    def find() -> set[int]:
        found: set[int] = set()
        for positions in by_storage.values():
            first = tensors[positions[0]]
            others = count_storage_users(first) - ALONE + 1 - len(positions) * (1 + aliases)
            between_processes = first.device.type == "cpu" and first.is_shared()  # type: ignore[no-untyped-call]
            if others or between_processes or find_overlaps([tensors[each] for each in positions]):
                found.update(positions)
        return found

    shared = find()
    if shared and collects:
        gc.collect()
        shared = find()
    return shared


def find_overlaps(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Find the positions of the tensors whose memory overlaps with that of another one."""
    found = set()
    end, last = 0, -1
    for begin, position in sorted((t.data_ptr(), n) for n, t in enumerate(tensors) if t.numel()):
        if begin < end:
            found |= {last, position}
        tensor = tensors[position]
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        num_elements = 1 + sum((size - 1) * stride for size, stride in steps)
        if begin + num_elements * tensor.element_size() > end:
            end, last = begin + num_elements * tensor.element_size(), position
    return found


def is_foreign(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in memory that torch has not allocated, such as that of a NumPy array.

    torch cannot say whether anybody else refers to it. Nobody does where torch or safetensors have
    mapped a file for this process alone, as they do to load weights.
    """
    storage = tensor.untyped_storage()
    if storage.resizable() or not storage.nbytes():
        return False
    return tensor.device.type != "cpu" or not _is_private_file(tensor.data_ptr())


def _is_private_file(address: int) -> bool:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        extent, mode, _, _, inode, *_ = line.split()
        begin, end = (int(part, 16) for part in extent.split("-"))
        if begin <= address < end:
            return mode.endswith("p") and inode != "0"
    return False


# ---- Moves a parameter to another device while autograd graphs that use it are alive ----
#
# [Note: leaves] A parameter is a leaf of autograd's graphs. They end in a node that accumulates
# the leaf's gradient, and `torch.autograd.grad` and `backward(inputs=...)` find a parameter in a
# graph by that node. torch gives a leaf a new node when the leaf moves to another device: graphs
# from before keep the old node, and the parameter is no longer found in them. A parameter is
# therefore not moved while graphs are alive but becomes another leaf: the Python object, which
# model and optimizer refer to, gets the tensor of a leaf that is on the other device already.
#
# Graphs of offloaded weights have such a leaf from the beginning
# (`OffloadedParameter.device_leaf`). It gets no gradient as long as the parameter rests on the
# host. After `detach` the parameter is this leaf, and the gradients flow into it.


def make_leaf(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Make a leaf with the shape and dtype of a parameter, and memory for one element."""
    one = torch.empty((), dtype=like.dtype, device=device)
    return one.expand(like.shape).detach().requires_grad_()


def is_in_graph(leaf: torch.Tensor) -> bool:
    """Whether an autograd graph that is alive refers to the leaf."""
    # The Python object is one user. A node that accumulates its gradient is another, and so is
    # each node that has saved the leaf itself.
    return count_tensor_users(leaf) > 1


def become(parameter: torch.Tensor, leaf: torch.Tensor) -> None:
    """Let a parameter be another leaf; the Python object stays the same. See [Note: leaves].

    Gradients that graphs still accumulate in the parameter's former leaf go to the parameter.

    Args:
        parameter: a parameter without a gradient.
        leaf: has the parameter's values, on the same device or another. It refers to the
            parameter's former tensor afterwards.
    """
    leaf.requires_grad_(parameter.requires_grad)
    set_version(leaf, parameter._version)
    hooks, after = _hooks_of(parameter)
    # Autocast refers weakly to the parameter whose cast it keeps for the block that runs.
    torch.clear_autocast_cache()
    exchange_tensors(parameter, leaf)
    _set_hooks(leaf, {}, {0: functools.partial(_pass_on, parameter)})
    _set_hooks(parameter, hooks, after)
    if count_tensor_users(leaf) <= 2:  # no node has saved it
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


# ---- Offloaded parameters, and the device parameters that replace them while their module runs
#
# [Note: a parameter never moves] From offload to detach, the `nn.Parameter` is a tensor on the
# host. While a module that uses it runs, the module holds a device parameter in its place: a
# tensor on the device, which autograd treats as computed from the parameter. (Moving the
# parameter itself to the device and back would disconnect it from graphs: when a leaf changes its
# device, autograd replaces the node that accumulates its gradient, so `torch.autograd.grad` and
# `backward(inputs=...)` would not find the leaf in the graph.)
#
# [Note: values stay where the program puts them] A program may give a parameter other memory
# (`parameter.data = average`), refer to the memory that it had (`old = parameter.data`), and put it
# back later. Both then belong to the program: it changes the one and sees it in the other. So the
# values of a parameter are always those in the memory that it has now (`find_values`), and neither
# that memory nor the parameter's part of its group's memory is written by anybody else. A layer
# reads its weights from wherever they are. They move back into the group's memory, from which one
# copy brings them all, when nobody else refers to either (`AbstractWeights._adopt_all`).

#
# [Note: masters] With `WeightPolicy(param_dtype=torch.bfloat16)`, matrices and kernels have fewer
# bytes on the device than on the host, where the optimizer steps on their masters. A second slot of
# the group has the values as they are on the device, one after the other: the copy to the device
# reads it. It is filled from the masters before the first copy of each forward, because a fused
# step raises no version, and whenever a version shows a change. Gradients are cast on the device,
# as autocast does, and arrive on the host in the dtype of the masters. No copy reads the slot when
# it is filled: a forward and a backward return when their copies have ended, and what a copy reads
# that nobody waits for is not used.

Place = tuple[weakref.ref[nn.Module], str, Any]
"""A module, its list or dict that holds a parameter, and the index or key there."""

PARAMETERS = "_parameters"
"""The attribute of `nn.Module` that holds its parameters."""

Conversion = Callable[[torch.Tensor], torch.Tensor]
"""What `module.to` and its kin compute of each parameter."""


_TENSOR: Any = torch.Tensor  # whose attributes a device parameter overrides


class DeviceParameter(torch.Tensor):
    """Replaces a parameter in its modules: a tensor with the same values in a device buffer.

    Operations on it return plain tensors. It is no `nn.Parameter`, because modules that a forward
    constructs around it (tensorly's slices of factorized weights) must not register it as theirs.

    What else a forward finds or leaves on its weight is the parameter's, and lasts as long: its
    gradient, its hooks, whether it is trained, its version, and the attributes that the program
    has given it. Another forward gets another device parameter.

    Attributes:
        kept: the tensor's version when its values last equalled those on the host.
        parameter: what it replaces.
    """

    __torch_function__ = no_torch_function
    kept = 0
    parameter: torch.Tensor

    def replace(self, parameter: torch.Tensor) -> None:
        """Replace a parameter from now on. Nothing has changed this tensor yet."""
        self.parameter = parameter
        # Programs that cache what they compute of a weight ask its version whether it has changed.
        set_version(self, parameter._version)
        self.kept = parameter._version

    def __getattr__(self, name: str) -> Any:
        if name == "parameter":
            raise AttributeError(name)
        return getattr(self.parameter, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "parameter" or hasattr(DeviceParameter, name):
            super().__setattr__(name, value)
        else:
            setattr(self.parameter, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.parameter, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = made = self._plain()
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self._plain()
        return plain.__reduce_ex__(protocol)

    def _plain(self) -> nn.Parameter:
        values = self.detach().clone(memory_format=torch.preserve_format)
        return nn.Parameter(values, self.parameter.requires_grad)

    @property
    def grad(self) -> torch.Tensor | None:
        """The parameter's, where it accumulates: on the host."""
        # The compiler gives a tensor of its own that stands for this one the gradient that it sees.
        return None if compiler_looks() else self.parameter.grad

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        self.parameter.grad = gradient

    @grad.deleter
    def grad(self) -> None:
        del self.parameter.grad

    @property
    def requires_grad(self) -> bool:
        """Whether a graph that uses this tensor leads to the parameter."""
        return bool(_TENSOR.requires_grad.__get__(self))

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> DeviceParameter:
        """Train the parameter from now on, or no more."""
        self.parameter.requires_grad_(requires_grad)
        if requires_grad and not self.requires_grad:
            super().requires_grad_()
            send = functools.partial(_send, self.parameter)
            super().register_post_accumulate_grad_hook(send)  # type: ignore[no-untyped-call]
        return self

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> RemovableHandle:
        """Register a hook of the parameter, which gets the gradient on the device nevertheless."""
        device = self.device

        def call(gradient: torch.Tensor) -> torch.Tensor | None:
            made = hook(gradient.to(device))
            return None if made is None else made.to(gradient.device)

        return self.parameter.register_hook(call)  # type: ignore[no-any-return, no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> RemovableHandle:
        """Register a hook of the parameter."""
        register: Any = self.parameter.register_post_accumulate_grad_hook
        return register(hook)  # type: ignore[no-any-return]

    @staticmethod
    def of(values: torch.Tensor) -> DeviceParameter:
        """Make a device parameter that shares the memory of the given values."""
        made = make_subclass(DeviceParameter, values)
        assert isinstance(made, DeviceParameter)
        made.kept = made._version
        return made

    @staticmethod
    def take(made: torch.Tensor) -> DeviceParameter:
        """Make a tensor that nobody else has a device parameter, with the graph that it has."""
        made.__class__ = DeviceParameter
        assert isinstance(made, DeviceParameter)
        made.kept = made._version
        return made

    @property
    def data(self) -> torch.Tensor:
        """The same as `torch.Tensor.data`, but for the version, which changes of it raise."""
        # Guard data-changes-count: what `data` gives shares the version counter. No version would
        # tell of changes through `data`: they would be lost when the buffer is released.
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self.refer_to(values)
        increment_version(self)

    def refer_to(self, values: torch.Tensor) -> None:
        """Make this tensor object share the memory of the given values."""
        _TENSOR.data.__set__(self, values)

    def let_go(self) -> None:
        """Give up the memory, which views may still refer to. They share the version counter."""
        self.refer_to(self.new_empty(0))

    def counter(self) -> DeviceParameter:
        """A tensor that shares its version counter, and has neither a graph nor memory."""
        shared = DeviceParameter.of(self.detach())
        shared.let_go()
        shared.kept = self.kept
        return shared


def _send(parameter: torch.Tensor, device: torch.Tensor) -> None:
    """Add the gradient of a device parameter, which is a leaf, to its parameter's."""
    gradient = _TENSOR.grad.__get__(device).to(parameter.device)
    _TENSOR.grad.__set__(device, None)
    torch.autograd.backward(parameter, gradient, create_graph=torch.is_grad_enabled())


Mark = tuple[int, tuple[int, tuple[int, ...], torch.Size]]
"""A parameter's version, and where its values are, and in which order."""


@final
class OffloadedParameter:
    """A parameter whose values are on the host, and the device parameter that replaces it.

    Args:
        name: the parameter's name in the model.
        parameter: the object that the model and the optimizer refer to.
        offset_bytes: where its values begin in the memory of its group on the host.
        device_offset_bytes: where they begin in the group's device buffer.
        device_dtype: their dtype there; see [Note: masters].

    Attributes:
        name: as given.
        parameter: as given, until the program installs another one, see `replace_by`.
        offset_bytes, device_offset_bytes, device_dtype: as given.
        shape: the shape of its values.
        stride: the strides of its values, or of a packed copy if they are not dense.
        size_bytes: the size of its values on the host.
        host: its part of its group's memory, where it rests, in a storage of its own.
        values: where its values are, see [Note: values stay where the program puts them].
        loaded: its `mark` when the values in the group's device buffer were read.
        places: where modules hold the parameter: in their parameters, lists and dicts.
        device: what code gets in its place in the forward that runs, see [Note: device parameters].
        former: what code got there before and still holds, see `show_former`.
        move: its last move to the device, while a graph has it; see [Note: gradients on their way].
        device_leaf: what the parameter becomes in `restore_to`, see [Note: leaves]; None as long as
            no graph has it.
        read_by: the backward and the node that read it last as a saved tensor.
        has_left: whether `restore_to` has moved the parameter back to the device.
    """

    # Long: every way in which a program can change or replace a parameter ends here.

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        offset_bytes: int,
        device_offset_bytes: int,
        device_dtype: torch.dtype,
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.offset_bytes = offset_bytes
        self.device_offset_bytes, self.device_dtype = device_offset_bytes, device_dtype
        self.size_bytes = parameter.numel() * parameter.element_size()
        self.shape, self.stride = parameter.shape, _dense_stride(parameter)
        self.host = self.values = parameter.data
        self._place = self._rests_at = _place_of(parameter)
        self.loaded: Mark | None = None
        self.places: list[Place] = []
        self.device: DeviceParameter | None = None
        self.former: list[weakref.ref[DeviceParameter]] = []
        self.move: weakref.ref[Node] | None = None
        self.device_leaf: torch.Tensor | None = None
        self.read_by: tuple[int, int] | None = None
        self.has_left = False

    # ---- memory -------------------------------------------------------------------------------

    def view_of(self, memory: torch.Tensor) -> torch.Tensor:
        """View its values in memory that is laid out as its group's device buffer.

        The view shares the memory's storage.
        """
        dtype = self.device_dtype
        view = torch.empty(0, dtype=dtype, device=memory.device)
        offset = self.device_offset_bytes // dtype.itemsize
        return view.set_(memory.untyped_storage(), offset, self.shape, self.stride)

    def own_view_of(self, memory: torch.Tensor) -> torch.Tensor:
        """View its part of host memory as a tensor like the parameter, in a storage of its own.

        Because of the separate storage, `torch.save` writes this parameter and not its group.
        """
        part = memory.numpy()[self.offset_bytes : self.offset_bytes + self.size_bytes]
        flat = torch.from_numpy(part).view(self.host.dtype)
        return flat.as_strided(self.shape, self.stride).data  # without a base, which counts as user

    def rest_in(self, memory: torch.Tensor) -> None:
        """Move the values to the group's host memory, and the gradient to the host."""
        self.host = self.own_view_of(memory)
        parameter = self.parameter
        if is_in_graph(parameter) and parameter.device.type != "cpu":
            # A graph from before may have saved the parameter itself, and finds it in its former
            # leaf, on the device.
            gradient, parameter.grad = parameter.grad, None
            leaf = make_leaf(parameter, parameter.device)
            leaf.data = parameter.data
            become(parameter, leaf)
            parameter.grad = gradient
        self._rest()

    def _rest(self) -> None:
        parameter = self.parameter
        gradient, parameter.grad = parameter.grad, None
        self.host.copy_(parameter.data)
        parameter.data = self.values = self.host
        self._place = self._rests_at = _place_of(parameter)
        if gradient is not None:
            parameter.grad = gradient.to(self.host.device)

    def lose_memory(self) -> None:
        """Move the parameter to the meta device, because this process has not got its memory."""
        self.parameter.grad = None
        become(self.parameter, torch.empty_like(self.parameter, device="meta").detach())
        self.host = self.values = self.parameter.data
        self._place = _place_of(self.parameter)

    def restore_to(self, home: torch.device, *, stays: bool = False) -> None:
        """Move the parameter and its gradient back to the device.

        Args:
            home: the device.
            stays: leave the values where they are, because others refer to that memory, too.
        """
        parameter = self.parameter
        gradient, parameter.grad = parameter.grad, None
        if not stays:
            values = parameter.data.to(home, copy=parameter.device.type == "cpu")
            self._become_leaf(home, values)
        if gradient is not None:
            parameter.grad = gradient.to(home, copy=True)
        self.has_left = True

    def forget_memory(self) -> None:
        """Let go of the memory that graphs could still need after `restore_to`; none is alive."""
        self.host = self.values = torch.empty(0, dtype=self.host.dtype)
        self.loaded = None

    def _become_leaf(self, home: torch.device, values: torch.Tensor) -> None:
        """Make the parameter a leaf on the device that has these values."""
        parameter, leaf = self.parameter, self.device_leaf
        if leaf is None and home.type != "cpu" and is_in_graph(parameter):
            leaf = make_leaf(parameter, home)  # a graph uses it outside the model's forward only
        if leaf is None or not (is_in_graph(leaf) or is_in_graph(parameter)):
            parameter.data = values
            return
        leaf.data = values
        # Guard leaf-of-live-graphs: after detach, a parameter is the leaf that graphs from before
        # have on the device. They would accumulate their gradients in a leaf that is no parameter.
        become(parameter, leaf)

    def leaf_on(self, device: torch.device) -> torch.Tensor:
        """The leaf on the device that a graph gets beside the parameter; see [Note: leaves]."""
        if self.device_leaf is None:
            self.device_leaf = make_leaf(self.parameter, device)
        return self.device_leaf

    # ---- what the program puts in its place ---------------------------------------------------

    def find_values(self) -> torch.Tensor:
        """Find where the values are now; see [Note: values stay where the program puts them].

        Returns:
            `host`, or a tensor in the memory that the program has given the parameter
            (`parameter.data = ...`, `model.to(...)`), as long as it is the same one each time.
            After `restore_to`, where graphs from before find them.

        Raises:
            PolicyError: the values have another shape or dtype.
        """
        # Guard values-where-they-are: each use of a weight finds out where its values are. It would
        # use those in the memory that the parameter had before the program gave it other memory.
        if _place_of(self.parameter) != self._place and not self.has_left:
            given = self.parameter.data
            if not self._fits(given):
                raise self._misfit(given)
            self._place, self.stride = _place_of(given), _dense_stride(given)
            self.values = self.host if self._place == self._rests_at else given
        return self.values

    def mark(self) -> Mark:
        """What changes when the program writes the values or puts them elsewhere."""
        place = self._place if self.has_left else _place_of(self.parameter)
        return self.parameter._version, place

    @property
    def is_on_device(self) -> bool:
        """Whether the program has given it memory on the device. It is used where it is, then."""
        return self.values.device != self.host.device

    @property
    def is_at_rest(self) -> bool:
        """Whether the parameter's values are in its part of its group's memory."""
        return _place_of(self.parameter) == self._rests_at

    def can_move_in(self) -> bool:
        """Whether the values, which are elsewhere, may move to `host`: nobody else refers to it.

        Who refers to the memory that they are in is not looked at.
        """
        if self.host.data_ptr() != self._rests_at[0]:
            return False  # torch has moved `host` to memory that it shares with another process
        # A leaf that moves to another device would leave the graphs that it is in.
        stays = self.is_on_device and is_in_graph(self.parameter)
        return (
            not stays and count_storage_users(self.host) == ALONE and not is_foreign(self.parameter)
        )

    def move_in(self) -> None:
        """Move the values, which are elsewhere, to `host`; see `can_move_in`."""
        self.host = self.host.as_strided(self.shape, self.stride).data
        self._rest()

    def find_given(self) -> list[nn.Parameter]:
        """Other parameters that the program has installed in its places."""
        held = [held_at(container, key) for _, container, key in self._containers()]
        given = {id(p): p for p in held if isinstance(p, nn.Parameter) and p is not self.parameter}
        return list(given.values())

    def replace_by(self, given: nn.Parameter) -> None:
        """Stand for another parameter in its place, whose values stay where they are.

        Raises:
            PolicyError: the parameter has another shape or dtype, or the modules that share the
                old one hold different parameters now.
        """
        if len(self.find_given()) > 1 or any(
            held_at(container, key) is self.parameter
            for name, container, key in self._containers()
            if name == PARAMETERS
        ):
            raise PolicyError(
                f"{self.name} is offloaded and shared by several modules, which hold different "
                f"parameters now; call detach() on the offload's handle first, change the model, "
                f"and offload it again"
            )
        if not self._fits(given.data):
            raise self._misfit(given.data)
        self.parameter = given  # the old one, which is no longer offloaded, keeps its memory
        self.device_leaf = None

    def _misfit(self, given: torch.Tensor) -> PolicyError:
        return PolicyError(
            f"{self.name} is offloaded as {self.host.dtype} of shape {tuple(self.shape)}, and "
            f"was given {given.dtype} of shape {tuple(given.shape)}; call detach() on the "
            f"offload's handle first, change the model, and offload it again"
        )

    def _fits(self, values: torch.Tensor) -> bool:
        return values.shape == self.shape and values.dtype == self.host.dtype

    # ---- the device parameter -----------------------------------------------------------------

    def install(self) -> None:
        """Replace the parameter in its modules by its device parameter."""
        for _, container, key in self._containers():
            if container is not None and held_at(container, key) is self.parameter:
                container[key] = self.device

    def put_back(self) -> None:
        """Put the parameter back into its modules. Code may still refer to the device parameter."""
        for _, container, key in self._containers():
            if isinstance(held_at(container, key), DeviceParameter):
                container[key] = self.parameter

    def is_changed(self) -> bool:
        """Whether the device parameter was modified."""
        return self.device is not None and self.device._version != self.device.kept

    def keep_change(self, buffer: torch.Tensor | None) -> None:
        """Write the modified device parameter back to the host.

        Args:
            buffer: the group's device buffer, which is updated, too; None while there is none.

        Raises:
            PolicyError: the program has given it values of another shape or dtype, or its values on
                the host have more digits.
        """
        assert self.device is not None
        self.device.kept = self.device._version
        values = self.device.detach()
        if self.device_dtype != self.host.dtype:
            raise PolicyError(
                f"{self.name} was changed on the device, where it is {self.device_dtype}, and its "
                f"values on the host are {self.host.dtype}; the change is lost. Change it outside "
                f"of the forward, or leave WeightPolicy(param_dtype=...) out"
            )
        if not self._fits(values):
            raise self._misfit(values)
        kept = self.parameter.detach()
        kept.copy_(values)  # which raises the version of the parameter for all that was saved
        if buffer is not None:
            present = self.view_of(buffer)
            if _place_of(present) != _place_of(values):
                present.copy_(kept)
                self.device.refer_to(present)
            self.loaded = self.mark()

    def is_held(self) -> bool:
        """Whether the program, a module, or a graph refers to the device parameter, too."""
        assert self.device is not None
        return _num_holders(self) > _ALONE or count_tensor_users(self.device) > 1

    def let_go(self) -> DeviceParameter:
        """Forget the device parameter, and free its memory unless something else refers to it."""
        is_held = self.is_held()
        device = self.device
        assert device is not None
        if is_held:
            self.former.append(weakref.ref(device))
        else:
            device.let_go()
        self.device = None
        return device

    def show_former(self, values: torch.Tensor) -> Iterator[DeviceParameter]:
        """Give the values on the device to the device parameters of forwards before this one.

        A forward may keep what it has read, such as a list of its weights that it makes when it
        runs for the first time. It would compute with the values of then for ever.

        Yields:
            Each that is still held.
        """
        self.former = [each for each in self.former if each() is not None]
        for each in self.former:
            former = each()
            if former is not None:
                former.refer_to(values)
                former.kept = former._version
                yield former

    def _containers(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield what is in each place now, which the model may have replaced, and the key there."""
        for known, name, key in self.places:
            module = known()
            if module is not None:
                yield name, vars(module).get(name), key


def held_at(container: Any, key: Any) -> Any:
    """The entry of a module's list or dict, without substitution; None if there is none."""
    if isinstance(container, dict):
        return dict.get(container, key)
    return container[key] if isinstance(container, list) and key < len(container) else None


def _place_of(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], torch.Size]:
    """Where a tensor's values are, and in which order."""
    return tensor.data_ptr(), tensor.stride(), tensor.shape


def _dense_stride(parameter: torch.Tensor) -> tuple[int, ...]:
    """The parameter's strides if they are dense, else the strides of a packed copy."""
    return torch.empty_like(parameter, device="meta").stride()


def _num_holders(member: Any) -> int:
    return sys.getrefcount(member.device)


_ALONE = _num_holders(SimpleNamespace(device=DeviceParameter.of(torch.empty(0))))
"""The reference count of a device parameter that only its offloaded parameter refers to."""


# ---- Groups of weights that are copied together, with the memory of their gradients ----

_ALIGNMENT_BYTES = 512
_NUM_SAMPLES = 8  # of each parameter: an update of all of its values changes one of them


@final
class WeightGroup(Record):
    """The parameters of one layer, which one copy brings to the device.

    The group is a record (`ebbtide.runtime.record`) in the state RELOADED while it has a device
    buffer, and STORED otherwise.

    Args:
        number: the position of the group in the order of the model's layers.
        name: the name of the layer.
        parameters: the parameters and their names; their values move to a slot of the store.
        store: provides the slot, and memory for gradients.
        param_dtype: see `WeightPolicy`.

    Attributes:
        number: as given.
        members: the parameters of the group.
        resting: the slot in which the values rest.
        resting_bytes: its size.
        slots: `resting`, and with masters the slot that copies to the device read, see
            [Note: masters].
        has_masters: whether parameters have another dtype on the device.
        is_stale: whether the program may have changed masters since that slot was filled.
        blocks: slots of the size of `resting`, each with room for one gradient of each parameter.
        used_elsewhere: whether kernels on other streams than `home` use the buffer.
        open: how many running modules use the group.

    Raises:
        StoreFullError: the store has no room for the group.
    """

    kind = WEIGHT

    def __init__(
        self,
        number: int,
        name: str,
        parameters: Sequence[tuple[str, nn.Parameter]],
        store: AbstractStore,
        param_dtype: torch.dtype | None = None,
    ) -> None:
        self.number = number
        self.members: list[OffloadedParameter] = []
        size_bytes = self.resting_bytes = 0
        for parameter_name, parameter in parameters:
            dtype = _device_dtype(parameter, param_dtype)
            place = self.resting_bytes, size_bytes
            self.members.append(OffloadedParameter(parameter_name, parameter, *place, dtype))
            self.resting_bytes += _aligned(self.members[-1].size_bytes)
            size_bytes += _aligned(parameter.numel() * dtype.itemsize)
        super().__init__(Layer(number, name), 0, size_bytes, STORED)
        self.slot = self.resting = store.allocate_resting(self.resting_bytes)
        self.slots = [self.resting]
        self.has_masters = any(m.device_dtype != m.parameter.dtype for m in self.members)
        for member in self.members:
            member.rest_in(self.resting.tensor)
        self.blocks: list[RestingSlot] = []
        self._store = store
        self._reserved = False
        # The last gradient that was given this memory, by offset and block number.
        self._given: dict[tuple[int, int], StorageWeakRef] = {}
        self.used_elsewhere = False
        self.open = 0
        self.is_stale = True
        self._samples = b""  # of the values that the buffer was filled with

    def start_anew(self, store: AbstractStore) -> None:
        """Forget what an interrupt may have left half changed. The values are in the slot.

        Args:
            store: has taken over the slots.
        """
        self._store = store
        self.state, self.slot, self.is_stale = STORED, self.slots[-1], True
        self.source = self.offloaded = self.buffer = self.ready = None
        self.awaited = self.buffer_stays = self.used_elsewhere = False
        self.open = self.unread = 0

    def note_loaded(self) -> None:
        """Note which values the group's new buffer gets: those that the parameters have now.

        Raises:
            PolicyError: the program has given a parameter another shape or dtype.
        """
        for member in self.members:
            values = member.find_values()
            is_old = self.is_stale or member.loaded != member.mark()
            if self.has_masters and is_old and not member.is_on_device:
                member.view_of(self.slots[-1].tensor).copy_(values)
            member.loaded = member.mark()
        self.is_stale = False
        self.note_samples()

    def is_outdated(self) -> bool:
        """Whether the program has changed or assigned values since the buffer was filled."""
        if self._read_samples() != self._samples:
            self.is_stale = True
            return True
        return any(member.loaded != member.mark() for member in self.members)

    def note_samples(self) -> None:
        """Note that the buffer has the values that rest now.

        No version tells of what a program writes through ``parameter.data``, so some values of each
        parameter are compared. A forward that updates a momentum encoder in this way, and then
        calls it, would compute with what was prefetched before.
        """
        self._samples = self._read_samples()

    def _read_samples(self) -> bytes:
        words = self.resting.tensor.numpy().view("int64")
        return words[self._sampled].tobytes()

    @functools.cached_property
    def _sampled(self) -> list[int]:
        """Where the samples are, in words of 8 bytes."""
        return [
            (member.offset_bytes + member.size_bytes * part // _NUM_SAMPLES) // 8
            for member in self.members
            if member.size_bytes
            for part in range(_NUM_SAMPLES)
        ]

    def forget_memory(self) -> None:
        """Let go of the memory that its parameters had; they are back on the device."""
        for member in self.members:
            member.forget_memory()

    # ---- gradients ----------------------------------------------------------------------------

    def reserve(self) -> None:
        """Have the store set room for one block aside if a parameter requires a gradient.

        With masters, also allocate what copies to the device read.

        Raises:
            StoreFullError: the store has no room.
        """
        if self.has_masters:
            self.slot = self._store.allocate_resting(self.size_bytes)
            self.slots.append(self.slot)
        if any(member.parameter.requires_grad for member in self.members):
            self._store.reserve(self.resting_bytes)
            self._reserved = True

    def allocate(self, member: OffloadedParameter) -> tuple[torch.Tensor, RestingSlot]:
        """Find memory for one gradient that no earlier gradient uses any more.

        Returns:
            The gradient, in a storage of its own, and the block that contains it.

        Raises:
            StoreFullError: the program keeps earlier gradients, and the store has no room for more.
        """
        number = 0
        while True:
            if number == len(self.blocks):
                block = self._store.allocate_resting(self.resting_bytes, reserved=self._reserved)
                self._reserved = False
                self.blocks.append(block)
            given = self._given.get((member.offset_bytes, number))
            # Guard gradient-memory-reuse: a gradient's memory is reused only when nobody refers to
            # the gradient. The sum accumulated so far, or a gradient that the user keeps, would be
            # overwritten by the next gradient.
            if given is None or given.expired():  # type: ignore[no-untyped-call]
                break
            number += 1
        block = self.blocks[number]
        gradient = member.own_view_of(block.tensor)
        reference = StorageWeakRef(gradient.untyped_storage())  # type: ignore[no-untyped-call]
        self._given[member.offset_bytes, number] = reference
        return gradient, block

    def holds(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient is in one of the blocks."""
        address = gradient.data_ptr()
        begins = (block.tensor.data_ptr() for block in self.blocks)
        return any(begin <= address < begin + self.resting_bytes for begin in begins)

    def drop_blocks(self) -> None:
        """Return the blocks to the store. The memory of a referenced gradient stays mapped."""
        if self._reserved:
            self._store.stop_reserving(self.resting_bytes)
            self._reserved = False
        while self.blocks:
            self._store.drop(self.blocks.pop())

    def member_at(self, offset_bytes: int) -> OffloadedParameter:
        """The parameter whose values include this offset of the group's device buffer."""
        for member in reversed(self.members):
            if member.device_offset_bytes <= offset_bytes and member.size_bytes:
                return member
        return self.members[0]


def _device_dtype(parameter: torch.Tensor, param_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that a parameter has on the device; see [Note: masters]."""
    if param_dtype is None or parameter.dim() < 2 or parameter.dtype == torch.float64:
        return parameter.dtype  # autocast leaves the last of them alone, too
    return param_dtype if parameter.is_floating_point() else parameter.dtype


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


# ---- The places where a model holds its parameters, and conversions of them ----


def moves_to(convert: Conversion, like: torch.Tensor) -> torch.device | None:
    """Return where a conversion of torch's own brings a tensor; None if it may change more.

    Args:
        convert: the conversion. One that the program has written may change values, too.
        like: a tensor with the dtype and the number of dimensions of what it converts.
    """
    if not str(getattr(convert, "__module__", "")).startswith("torch."):
        return None
    # No element, and so no memory, but strides, which a `memory_format` changes.
    given = torch.empty((0, 2, 2, 2, 2)[: like.dim()] or (0,), dtype=like.dtype, device="cpu")
    made = convert(given)
    same = (made.dtype, made.stride()) == (given.dtype, given.stride())
    return made.device if same else None


def find_places(model: nn.Module, members: Iterable[OffloadedParameter]) -> None:
    """Add to each parameter the places that hold it: its modules' parameters, lists and dicts.

    Lists matter: `nn.LSTM` computes with a list of its weights, and a head can hold an embedding's
    weight in a list so that it does not register it as its own parameter.
    """
    sought = {id(member.parameter): member for member in members}
    for module in model.modules():
        for place in _places_in(module):
            member = sought.get(id(held_at(vars(module)[place[1]], place[2])))
            if member is not None:
                member.places.append(place)


def _places_in(module: nn.Module) -> Iterator[Place]:
    known = weakref.ref(module)
    for name, value in vars(module).items():
        if isinstance(value, list):
            yield from ((known, name, index) for index in range(len(value)))
        elif isinstance(value, dict) and (name == PARAMETERS or not name.startswith("_")):
            yield from ((known, name, key) for key in value)
