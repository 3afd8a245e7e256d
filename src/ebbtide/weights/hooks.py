"""What offloaded weights are on an accelerator and on a CPU alike, and those of a CPU, in files.

First come the units of a model whose weights are copied together. `AbstractWeights` hooks their
modules; `MappedWeights` is the kind for a CPU. The other is in `device_weights.py`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from ebbtide.devices.process import call_weakly, watch_optimizers
from ebbtide.errors import ForkedProcessError, PolicyError, warn_user
from ebbtide.policy import WeightPolicy
from ebbtide.runtime.compiled import register_hooks
from ebbtide.runtime.events import Subject
from ebbtide.runtime.handles import Saved
from ebbtide.runtime.layers import LayerModules, is_script, lists_by_index
from ebbtide.runtime.parameter_index import find_sharded_parameters
from ebbtide.runtime.saved_tensors import refuse_moving_weights
from ebbtide.runtime.stats import watch_nodes
from ebbtide.runtime.torch_internals import (
    find_data_parallel,
    has_hook,
    in_backward,
    is_written_down,
    tree_leaves,
)
from ebbtide.runtime.transfers import Transfers
from ebbtide.stores.mapped_memory import FileSlot, page_in, page_out
from ebbtide.stores.measured_memory import return_freed_memory
from ebbtide.stores.store import AbstractStore
from ebbtide.units import few
from ebbtide.weights.gradients import bring_scales
from ebbtide.weights.optimizer_state import MappedOptimizerState
from ebbtide.weights.parameters import (
    DeviceParameter,
    OffloadedParameter,
    WeightGroup,
    find_places,
    find_shared,
    is_foreign,
)

Unit = tuple[list[nn.Module], str, list[tuple[str, nn.Parameter]]]
"""Modules whose call needs the parameters, the unit's name, and the named parameters."""


def find_units(layers: LayerModules) -> list[Unit]:
    """Find what is copied together: a layer, or the blocks of one place in its lists."""
    units: list[Unit] = []
    for name, module in zip(layers.names, layers.modules, strict=True):
        lists = lists_by_index(module)
        inner: set[int] = set()
        for index in range(len(next(iter(lists.values()))) if lists else 0):
            elements = [(list_name, blocks[index]) for list_name, blocks in lists.items()]
            named = [
                (f"{name}.{list_name}.{index}.{parameter_name}", parameter)
                for list_name, element in elements
                for parameter_name, parameter in element.named_parameters()
            ]
            inner |= {id(parameter) for _, parameter in named}
            modules = [element for _, element in elements]
            units.append((modules, f"{name}.{index}", named))
        rest = [(f"{name}.{n}", p) for n, p in module.named_parameters() if id(p) not in inner]
        if rest:
            units.append(([module], name, rest))
    return units


def refuse_lazy(units: Sequence[Unit]) -> None:
    """Check that all parameters have shapes.

    Raises:
        PolicyError: one of them is lazy.
    """
    for *_, named in units:
        for name, parameter in named:
            if is_lazy(parameter):
                raise PolicyError(
                    f"{name} is lazy and has no shape yet, so its bytes cannot be moved; run one "
                    f"forward of the model before ebbtide.offload(model, weights=...)"
                )


def choose_units(units: Sequence[Unit], policy: WeightPolicy) -> list[Unit]:
    """Return the units that a policy selects.

    Raises:
        PolicyError: the policy counts more layers than there are.
    """
    for field, count in (("num_layers", policy.num_layers), ("keep_last", policy.keep_last)):
        if count is not None and count > len(units):
            names = [name for _, name, _ in units]
            raise PolicyError(
                f"WeightPolicy({field}={count}) is out of range: the model has {len(units)} layers "
                f"with weights ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}); name "
                f"others by layers=[...], or leave {field} out"
            )
    least_bytes = max(int(policy.min_bytes), 1)
    chosen = units[: len(units) - policy.keep_last][: policy.num_layers]
    return [unit for unit in chosen if _size_bytes(unit) >= least_bytes]


def _size_bytes(unit: Unit) -> int:
    plain = (p for _, p in unit[2] if p.layout is torch.strided and not p.is_nested)
    return sum(parameter.numel() * parameter.element_size() for parameter in plain)


def check_units(units: Sequence[Unit]) -> None:
    """Check that the bytes of all parameters can rest side by side.

    Raises:
        PolicyError: those of one cannot.
    """
    for *_, named in units:
        for name, parameter in named:
            is_dense = parameter.layout is torch.strided and not parameter.is_nested
            if type(parameter) is not nn.Parameter or not is_dense:
                raise PolicyError(
                    f"{name} is no plain parameter ({type(parameter).__name__}, "
                    f"{parameter.layout}), and the weights of a layer rest side by side as plain "
                    f"bytes; leave that layer out: name the others, layers=[...]"
                )
            if parameter.is_inference():
                raise PolicyError(
                    f"{name} was made under torch.inference_mode and can never be trained; make "
                    f"the model outside of it"
                )


def leave_first(units: Sequence[Unit], model: nn.Module) -> list[Unit]:
    """Leave out the model's first parameter if its layer is one module, such as an embedding.

    It stays on the device. Programs ask it for the device of the model, as ``model.device`` of
    Transformers and Diffusers does, and get the device that the model computes on.

    In a model that begins with a block, that parameter rests. See `_moved`.
    """
    first = next(model.parameters())
    alone = any(
        not any(module.children()) and any(p is first for _, p in named)
        for modules, _, named in units
        for module in modules
    )
    return _without(units, {id(first)} if alone else ())


def leave_scripted(units: Sequence[Unit], model: nn.Module) -> list[Unit]:
    """Leave out parameters of script modules: the code of those refers to the tensors themselves.

    No other tensor can stand for such a parameter while the module runs.
    """
    scripts = filter(is_script, model.modules())
    return _without(units, {id(parameter) for each in scripts for parameter in each.parameters()})


def leave_shared(units: Sequence[Unit]) -> list[Unit]:
    """Leave out parameters whose memory something else refers to, and say so.

    Raises:
        PolicyError: there are no others.
    """
    named = {id(p): (name, p) for *_, own in units for name, p in own}
    parameters = [p for _, p in named.values()]
    shared = {id(parameters[position]) for position in find_shared(parameters, collects=True)}
    shared |= {id(p) for p in parameters if is_foreign(p)}
    if not shared:
        return list(units)
    said = (
        f"{few([name for key, (name, _) in named.items() if key in shared])} share their memory "
        f"with other tensors or processes, or with NumPy, and would not share it on the host any "
        f"more"
    )
    left = _without(units, shared)
    advice = (
        "drop what shares it, such as a state_dict, a flat vector or the graph of a loss, or give "
        "each parameter memory of its own (parameter.data = parameter.data.clone()) before "
        "ebbtide.offload"
    )
    if not left:
        raise PolicyError(f"no weights can be offloaded: {said}; {advice}")
    warn_user("shared-weights", f"{said}, so these weights stay where they are; {advice}")
    return left


def _without(units: Sequence[Unit], left_out: Collection[int]) -> list[Unit]:
    """Units without these parameters, by identity. A unit that has no others goes."""
    smaller = [
        (modules, name, [(each, p) for each, p in named if id(p) not in left_out])
        for modules, name, named in units
    ]
    return [unit for unit in smaller if unit[2]]


def _moved(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of a module with those on its device that were made on the host.

    A program that asks a parameter at rest for the device of the model, as with
    ``next(model.parameters()).device``, makes its inputs on the host. Without an offload it would
    have made them on the device. Numbers beside a tensor on the device stay where they are, and so
    do indices and lengths, which some operators want on the host. None: nothing is to be moved.
    """
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    on_host = [each for each in tensors if each.device.type == "cpu"]
    if device.type == "cpu" or not on_host:
        return None
    some = len(on_host) < len(tensors)

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        stays = some and (not value.dim() or not (value.is_floating_point() or value.is_complex()))
        return value if stays else value.to(device)

    return tuple(map(move, args)), {name: move(each) for name, each in kwargs.items()}


# ---- The offloaded weights of a model, on an accelerator and on a CPU alike ----


class AbstractWeights(ABC):
    """The offloaded weights of some layers of a model. Hooks tell it which modules and passes run.

    It is also a container: of the parameters that rest.

    Args:
        model: the model whose weights are offloaded.
        layers: its layers.
        policy: selects the layers, and sets how their weights are copied.
        transfers: the model's transfers. The weights are copied to their device.
        origin: the device that the parameters go back to if they cannot rest; None: the same.

    Attributes:
        groups: the groups that are copied together, in the order of the model's layers.
        peak_groups: the most groups that were on the device at once; 0 if groups are not copied.

    Raises:
        PolicyError: a parameter cannot be offloaded; nothing has been moved.
        StoreFullError: the store has no room for the weights; nothing has been moved.
    """

    # Long: whatever a model does with a module that has weights at rest arrives here.

    plain_types = frozenset({DeviceParameter})
    peak_groups = 0

    def __init__(
        self,
        model: nn.Module,
        layers: LayerModules,
        policy: WeightPolicy,
        transfers: Transfers,
        origin: torch.device | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self._device, store = transfers.device, transfers.store
        self._home = self._device.torch_device
        self._transfers, self._double_buffering = transfers, policy.double_buffering
        found = find_units(layers)
        refuse_lazy(found)
        units = choose_units(found, policy)
        _refuse_sharded(model, (each for *_, named in units for each in named))
        self._refuse_data_parallel(model)
        check_units(units)
        if self._home.type != "cpu":
            units = leave_scripted(leave_first(units, model), model)
        if not units:
            raise PolicyError(
                f"{policy} selects none of the model's {len(found)} layers with weights; on an "
                f"accelerator the model's first parameter stays, if it is alone in its layer, and "
                f"so do those of script modules. "
                f"Leave weights out to offload none, change num_layers, keep_last or min_bytes, or "
                f"name layers, layers=[model.encoder, ...]"
            )
        units = leave_shared(units)
        self.groups: list[WeightGroup] = []
        try:
            used = _make_groups(self.groups, units, store, policy.param_dtype)
            for group in self.groups:
                group.reserve()
        except BaseException:
            for _, member in self.members():
                member.restore_to(origin or self._home)
            for group in self.groups:
                group.drop_blocks()
                for slot in group.slots:
                    store.drop(slot)
            raise
        self._found = {id(m.parameter): (group, m) for group, m in self.members()}
        find_places(model, (member for _, member in self.members()))
        holds: dict[nn.Module, dict[WeightGroup, None]] = {}
        for group, member in self.members():
            for known, *_ in member.places:
                module = known()
                assert module is not None, "it is a part of the model"
                holds.setdefault(module, {})[group] = None
        # See [Note: what a model owns].
        self._uses = [(weakref.ref(module), own) for module, own in used]
        self._uses += [(weakref.ref(module), own) for module, own in _find_others(holds, used)]
        self._state: MappedOptimizerState | None = None
        if any(group.resting.is_mapped for group in self.groups):
            most_bytes = 2 * max(group.resting_bytes for group in self.groups)
            self._state = MappedOptimizerState(store, call_weakly(self.find), most_bytes)
        self._use(transfers)
        self._end_hooks = [watch_optimizers(before=self.before_step)]
        for used_module, needed in self._used:
            begin = functools.partial(self._begin, needed)
            end = functools.partial(self._end, needed)
            self._end_hooks += [each.remove for each in register_hooks(begin, end, used_module)]

    # ---- what differs on an accelerator and on a CPU ------------------------------------------

    def _use(self, transfers: Transfers) -> None:  # noqa: B027
        """Work with these transfers from now on. No forward or backward runs, and no copy."""

    @abstractmethod
    def _begin_forward(self) -> None:
        """Note that a forward pass of the model begins. It uses the current values on the host.

        Raises:
            PolicyError: the program has given a parameter another shape or dtype.
        """

    def end_forward(self) -> None:  # noqa: B027
        """Note that the model's forward pass has ended, normally or by an exception."""

    @abstractmethod
    def enter(self, group: WeightGroup) -> None:
        """Note that a module which uses this group begins to run."""

    def leave(self, group: WeightGroup) -> None:  # noqa: B027
        """Note that a module which uses this group has finished."""

    @abstractmethod
    def begin_backward(self, groups: Sequence[WeightGroup]) -> None:
        """Note that the backward pass of a module begins.

        Args:
            groups: the groups that the module uses.
        """

    def pack(self, tensor: torch.Tensor, whole: torch.Tensor) -> Saved | None:  # noqa: ARG002
        """Replace a saved tensor by a handle if it is a view or a cast of an offloaded weight.

        Args:
            tensor: the tensor that autograd saves.
            whole: the base of `tensor` if that is a view, else `tensor` itself.

        Returns:
            The handle; None if the tensor belongs to no offloaded weight.
        """
        return None

    @abstractmethod
    def _close(self) -> None:
        """Free all memory of the weights. The parameters must be back on the model's device."""

    # ---- the parameters -----------------------------------------------------------------------

    def members(self) -> Iterator[tuple[WeightGroup, OffloadedParameter]]:
        """All groups and offloaded parameters, in the order of the model's layers."""
        return ((group, member) for group in self.groups for member in group.members)

    def find(self, parameter: object) -> tuple[WeightGroup, OffloadedParameter] | None:
        """The group and the offloaded parameter of this `nn.Parameter`; None if not offloaded."""
        return self._found.get(id(parameter))

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._found

    def at_rest(self) -> frozenset[int]:
        return frozenset(self._found)

    def _adopt(
        self,
        group: WeightGroup,
        member: OffloadedParameter,
        strangers: Container[int] | None = None,
    ) -> None:
        """Adopt a new parameter that a module holds now in the place of an offloaded one.

        A new parameter on the model's device is not adopted yet, because it works as it is and
        `torch.func.functional_call` installs such parameters for one call only. A new parameter on
        the host cannot be computed with, so it is adopted.

        Args:
            group: the group of the offloaded parameter.
            member: the offloaded parameter.
            strangers: the new parameters that are there to stay, by `id`; None: those on the host.

        Raises:
            PolicyError: the new parameter has another shape or dtype, or only some of the modules
                that share the parameter got the new one.
        """
        for given in member.find_given():
            on_host = given.device.type != self._home.type
            if on_host if strangers is None else id(given) in strangers:
                before = id(member.parameter)
                member.replace_by(given)
                del self._found[before]
                self._found[id(given)] = group, member

    def _adopt_all(self, strangers: Container[int] | None = None) -> None:
        """Find values and parameters that the program has assigned since the last forward.

        Args:
            strangers: see `_adopt`. What does not fit is not offloaded; it works where it is.

        Raises:
            PolicyError: see `_adopt`, or new values have another shape or dtype; only without
                ``strangers``.
        """
        elsewhere = []
        for group, member in self.members():
            with contextlib.suppress(*() if strangers is None else (PolicyError,)):
                self._adopt(group, member, strangers)
                if member.find_values() is not member.host:
                    elsewhere.append((group, member))
        # Guard memory-of-others: values move only if nothing else refers to their memory or to
        # where they rest. A program that holds the one would not see changes any more, and what it
        # holds of the other would be overwritten.
        members = [m for group, m in elsewhere if not group.handles and m.can_move_in()]
        shared = find_shared([m.parameter for m in members], aliases=1)
        for position, member in enumerate(members):
            if position not in shared:
                member.move_in()

    def _find_staying(self) -> set[OffloadedParameter]:
        """Find parameters in memory that others refer to, which are to stay there after detach.

        It is either memory that the program has given them, or that in which they rest. On an
        accelerator, the host's memory cannot remain that of a parameter.
        """
        if not self._device.computes_on_host:
            return set()
        members = [m for _, m in self.members() if m.is_at_rest]
        shared = find_shared([m.parameter for m in members], aliases=1, collects=True)
        return {m for _, m in self.members() if not m.is_at_rest} | {members[n] for n in shared}

    # ---- modules and optimizers ---------------------------------------------------------------

    @property
    def _used(self) -> Iterator[tuple[nn.Module, Sequence[WeightGroup]]]:
        """The modules that use offloaded weights, and the groups that each needs."""
        for known, groups in self._uses:
            module = known()
            if module is not None:
                yield module, groups

    def check_process(self) -> None:
        """Check that this process offloaded the weights.

        Raises:
            ForkedProcessError: this process was forked from the one that did.
        """
        if self._transfers.gate.is_inherited:
            raise ForkedProcessError(
                "the weights of this model rest in memory or files of the process that this one "
                "was forked from. Offload only after the processes have been forked, or use the "
                "method 'spawn'. Of weights in files, detach() on the offload's handle makes a "
                "copy for this process, which can be offloaded again"
            )

    def _begin(
        self, groups: Sequence[WeightGroup], values: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Note that a module begins. Returns its arguments if they had to be moved."""
        self.check_process()
        for group in groups:
            self.enter(group)
        return _moved(*values, self._device.torch_device)

    def _end(self, groups: Sequence[WeightGroup], values: Any) -> None:
        """Note that a module has ended, and watch for its backward on its outputs' nodes."""
        for group in groups:
            self.leave(group)
        outputs = [leaf for leaf in tree_leaves(values[-1]) if isinstance(leaf, torch.Tensor)]
        watch_nodes(outputs, lambda _: self.begin_backward(groups))

    @contextlib.contextmanager
    def in_forward(self) -> Iterator[None]:
        """Surround a forward of the model, and note its end even if it raises.

        Raises:
            ForkedProcessError, PolicyError: see `begin_forward`.
        """
        begun = self.begin_forward()
        try:
            yield
        finally:
            if begun:
                self.end_forward()

    def begin_forward(self) -> bool:
        """Note that a forward of the model begins.

        Returns:
            Whether `end_forward` must be called.

        Raises:
            ForkedProcessError: this process was forked after the weights had been offloaded.
            PolicyError: the model was sharded after its weights had been offloaded, or wrapped in
                `DistributedDataParallel` before, or the weights would have to be moved inside a
                transform or while traced.
        """
        self.check_process()
        self.refuse_transforms()
        if is_written_down():  # nothing is computed, and fake tensors have no values to adopt
            return False
        model = self._model()
        if model is not None:
            given = ((m.name, each) for _, m in self.members() for each in m.find_given())
            _refuse_sharded(model, given)
            self._refuse_data_parallel(model)
        self._begin_forward()
        return True

    def start_anew(self, transfers: Transfers) -> None:
        """Forget what an interrupt may have left half done, and go on with other transfers.

        No forward or backward runs, and no copy is under way. The modules get their parameters
        back. Graphs that are alive can still be used.

        Args:
            transfers: with the same device and a store of the same kind.
        """
        slots = [slot for group in self.groups for slot in (*group.slots, *group.blocks)]
        transfers.store.take_over(self._transfers.store, slots)
        for group in self.groups:
            group.start_anew(transfers.store)
        if self._state is not None:
            self._state.move_to(transfers.store)
        self._transfers = transfers
        self._use(transfers)

    def move_beside(self, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        """Move a tensor of the parameter's shape to a file if the parameter rests in one."""
        if self._state is not None:
            self._state.move_to_file(parameter, tensor)

    def refuse_transforms(self) -> None:
        """Check that nothing would record how the weights move to the device.

        Raises:
            PolicyError: a transform of `torch.func`, an export or a trace would.
        """
        if not self._device.computes_on_host:
            refuse_moving_weights()

    def _refuse_data_parallel(self, model: nn.Module) -> None:
        """Check that the gradients of weights that rest would be added up over processes.

        Raises:
            PolicyError: `DistributedDataParallel` knows the weights where they were on the device.
        """
        wrapper = None if self._home.type == "cpu" else find_data_parallel(model)
        if wrapper is not None and wrapper.device_type != "cpu":
            raise PolicyError(
                "DistributedDataParallel has wrapped the model while its weights were on the "
                "device, and would not add up the gradients of weights that rest on the host; call "
                "ebbtide.offload before you wrap the model, or leave the weights on the device: "
                "without weights=, or with a budget and weights=ebbtide.WeightPolicy(num_layers=0)"
            )

    def detach(self, to: torch.device | None = None) -> None:
        """Remove all hooks and move the parameters and their gradients.

        Args:
            to: where they go; None: the device that the model computes on.
        """
        while self._end_hooks:
            self._end_hooks.pop()()
        for _, member in self.members():
            member.put_back()  # an interrupt may have come after the last forward
        is_mapped = all(group.resting.is_mapped for group in self.groups)
        if self._transfers.gate.is_inherited and not is_mapped:
            return  # the parameters have no values here, and the memory is the parent's
        for group, member in self.members():
            with contextlib.suppress(PolicyError):  # what does not fit stays where it is
                self._adopt(group, member)
        staying = self._find_staying()
        for _, member in self.members():
            member.restore_to(to or self._device.torch_device, stays=member in staying)
        self._close()
        if self._state is not None:
            self._state.close()

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Prepare for an optimizer's step, which changes parameters on the host.

        Raises:
            ForkedProcessError: this process was forked from the one that offloaded the weights.
            PolicyError: the optimizer joins all parameters, and some are on the device.
        """
        parameters = parameters_of(optimizer)
        self._adopt_all({id(p) for p in parameters if p not in self})
        if any(parameter in self for parameter in parameters):
            self.check_process()
            if joins_parameters(optimizer) and len({each.device for each in parameters}) > 1:
                raise PolicyError(
                    f"{type(optimizer).__name__} joins all parameters to one vector, and of these "
                    f"some rest on the host and some are on the device; use an optimizer that "
                    f"steps each parameter by itself, or leave the weights on the device: without "
                    f"weights=, or with a budget and weights=ebbtide.WeightPolicy(num_layers=0)"
                )
            bring_scales(optimizer)
            bring_state(optimizer, self)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return all parameters of an optimizer."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def stepped_at_once(optimizer: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
    """Return the groups for which an optimizer computes at once if all of them is on one device.

    Torch's own do so unless they are fused, or told to step one parameter after the other. Where
    some of a group are on the host, they step one after the other, too. SGD changes parameters in
    place, unless it adds something to the gradients before.
    """
    return [
        group["params"]
        for group in optimizer.param_groups
        if group.get("foreach", False) is not False
        and not group.get("fused")
        and not (
            type(optimizer) is torch.optim.SGD
            and not group.get("weight_decay")
            and not group.get("maximize")
        )
    ]


def joins_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer of torch computes with all parameters as one vector."""
    return isinstance(optimizer, torch.optim.LBFGS)


def bring_state(optimizer: torch.optim.Optimizer, parameters: Container[nn.Parameter]) -> None:
    """Move an optimizer's state of these parameters to the devices that they are on now.

    A count of steps stays on the host, unless the optimizer wants it beside the parameter, as
    torch's own `Optimizer.load_state_dict` does, or it is on the device already, where the compiler
    puts it.
    """
    for group in optimizer.param_groups:
        counts_there = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            if parameter not in parameters:
                continue
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and (
                    value.dim() or counts_there or value.device.type != "cpu"
                ):
                    state[name] = value.to(parameter.device)


def _refuse_sharded(model: nn.Module, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check that none of these parameters is sharded over several processes.

    Raises:
        PolicyError: one of them is.
    """
    sharded = find_sharded_parameters(model)
    for name, parameter in named if sharded else ():
        if id(parameter) in sharded:
            raise PolicyError(
                f"weights= is not for sharded weights, and {name} is sharded (FSDP or DTensor); "
                f"FSDP2 itself keeps its shards in host memory: fully_shard(module, offload_policy="
                f"torch.distributed.fsdp.CPUOffloadPolicy()). Offload the activations of such a "
                f"model only: ebbtide.offload(model, activations=ebbtide.ActivationPolicy())"
            )


def _find_others(
    holds: Mapping[nn.Module, Iterable[WeightGroup]],
    used: Sequence[tuple[nn.Module, Sequence[WeightGroup]]],
) -> list[tuple[nn.Module, list[WeightGroup]]]:
    """Find modules outside the layers that share a weight with a layer, such as a tied head.

    A module that contains a layer is left out: it may hold a weight in a list without computing
    with it, and if it reads a weight by name it gets a substitute.
    """
    layers = {id(module) for module, _ in used}
    covered = {
        (id(inner), id(g)) for module, own in used for inner in module.modules() for g in own
    }
    others = []
    for module, groups in holds.items():
        missing = [group for group in groups if (id(module), id(group)) not in covered]
        if missing and not any(id(inner) in layers for inner in module.modules()):
            others.append((module, missing))
    return others


def _make_groups(
    groups: list[WeightGroup],
    units: Iterable[Unit],
    store: AbstractStore,
    param_dtype: torch.dtype | None,
) -> list[tuple[nn.Module, list[WeightGroup]]]:
    """Make a group for each unit; a tied parameter belongs to the first unit that has it.

    Args:
        groups: gets the groups, as each is made.
        units: the units.
        store: where the weights are to rest.
        param_dtype: see `WeightPolicy`.

    Returns:
        For each module the groups that it uses.

    Raises:
        StoreFullError: the store has no room for a group.
    """
    found: dict[int, WeightGroup] = {}
    used: list[tuple[nn.Module, list[WeightGroup]]] = []
    for modules, name, named in units:
        own = [(each, p) for each, p in named if id(p) not in found]
        needed = dict.fromkeys(found[id(p)] for _, p in named if id(p) in found)
        if own:
            groups.append(WeightGroup(len(groups), name, own, store, param_dtype))
            found |= {id(parameter): groups[-1] for _, parameter in own}
            needed[groups[-1]] = None
        used += [(module, list(needed)) for module in modules]
    return used


# ---- The weights of a model on a CPU, in mapped files, and in RAM only while their layer runs
#
# Disk and RAM are not separate tensors here, so nothing is copied: parameters, gradients and
# optimizer state are tensors in memory-mapped files (`ebbtide.stores.mapped_memory`), and the
# kernel moves their pages. The pages of a layer are read ahead while the layer before it runs, and
# paged out two layers later.

_MOST_RECENT = 2  # groups whose pages stay in RAM: the running layer's and the one before it


@final
class MappedWeights(AbstractWeights):
    """The offloaded weights of a model on a CPU, and the files of their gradients.

    With ``double_buffering``, the next group is read ahead while one is in use.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recent: list[WeightGroup] = []  # groups whose pages may be in RAM, oldest first
        self._watched: dict[OffloadedParameter, RemovableHandle] = {}
        super().__init__(*args, **kwargs)
        self._reader = self._device.lane("ebbtide-weights-read", "disk")
        for group in self.groups:
            self._page_out(group)
        return_freed_memory()  # the RAM that the parameters occupied before

    def _begin_forward(self) -> None:
        self._adopt_all()
        for _, member in self.members():
            parameter, known = member.parameter, self._watched.get(member)
            is_watched = known is not None and has_hook(parameter, known)  # or it is another one
            if parameter.requires_grad and not is_watched:
                self._watched[member] = self._watch(parameter)

    def enter(self, group: WeightGroup) -> None:
        """See the base class. This pages out the groups used before the last two."""
        with self._transfers.gate:
            if group in self._recent:
                self._recent.remove(group)
            self._recent.append(group)
            gone = self._recent[:-_MOST_RECENT]
            del self._recent[:-_MOST_RECENT]
        # A module that is still running around this one reads its pages back on the next access.
        for other in gone:
            self._page_out(other)
        if gone:
            return_freed_memory()  # autograd made the gradients in RAM; now they are in files
        number = group.number + (-1 if in_backward() else 1)
        if self._double_buffering and 0 <= number < len(self.groups):
            self._read_ahead(self.groups[number])

    def begin_backward(self, groups: Sequence[WeightGroup]) -> None:
        for group in groups:
            self.enter(group)

    def _close(self) -> None:
        while self._watched:
            self._watched.popitem()[1].remove()
        self._reader.close()
        for group in self.groups:
            group.forget_memory()
            self._transfers.store.drop(group.resting)
            group.drop_blocks()

    def _slots_of(self, group: WeightGroup) -> Iterator[FileSlot]:
        for slot in (group.resting, *group.blocks):
            assert isinstance(slot, FileSlot)
            yield slot

    def _page_out(self, group: WeightGroup) -> None:
        for slot in self._slots_of(group):
            page_out(slot)

    def _read_ahead(self, group: WeightGroup) -> None:
        assert isinstance(group.resting, FileSlot)
        read = self._reader.submit(functools.partial(page_in, group.resting))
        recorder = self._transfers.account.recorder
        if recorder is not None:
            about = Subject(group.layer, 0, group.size_bytes, group.kind)
            recorder.copy("reload", about, read)

    def _watch(self, parameter: torch.Tensor) -> RemovableHandle:
        """Register a hook that moves a parameter's new gradient to the group's file."""
        # A parameter owns its hooks, and the garbage collector cannot see them: a hook that refers
        # to the parameter would keep a model that is dropped without `detach` alive for ever.
        hook = call_weakly(self._take_gradient)
        return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-any-return, no-untyped-call]

    def _take_gradient(self, parameter: torch.Tensor) -> None:
        found, gradient = self.find(parameter), parameter.grad
        if found is None or gradient is None or gradient.requires_grad:
            return
        group, member = found
        if gradient.layout is torch.strided and not group.holds(gradient):
            resting, _ = group.allocate(member)
            parameter.grad = resting.copy_(gradient)
