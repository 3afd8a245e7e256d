"""Frozen policies, which hold what the user asks for and are validated on construction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ebbtide.errors import PolicyError
from ebbtide.units import parse_size_bytes

DEFAULT_MIN_BYTES = 2**20
_MODES = ("offload", "recompute", "recompute+offload")


@dataclass(frozen=True)
class ActivationPolicy:
    """Which saved activations are offloaded, and how many bytes may be in flight at once.

    Activations are offloaded as soon as autograd saves them, and reloaded ahead of need during
    backward. Those that stay cost no time; those that are offloaded cost one copy over the link in
    each direction.

    Args:
        num_layers: offload the first ``num_layers`` layers of the forward and keep the rest.
            ``None`` means everything that is large enough, inside layers or not.
        min_bytes: smaller tensors stay on the device. An int, or text such as ``"1MiB"``.
        keep_last: number of layers at the end of the forward that stay on the device. Their
            backward comes first, so their copies have the least time to hide behind compute.
        fraction: share of these layers to offload, spread evenly; 0.5 offloads every second layer.
            If it is less than 1, tensors saved outside layers stay on the device.
        max_inflight_bytes: bound, for each direction, on the bytes that occupy device memory only
            because their copy is in flight: unfinished offloads, and reloads that are not yet used.
            A single tensor larger than the bound still moves, alone. ``None`` means 256 MiB for a
            model on an accelerator and 64 MiB on a CPU, where a reload maps pages that were read
            ahead outside the process.
        rebuild: whether to rebuild tensors that one cheap operation can compute from another saved
            tensor, such as a GELU's output from its input. Such a tensor is neither kept nor
            offloaded; backward runs the operation again, which gives the same bits. Masks, and on a
            CPU indices, are packed before they are offloaded. With ``num_layers=0`` nothing is
            offloaded, and rebuilding is all that happens.
        mode: what is done with the layers that `num_layers`, `keep_last` and `fraction` choose.
            ``"offload"`` offloads what they save. ``"recompute"`` keeps only their inputs, on the
            device: backward runs their forward again (`torch.utils.checkpoint`), and nothing is
            offloaded. ``"recompute+offload"`` recomputes them in the same way and offloads their
            inputs.

    Raises:
        PolicyError: a value is out of range.
    """

    num_layers: int | None = None
    min_bytes: int | str = DEFAULT_MIN_BYTES
    keep_last: int = 0
    fraction: float = 1.0
    max_inflight_bytes: int | str | None = None
    rebuild: bool = True
    mode: Literal["offload", "recompute", "recompute+offload"] = "offload"

    def __post_init__(self) -> None:
        if self.num_layers is not None:
            _check_count("num_layers", self.num_layers)
        _check_count("keep_last", self.keep_last)
        _check_fraction(self.fraction)
        if not isinstance(self.rebuild, bool):
            raise PolicyError(f"rebuild must be True or False, got {self.rebuild!r}")
        if self.mode not in _MODES:
            modes = ", ".join(f'"{mode}"' for mode in _MODES)
            raise PolicyError(f"mode must be one of {modes}, got {self.mode!r}")
        for name in ("min_bytes", "max_inflight_bytes"):
            value = getattr(self, name)
            if value is not None or name == "min_bytes":
                object.__setattr__(self, name, parse_size_bytes(value, name=name))

    @property
    def counts_layers(self) -> bool:
        """Whether the policy selects layers, rather than everything that is large enough."""
        return self.num_layers is not None or self.keep_last > 0 or self.fraction < 1

    @property
    def recomputes(self) -> bool:
        """Whether backward runs the forwards of the chosen layers again."""
        return self.mode != "offload"

    @property
    def offloads(self) -> bool:
        """Whether saved tensors are offloaded at all."""
        return self.mode != "recompute"

    def chooses(self, index: int) -> bool:
        """Return whether ``fraction`` selects the layer with this index."""
        return is_in_share(index, self.fraction)


@dataclass(frozen=True)
class WeightPolicy:
    """Which weights stay in host memory and are on the device only while their layer computes.

    Between uses a parameter of such a layer is a host tensor, so any optimizer runs on the host and
    keeps its state there. The layer's weights are copied to the device in one copy before its
    forward, and again before its backward. Gradients are offloaded as soon as they are computed and
    accumulate in ``param.grad`` on the host. At most two layers' weights are on the device at once.

    Args:
        num_layers: offload the weights of the first ``num_layers`` layers of the model. ``None``
            means all layers.
        keep_last: number of layers at the end of the model whose weights stay on the device.
        fraction: share of these layers to offload, spread evenly; 0.5 offloads every second layer.
        double_buffering: copy the next layer's weights into a second buffer while a layer computes,
            so that the copy costs no time. With ``False``, one layer's weights are on the device at
            a time, and each layer waits for its own.
        min_bytes: a layer with fewer bytes of weights stays on the device. An int, or text such as
            ``"1MiB"``.

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
    """Return whether the layer with this index belongs to a share of all layers, spread evenly."""
    slack = 1e-9  # makes up for rounding, so that a fraction of 1/3 selects three layers of nine
    return math.floor((index + 1) * fraction + slack) > math.floor(index * fraction + slack)


def _check_fraction(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise PolicyError(f"fraction must be a share of the layers, from 0 to 1, got {value!r}")


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PolicyError(f"{name} must be a whole number of layers, 0 or more, got {value!r}")
