"""Weights of a model's layers: which come and go together, and when modules use them."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from ebbtide.devices.device import AbstractDevice
from ebbtide.errors import PolicyError
from ebbtide.hooks.layers import LayerModules, ModuleHook, lists_by_index
from ebbtide.hooks.places import find_places, start_lending, stop_lending
from ebbtide.policy import WeightPolicy, is_in_share
from ebbtide.runtime.gradients import Gradients, cast_parameter
from ebbtide.runtime.groups import Allocate, RestingIndex, WeightGroup, allocate_host_memory
from ebbtide.runtime.mapped import MappedWeights
from ebbtide.runtime.saved import Saved
from ebbtide.runtime.weak import call_weakly
from ebbtide.runtime.weight_tensors import CastWeightTensor, WeightTensor
from ebbtide.runtime.weights import Weights
from ebbtide.stores.mapped import MappedMemory

Unit = tuple[list[nn.Module], list[tuple[str, nn.Parameter]]]
"""Modules whose begin brings parameters, and these with their names."""


@final
class WeightHooks:
    """Lets the weights of some layers rest on the host, of one model.

    Args:
        model: whose layers.
        layers: the layers.
        policy: of which layers, and how.
        device: where the model computes; its parameters are there.
        bound_bytes: on gradients under way.
        memory: of a model on a CPU, what its weights rest in; None: host memory of a device.

    Raises:
        PolicyError: a parameter cannot rest on the host; nothing has been moved.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: LayerModules,
        policy: WeightPolicy,
        device: AbstractDevice,
        bound_bytes: int,
        *,
        memory: MappedMemory | None = None,
    ) -> None:
        units = _choose(_find_units(layers), policy)
        _check(units)
        of_device = functools.partial(allocate_host_memory, device)
        allocate = of_device if memory is None else memory.allocate
        groups, used = _make_groups(units, allocate, device.torch_device)
        self.resting = RestingIndex(groups, device.torch_device)
        find_places(model, (member for _, member in self.resting.members()))
        holds: dict[nn.Module, dict[WeightGroup, None]] = {}
        for group, member in self.resting.members():
            for module, *_ in member.places:
                holds.setdefault(module, {})[group] = None
        self._holders = list(holds)
        if memory is None:
            start_lending(self._holders, functools.partial(_lend, weakref.ref(self)))
        self._used = [*used, *_find_others(holds, used)]
        self.gradients = Gradients(device, groups, bound_bytes)
        self.weights: Weights | MappedWeights
        if memory is None:
            self.weights = Weights(
                device,
                groups,
                self.resting,
                self.gradients.link,
                double_buffering=policy.double_buffering,
            )
        else:
            self.weights = MappedWeights(
                device, groups, self.resting, memory, double_buffering=policy.double_buffering
            )
        self._device = device
        # All optimizers share this hook: it must not keep the model alive.
        watch = register_optimizer_step_pre_hook(call_weakly(self.before_step))
        self._hooks: list[Any] = [watch]
        weakref.finalize(self, self._hooks[0].remove).atexit = False
        for module, needed in self._used:
            self._hook(module, needed)

    def _hook(self, module: nn.Module, groups: Sequence[WeightGroup]) -> None:
        begin = ModuleHook(module, functools.partial(self._begin, groups))
        end = ModuleHook(module, functools.partial(self._end, groups))
        self._hooks.append(module.register_forward_pre_hook(begin, prepend=True))
        self._hooks.append(module.register_forward_hook(end, always_call=True))

    def _begin(self, groups: Sequence[WeightGroup], _: Any) -> None:
        for group in groups:
            self.weights.enter(group)

    def _end(self, groups: Sequence[WeightGroup], output: Any) -> None:
        """A module has ended; its backward begins with that of its outputs."""
        for group in groups:
            self.weights.leave(group)
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        for node in {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}:
            node.register_prehook(lambda _: self.weights.begin_backward(groups))

    def lend(self, parameter: torch.Tensor) -> torch.Tensor:
        """What code that takes a parameter from a module that is not open is to work with."""
        home = self.resting.find(parameter)
        if home is None or isinstance(self.weights, MappedWeights):
            return parameter
        return self.weights.lend(*home)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Around a forward of the model, whatever way it ends."""
        self.weights.begin_forward()
        try:
            yield
        finally:
            self.weights.end_forward()

    def pack(self, tensor: torch.Tensor, whole: torch.Tensor) -> Saved | None:
        """What stands for a saved tensor that is a view or a cast of a weight; None if it is none.

        Args:
            tensor: what is saved.
            whole: what it is a view of, or itself.
        """
        weights = self.weights
        if isinstance(weights, MappedWeights):
            return None  # it is in the file
        storage = tensor.untyped_storage()
        group = weights.group_at(storage)
        if group is not None:
            member = group.member_at(int(tensor.storage_offset()) * tensor.element_size())
            return WeightTensor(weights, group, member, tensor)
        cast = cast_parameter(whole)
        if cast is None or cast.is_changed():
            return None
        home = self.resting.find(cast.parameter)
        if home is None or storage.nbytes() != whole.nbytes or tensor.dtype is not whole.dtype:
            return None
        return CastWeightTensor(weights, *home, tensor)

    def detach(self) -> None:
        """Bring everything back to the device, gradients too."""
        self.gradients.close()
        while self._hooks:
            self._hooks.pop().remove()
        self.weights.settle()
        stop_lending(self._holders)
        home = self._device.torch_device
        for _, member in self.resting.members():
            member.leave_for(home)
        self.weights.close()

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer is about to change values at rest."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.resting.begin_step(parameters)
        for parameter in parameters:
            found = self.resting.find(parameter)
            if found is None:
                continue
            for name, value in optimizer.state.get(parameter, {}).items():
                moved = isinstance(value, torch.Tensor) and value.device != parameter.device
                if moved and value.dim():
                    raise PolicyError(
                        f"{type(optimizer).__name__} holds {name!r} of "
                        f"{found[1].name} on {value.device}, and that weight "
                        f"rests on the host now; make the optimizer after ebbtide.offload, or load "
                        f"its state_dict again: optimizer.load_state_dict(optimizer.state_dict())"
                    )


def _lend(hooks: weakref.ref[WeightHooks], parameter: torch.Tensor) -> torch.Tensor:
    found = hooks()
    return parameter if found is None else found.lend(parameter)


def _find_units(layers: LayerModules) -> list[Unit]:
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
            units.append(([element for _, element in elements], named))
        rest = [(f"{name}.{n}", p) for n, p in module.named_parameters() if id(p) not in inner]
        if rest:
            units.append(([module], rest))
    return units


def _choose(units: Sequence[Unit], policy: WeightPolicy) -> list[Unit]:
    least_bytes = max(int(policy.min_bytes), 1)
    return [
        unit
        for number, unit in enumerate(units[: len(units) - policy.keep_last][: policy.num_layers])
        if is_in_share(number, policy.fraction) and _size_bytes(unit) >= least_bytes
    ]


def _size_bytes(unit: Unit) -> int:
    return sum(parameter.numel() * parameter.element_size() for _, parameter in unit[1])


def _check(units: Sequence[Unit]) -> None:
    if not units:
        raise PolicyError(
            "no layer has weights to offload: name some, layers=[model.encoder, ...], or lower "
            "WeightPolicy(min_bytes=...)"
        )
    for _, named in units:
        for name, parameter in named:
            if type(parameter) is not nn.Parameter:
                raise PolicyError(
                    f"{name} is a {type(parameter).__name__}, not a plain nn.Parameter; offload "
                    f"weights before the model is sharded (FSDP, DTensor), or leave that layer out"
                )
            if parameter.layout is not torch.strided:
                raise PolicyError(f"{name} is sparse; leave its layer out")


def _find_others(
    holds: Mapping[nn.Module, Iterable[WeightGroup]],
    used: Sequence[tuple[nn.Module, Sequence[WeightGroup]]],
) -> list[tuple[nn.Module, list[WeightGroup]]]:
    """Modules outside the layers that share a weight with one of them, such as a tied head.

    Not a module around a layer: it may only keep a list of weights for its records, and what it
    takes by name it is lent.
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
    units: Iterable[Unit], allocate: Allocate, home: torch.device
) -> tuple[list[WeightGroup], list[tuple[nn.Module, list[WeightGroup]]]]:
    """A group for each unit; a tied parameter belongs to the first that has it.

    If there is no room for one of them, all are on their device again when that is raised.
    """
    groups: list[WeightGroup] = []
    try:
        return groups, _fill_groups(units, allocate, groups)
    except BaseException:
        for group in groups:
            for member in group.members:
                member.leave_for(home)
            group.memory.give_back()
        raise


def _fill_groups(
    units: Iterable[Unit], allocate: Allocate, groups: list[WeightGroup]
) -> list[tuple[nn.Module, list[WeightGroup]]]:
    """Append the groups. Returns which modules use which."""
    home: dict[int, WeightGroup] = {}
    used: list[tuple[nn.Module, list[WeightGroup]]] = []
    for modules, named in units:
        own = [(name, p) for name, p in named if id(p) not in home]
        needed = dict.fromkeys(home[id(p)] for _, p in named if id(p) in home)
        if own:
            groups.append(WeightGroup(len(groups), own, allocate))
            home |= {id(parameter): groups[-1] for _, parameter in own}
            needed[groups[-1]] = None
        used += [(module, list(needed)) for module in modules]
    return used
