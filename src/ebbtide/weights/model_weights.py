"""Says where the weights of a model are: at rest on the host, or on the device that it computes on.

[Note: weights move between steps] Which weights rest can change as long as no graph is alive, since
a budget learns from its first steps what fits. All weights that rest then go to plain host memory,
those that are to rest from now on get memory of their own there, and all others go to the device.
The state of optimizers that have stepped goes with them. That costs host memory for one more copy
of the weights for a moment, and happens a few times in a training run.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn

from ebbtide.devices.process import watch_optimizers
from ebbtide.errors import PolicyError
from ebbtide.policy import WeightPolicy
from ebbtide.runtime.engine import Engine
from ebbtide.runtime.layers import LayerModules, match_layers
from ebbtide.runtime.parameter_index import find_sharded_parameters, home_of
from ebbtide.runtime.torch_internals import (
    exchange_tensors,
    find_data_parallel,
    outside_modes,
)
from ebbtide.runtime.transfers import Transfers
from ebbtide.units import few
from ebbtide.weights.device_weights import DeviceWeights
from ebbtide.weights.hooks import (
    AbstractWeights,
    MappedWeights,
    bring_state,
    joins_parameters,
    parameters_of,
    stepped_at_once,
)
from ebbtide.weights.overlap import StepOverlap, find_overlap

CPU: Final = torch.device("cpu")

ADAM_STATES: Final = 2
"""How many tensors an Adam keeps for each that it trains; it is assumed until one has stepped."""

Materialize = Callable[[nn.Module], object] | str | os.PathLike[str]
"""Gives a module's own parameters their values, or is a folder of safetensors that has them."""


def offload_weights(
    model: nn.Module,
    layers: LayerModules,
    policy: WeightPolicy,
    transfers: Transfers,
    origin: torch.device | None = None,
) -> AbstractWeights:
    """Have weights of a model rest on the host, or in files; see `AbstractWeights`."""
    on_host = transfers.device.computes_on_host
    if on_host and policy.param_dtype is not None:
        raise PolicyError(
            f"WeightPolicy(param_dtype={policy.param_dtype}) is for a model on an accelerator, to "
            f"which weights are copied in that dtype; on a CPU, leave param_dtype out"
        )
    make = MappedWeights if on_host else DeviceWeights
    return make(model, layers, policy, transfers, origin)


class WeightBytes(NamedTuple):
    """Sizes of weights, of the gradients of those that are trained, and of their state."""

    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


@final
class ModelWeights:
    """Places the weights of one model. See [Note: weights move between steps].

    Args:
        model: the model. It is not kept alive.
        layers: the layers whose weights may rest.
        policy: which of them do.
        engine: the engine of the model, which computes on its device.
        origin: the device that the model was brought from, and goes back to; None: it was and stays
            on the device that it computes on.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: LayerModules,
        policy: WeightPolicy,
        engine: Engine,
        origin: torch.device | None,
    ) -> None:
        self._model = weakref.ref(model)
        self._names = layers.names
        self._policy = policy
        self._engine = engine
        self._origin = origin
        self._hooks: AbstractWeights | None = None
        self._movable: list[str] = []  # names of the parameters that rest if all do that can
        self._num_placed = 0
        # Each optimizer that has stepped, and how often weights had been placed when it did.
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        self._joining: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._end_watch = watch_optimizers(before=self._bring_state)

    @property
    def may_move(self) -> bool:
        """Whether weights may go to another device.

        Not if an optimizer joins all of them, or if `DistributedDataParallel` knows where they are.
        """
        model = self._model()
        return not self._joining and (model is None or find_data_parallel(model) is None)

    @property
    def names(self) -> frozenset[str]:
        """The names of the layers whose weights may rest."""
        model, layers = self._model(), self._layers()
        if model is None or self._engine.torch_device.type == "cpu":
            return frozenset(layers)
        # See `leave_first`: where no other layer rests, there is nothing to place.
        first = next(model.parameters())
        return frozenset(
            name
            for name, layer in layers.items()
            if any(layer.children()) or any(each is not first for each in layer.parameters())
        )

    def _layers(self) -> dict[str, nn.Module]:
        """Return those of the given layers that the model still has, by name."""
        model = self._model()
        modules = {} if model is None else dict(model.named_modules(remove_duplicate=False))
        return {name: modules[name] for name in self._names if name in modules}

    def place(self, names: Collection[str] | None = None) -> None:
        """Let the weights of some layers rest on the host, and have all others on the device.

        To be called when no graph of the model is alive. The buffers of a model that was brought
        from elsewhere go to the device, too.

        Args:
            names: the names of the layers; None: all of those that were given.

        Raises:
            PolicyError: a parameter cannot rest. No weights rest then.
            StoreFullError: the store has no room for the weights; the same.
            torch.OutOfMemoryError: the device has no room for the others.
        """
        model = self._model()
        if model is None:
            return
        self._num_placed += 1
        with outside_modes():  # they see no operation of the move
            transfers, origin = self._engine.transfers, self._origin
            chosen = [each for each in self._layers() if names is None or each in names]
            self._end_resting(CPU)
            if chosen:
                layers = match_layers(model, chosen)
                self._hooks = offload_weights(model, layers, self._policy, transfers, origin)
                self._engine.rest(self._hooks)
            if names is None:
                named = model.named_parameters()
                self._movable = [name for name, each in named if each in self._resting]
            home, brings = transfers.device.torch_device, origin is not None
            move(model, home, but=self._resting, buffers=brings)
            if home.type != "cpu":  # in files, the state follows in the optimizer's step
                for optimizer in list(self._optimizers):
                    bring_state(optimizer, set(model.parameters()))

    def sizes(self, *, expects_state: bool = False) -> dict[str, WeightBytes]:
        """Return what weights occupy that rest if all do, by the name of the first layer with them.

        Args:
            expects_state: whether no optimizer has stepped yet that will, so that they are to have
                the state of an Adam.
        """
        sizes: dict[str, WeightBytes] = {}
        left = set(self._movable_parameters())
        for name, layer in self._layers().items():
            own = left.intersection(layer.parameters())
            left -= own
            trained_bytes = sum(each.nbytes for each in own if each.requires_grad)
            state_bytes = sum(map(self._state_bytes, own))
            sizes[name] = WeightBytes(
                sum(each.nbytes for each in own),
                trained_bytes,
                ADAM_STATES * trained_bytes if expects_state else state_bytes,
            )
        return sizes

    def there_bytes(self) -> int:
        """Return what the weights that can rest occupy on the device, with gradients and state."""
        home, there_bytes = self._engine.torch_device, 0
        for parameter in self._movable_parameters():
            if home.type != "cpu" or parameter not in self._resting:
                own = [parameter, parameter.grad, *self._states_of(parameter)]
                there_bytes += sum(e.nbytes for e in own if e is not None and e.device == home)
        return there_bytes

    def at_once_bytes(self) -> int:
        """Return what optimizers may compute at once if all weights are on the device."""
        model = self._model()
        own = set[object]() if model is None else set(model.parameters())
        groups = (group for each in self._optimizers for group in stepped_at_once(each))
        sizes = (sum(each.nbytes for each in group if each in own) for group in groups)
        return max(sizes, default=0)

    def have_gradients(self) -> bool:
        """Return whether any weight that can rest has a gradient, wherever it is."""
        return any(each.grad is not None for each in self._movable_parameters())

    def _movable_parameters(self) -> list[nn.Parameter]:
        model = self._model()
        every = {} if model is None else dict(model.named_parameters(remove_duplicate=False))
        return [every[name] for name in self._movable if name in every]

    def overlaps(self) -> list[StepOverlap]:
        """Return what lets optimizers of the model step inside backward, if it does so now."""
        found = (find_overlap(each) for each in self._optimizers)
        return [each for each in found if each is not None and each.stats.steps_ahead]

    def _state_bytes(self, parameter: nn.Parameter) -> int:
        return sum(each.nbytes for each in self._states_of(parameter))

    def _states_of(self, parameter: nn.Parameter) -> list[Tensor]:
        states = (each.state.get(parameter, {}).values() for each in self._optimizers)
        return [each for state in states for each in state if isinstance(each, Tensor)]

    def detach(self) -> None:
        """Move all weights to where the model was brought from, or to the device it computes on.

        The state of the optimizers that have stepped follows in their next step: who takes none
        may have no room for it there.
        """
        self._end_watch()
        self._end_resting(self._origin)
        model = self._model()
        if model is not None and self._origin is not None:
            move(model, self._origin)
        _behind.update(self._optimizers)

    @property
    def _resting(self) -> Container[nn.Parameter]:
        return () if self._hooks is None else self._hooks

    def _end_resting(self, to: torch.device | None) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.detach(to)
            self._engine.rest(None)

    def _bring_state(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Bring the state of the weights on the device; that of the others follows by itself."""
        model = self._model()
        if model is None or self._optimizers.get(optimizer) == self._num_placed:
            return
        self._optimizers[optimizer] = self._num_placed
        if joins_parameters(optimizer) and not set(parameters_of(optimizer)).isdisjoint(
            model.parameters()
        ):
            self._joining.add(optimizer)
        if optimizer.state:
            there = {each for each in model.parameters() if each not in self._resting}
            bring_state(optimizer, there)


# Optimizers whose weights were detached since their last step.
_behind: Final[weakref.WeakSet[torch.optim.Optimizer]] = weakref.WeakSet()


def _catch_up(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Bring the state of an optimizer to its parameters, if these have moved by `detach`."""
    if optimizer in _behind:
        bring_state(optimizer, set(parameters_of(optimizer)))
        _behind.discard(optimizer)  # only now: it may have been interrupted


watch_optimizers(before=_catch_up)


def move(
    model: nn.Module,
    device: torch.device,
    but: Container[nn.Parameter] = (),
    *,
    buffers: bool = True,
) -> None:
    """Move a model's parameters, their gradients, and its buffers to a device.

    Args:
        model: the model.
        device: the device.
        but: the parameters that stay where they are.
        buffers: whether its buffers move, too.
    """
    moved: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is None or parameter in but or home_of(parameter) == device:
                continue
            gradient, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.to(device)
            parameter.grad = None if gradient is None else gradient.to(device)
        for name, buffer in module._buffers.items() if buffers else ():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                if buffer not in moved:  # one that two modules share is still shared afterwards
                    moved[buffer] = buffer.to(device)
                module._buffers[name] = moved[buffer]


def check_can_move(model: nn.Module, device: torch.device) -> None:
    """Check that a model on the CPU can be computed with on a device.

    Raises:
        PolicyError: torch has no such device here, the model is on another one, or it is sharded or
            wrapped in `DistributedDataParallel`.
    """
    known = torch.accelerator.current_accelerator(check_available=True)
    if device.type != "cpu" and (known is None or known.type != device.type):
        raise PolicyError(
            f"device={str(device)!r}, and torch finds no such device here"
            + ("" if known is None else f", only {known}")
            + "; install a torch that has it, or leave device out to train where the model is"
        )
    elsewhere = {p.device for p in model.parameters()} - {device, CPU}
    if elsewhere or (device.type == "cpu" and any(p.device != CPU for p in model.parameters())):
        places = few(sorted(map(str, elsewhere)))
        raise PolicyError(
            f"the model is on {places}, and device={str(device)!r} is for a model on the CPU or on "
            f"meta; move it there first with model.to({str(device)!r}), or leave device out"
        )
    if find_sharded_parameters(model) or find_data_parallel(model) is not None:
        raise PolicyError(
            "device= is for a model that is neither sharded (FSDP or DTensor) nor wrapped in "
            "DistributedDataParallel yet; leave device out, or call ebbtide.offload before you "
            "wrap the model"
        )


# ---- Gives a model on the meta device its values ----


def materialize(model: nn.Module, how: Materialize) -> None:
    """Give all parameters and buffers on the meta device memory on the CPU, and their values.

    The parameters stay the same objects, so that tied ones stay tied, and an optimizer that was
    made before knows them.

    Args:
        model: the model.
        how: is called with each module that has parameters or buffers on meta, in the order of
            ``model.modules()``, when these have memory, to set their values, such as
            ``lambda module: module.reset_parameters()``. Or a folder of safetensors files that
            contains all of them by their names in the model's ``state_dict``.

    Raises:
        PolicyError: ``how`` is neither, or a value is missing or has another shape.
        OSError: a file cannot be read.
    """
    if callable(how):
        for module in model.modules():
            if [_make_real(module, name, each) for name, each in _on_meta(module)]:
                how(module)
        return
    with ExitStack() as files:
        values = _open_folder(files, how)
        for prefix, module in model.named_modules():
            for name, each in list(_on_meta(module)):
                full = f"{prefix}.{name}" if prefix else name
                if full not in values:
                    raise PolicyError(
                        f"materialize={str(how)!r} has no value for {full}; tie or set it in a "
                        f"callable instead, or save the whole state_dict there"
                    )
                value = values[full](full)
                if value.shape != each.shape:
                    raise PolicyError(
                        f"{full} has shape {tuple(value.shape)} in {str(how)!r}, and the model "
                        f"has {tuple(each.shape)}; build the model with the settings of the files"
                    )
                with torch.no_grad():
                    _make_real(module, name, each).copy_(value)


def _on_meta(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own parameters and buffers that are on the meta device."""
    for owned in (module._parameters, module._buffers):
        for name, each in list(owned.items()):
            if each is not None and each.is_meta:
                yield name, each


def _make_real(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Give a parameter or buffer on the meta device memory on the CPU, without values."""
    real = torch.empty_like(tensor, device=CPU)
    if not isinstance(tensor, nn.Parameter):
        module._buffers[name] = real
        return real
    # The Python object becomes a tensor on the CPU: modules and optimizers refer to it.
    exchange_tensors(tensor, nn.Parameter(real, requires_grad=tensor.requires_grad))
    return tensor


def _open_folder(files: ExitStack, folder: object) -> Mapping[str, Callable[[str], Tensor]]:
    """Return a function for each tensor in a folder of safetensors files that reads it."""
    if not isinstance(folder, str | os.PathLike):
        raise PolicyError(
            f"materialize must be a function of a module or a folder of safetensors files, got "
            f"{folder!r}"
        )
    paths = sorted(Path(folder).glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"there are no *.safetensors files in {str(folder)!r}")
    try:
        from safetensors import safe_open
    except ImportError:
        raise PolicyError(
            "materialize with a folder reads safetensors files: pip install safetensors"
        ) from None
    readers = [files.enter_context(safe_open(path, framework="pt")) for path in paths]
    return {name: reader.get_tensor for reader in readers for name in reader.keys()}  # noqa: SIM118
