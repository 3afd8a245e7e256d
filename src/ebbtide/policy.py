"""Frozen policies: what the user asks for, validated when it is written down."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ebbtide.errors import PolicyError
from ebbtide.units import parse_size_bytes

DEFAULT_MIN_BYTES = 2**20


@dataclass(frozen=True)
class ActivationPolicy:
    """Which saved activations leave the device, and how many may be on the way at once.

    Activations of a layer leave as soon as autograd saves them and come back, ahead of need, during
    backward. What stays costs no time; what leaves costs a copy each way over the link.

    Args:
        num_layers: offload the first ``num_layers`` layers of the forward and keep the rest.
            ``None``: offload everything that is large enough, inside layers or not.
        min_bytes: smaller tensors stay on the device. An int, or text such as ``"1MiB"``.
        keep_last: this many layers at the end of the forward stay on the device; their backward
            comes first, so their copies have the least time to hide.
        fraction: of those layers offload this share, spread evenly: with 0.5 every second one.
            What is saved outside layers stays if it is less than 1.
        max_inflight_bytes: bound, each way, on bytes that hold device memory only because their
            copy is on the way: offloads not finished, and reloads not yet used. One tensor larger
            than the bound still moves, alone. ``None``: 256 MiB for a model on an accelerator,
            64 MiB on a CPU, where a reload maps pages that were read ahead outside the process.
        rebuild: what one cheap operation gives again from another saved tensor (a GELU's output
            from its input) is neither kept nor moved; backward runs that operation again. The
            bits are the same. Masks, and on a CPU indices, are packed before they leave. With
            ``num_layers=0`` nothing leaves, and rebuilding is all that happens.

    Raises:
        PolicyError: a value is out of range.
    """

    num_layers: int | None = None
    min_bytes: int | str = DEFAULT_MIN_BYTES
    keep_last: int = 0
    fraction: float = 1.0
    max_inflight_bytes: int | str | None = None
    rebuild: bool = True

    def __post_init__(self) -> None:
        if self.num_layers is not None:
            _check_count("num_layers", self.num_layers)
        _check_count("keep_last", self.keep_last)
        _check_fraction(self.fraction)
        if not isinstance(self.rebuild, bool):
            raise PolicyError(f"rebuild must be True or False, got {self.rebuild!r}")
        for name in ("min_bytes", "max_inflight_bytes"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, parse_size_bytes(value, name=name))

    @property
    def counts_layers(self) -> bool:
        """Whether it says which layers leave."""
        return self.num_layers is not None or self.keep_last > 0 or self.fraction < 1

    def chooses(self, index: int) -> bool:
        """Whether a layer is among the share that leaves."""
        return is_in_share(index, self.fraction)


@dataclass(frozen=True)
class WeightPolicy:
    """Which weights rest in host memory, and come to the device only while their layer works.

    A parameter of such a layer is a tensor of the host between uses: any optimizer steps there, and
    its state stays there. Before the layer's forward, and again before its backward, the layer's
    weights come to the device in one copy; gradients leave as they are made and accumulate in
    ``param.grad`` on the host. At most two layers' weights are on the device at once.

    Args:
        num_layers: of the first ``num_layers`` layers of the model. ``None``: of all layers.
        keep_last: the weights of this many layers at the end of the model stay.
        fraction: of those layers take this share, spread evenly: with 0.5 every second one.
        double_buffering: the next layer's weights come while a layer works, into a second buffer,
            so that their copy costs no time. ``False``: one layer's weights are there at a time,
            and each layer waits for its own.
        min_bytes: the weights of a smaller layer stay. An int, or text such as ``"1MiB"``.

    Raises:
        PolicyError: a value is out of range.
    """

    num_layers: int | None = None
    keep_last: int = 0
    fraction: float = 1.0
    double_buffering: bool = True
    min_bytes: int | str = 0

    def __post_init__(self) -> None:
        if self.num_layers is not None:
            _check_count("num_layers", self.num_layers)
        _check_count("keep_last", self.keep_last)
        _check_fraction(self.fraction)
        if not isinstance(self.double_buffering, bool):
            raise PolicyError(
                f"double_buffering must be True or False, got {self.double_buffering!r}"
            )
        object.__setattr__(self, "min_bytes", parse_size_bytes(self.min_bytes, name="min_bytes"))


def is_in_share(index: int, fraction: float) -> bool:
    """Whether the layer of this number is one of a share of all, spread evenly."""
    slack = 1e-9  # a third is taken three times in nine
    return math.floor((index + 1) * fraction + slack) > math.floor(index * fraction + slack)


def _check_fraction(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise PolicyError(f"fraction must be a share of the layers, from 0 to 1, got {value!r}")


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PolicyError(f"{name} must be a whole number of layers, 0 or more, got {value!r}")
