"""The models that `ebbtide plan` knows by name: neural operators and language models."""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from ebbtide.errors import PolicyError
from ebbtide.studies.models.language_models import (
    GPT_SHAPES,
    LLAMA_SHAPES,
    LanguageModel,
    LanguageModelShape,
)
from ebbtide.studies.tasks import Size, Task, TaskFamily

OPERATORS: Final = {"fno1d": 1, "fno2d": 2, "fno3d": 3, "tfno": 2, "uno": 2}
"""Neural operators, and the dimensions of their grids."""

LANGUAGE_MODELS: Final[Mapping[str, Mapping[str, LanguageModelShape]]] = {
    "gpt": GPT_SHAPES,
    "llama": LLAMA_SHAPES,
}

NAMES: Final = (*OPERATORS, *LANGUAGE_MODELS)

_RESOLUTIONS: Final = {1: 8192, 2: 512, 3: 128}
_RESOLUTION_STEPS: Final = {1: 64, 2: 16, 3: 8}
_SEQUENCE_STEP: Final = 256
_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
_UNO_CHANNELS: Final = (1, 2, 2, 2, 1)  # of each layer, in widths
_UNO_SCALINGS: Final = (1, 0.5, 1, 1, 2)
_UNO_MODES: Final = (1, 2, 2, 2, 1)  # of each layer, as divisors


@final
@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What a user said about a built-in model; None: not said.

    Args:
        resolution: points along each side of the grid.
        seq: tokens of a sequence.
        batch: samples.
        width: hidden channels of a neural operator.
        modes: Fourier modes in each direction.
        layers: layers of a neural operator.
        channels: channels of its input.
        size: size of a language model, such as ``"7b"``.
        precision: ``"fp32"`` or ``"bf16"``.
    """

    resolution: int | None = None
    seq: int | None = None
    batch: int | None = None
    width: int | None = None
    modes: int | None = None
    layers: int | None = None
    channels: int | None = None
    size: str | None = None
    precision: str | None = None

    def check(self, model: str, known: tuple[str, ...]) -> None:
        """Check that numbers are positive, and that a model knows what was said.

        Raises:
            PolicyError: a number is not positive, or the model has no such option.
        """
        for name, value in vars(self).items():
            if value is None:
                continue
            if name not in known:
                options = ", ".join(f"--{each}" for each in known)
                raise PolicyError(f"{model} has no --{name}; it takes {options or 'no options'}")
            if isinstance(value, int) and value < 1:
                raise PolicyError(f"--{name} must be 1 or more, got {value}")


def build_family(name: str, options: ModelOptions) -> TaskFamily:
    """Return a built-in model with its training step.

    Args:
        name: one of `NAMES`.
        options: what the user said.

    Raises:
        PolicyError: an option is wrong, or is not one of this model.
        ImportError: neuraloperator is not installed.
    """
    if name in LANGUAGE_MODELS:
        return _language_family(name, options)
    return _operator_family(name, options)


# ---- neural operators ---------------------------------------------------------------------------


def _operator_family(name: str, options: ModelOptions) -> TaskFamily:
    known: tuple[str, ...] = ("resolution", "batch", "width", "modes", "layers", "channels")
    if name == "uno":
        known = tuple(each for each in known if each != "layers")
    options.check(name, known)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import neuralop.models  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f'{name} comes from neuraloperator, which is not installed: pip install "ebbtide'
            f'[neuralop]". gpt, llama and module:function work without it'
        ) from error
    dimensions = OPERATORS[name]
    build_model = functools.partial(_build_operator, name, options)
    length = options.resolution or _RESOLUTIONS[dimensions]
    width = options.width or _default_width(name)
    modes = options.modes or _default_modes(dimensions)
    least = 2 * modes
    if length < least:
        raise PolicyError(
            f"--resolution {length} is too coarse for {modes} Fourier modes in each direction; "
            f"give {least} or more, or fewer --modes"
        )
    if name == "uno" and length % 2:
        raise PolicyError(f"uno halves its grid; give an even --resolution, not {length}")
    what = {"tfno": "TFNO (Tucker, rank 0.05) in", "uno": "UNO in"}.get(name, "FNO in")
    layers = 5 if name == "uno" else options.layers or 4
    return TaskFamily(
        title=f"{what} {dimensions}D, width {width}, {modes} modes, {layers} layers, float32",
        build=functools.partial(_operator_task, build_model, dimensions, options.channels or 1),
        size=Size(length, options.batch or (8 if dimensions < 3 else 1)),
        length_name="resolution",
        dimensions=dimensions,
        length_step=_RESOLUTION_STEPS[dimensions],
    )


def _default_width(name: str) -> int:
    return 64 if name == "fno1d" else 32


def _default_modes(dimensions: int) -> int:
    return {1: 64, 2: 16, 3: 16}[dimensions]


def _build_operator(name: str, options: ModelOptions) -> nn.Module:
    from neuralop.models import FNO, TFNO, UNO

    dimensions = OPERATORS[name]
    width, channels = options.width or _default_width(name), options.channels or 1
    modes = options.modes or _default_modes(dimensions)
    common: dict[str, Any] = {
        "in_channels": channels,
        "out_channels": channels,
        "hidden_channels": width,
    }
    if name == "uno":
        return UNO(  # type: ignore[no-any-return]
            **common,
            n_layers=len(_UNO_CHANNELS),
            uno_out_channels=[times * width for times in _UNO_CHANNELS],
            uno_n_modes=[[max(1, modes // by)] * dimensions for by in _UNO_MODES],
            uno_scalings=[[scaling] * dimensions for scaling in _UNO_SCALINGS],
            channel_mlp_skip="linear",
        )
    if name == "tfno":
        common |= {"factorization": "tucker", "rank": 0.05}
    kind = TFNO if name == "tfno" else FNO
    layers = options.layers or 4
    return kind(n_modes=(modes,) * dimensions, n_layers=layers, **common)  # type: ignore[no-any-return]


def _operator_task(
    build_model: Callable[[], nn.Module], dimensions: int, channels: int, size: Size
) -> Task:
    assert size.length is not None
    assert size.batch is not None
    # neuralop warns that its defaults will change, and UNO prints its arguments.
    quiet = contextlib.redirect_stdout(io.StringIO())
    with torch.device("meta"), warnings.catch_warnings(), quiet:
        warnings.simplefilter("ignore")
        model = build_model()
        x = torch.empty(size.batch, channels, *[size.length] * dimensions)
    return Task(model, x, _mean_square)


def _mean_square(y: Tensor) -> Tensor:
    """Take the place of a loss against data, which saves as much: the difference, once."""
    return y.square().mean()


# ---- language models ----------------------------------------------------------------------------


def _language_family(name: str, options: ModelOptions) -> TaskFamily:
    options.check(name, ("seq", "batch", "size", "precision"))
    shapes = LANGUAGE_MODELS[name]
    size = (options.size or next(iter(shapes))).lower()
    if size not in shapes:
        raise PolicyError(f"{name} has no --size {size}; its sizes are {', '.join(shapes)}")
    precision = (options.precision or "bf16").lower()
    if precision not in _DTYPES:
        raise PolicyError(f"--precision must be {' or '.join(_DTYPES)}, got {precision!r}")
    shape, dtype = shapes[size], _DTYPES[precision]
    return TaskFamily(
        title=f"{name.upper() if name == 'gpt' else 'Llama'} {size}, {shape.num_layers} layers of "
        f"width {shape.width}, all in {str(dtype).removeprefix('torch.')}",
        build=functools.partial(_language_task, name, shape, dtype),
        size=Size(options.seq or (1024 if name == "gpt" else 8192), options.batch or 1),
        length_name="sequence",
        length_step=_SEQUENCE_STEP,
        num_blocks=shape.num_layers,
        build_short=functools.partial(_language_task, name, shape, dtype),
    )


def _language_task(
    name: str,
    shape: LanguageModelShape,
    dtype: torch.dtype,
    size: Size,
    num_blocks: int | None = None,
) -> Task:
    assert size.length is not None
    assert size.batch is not None
    with torch.device("meta"):
        positions = size.length if name == "gpt" else None
        model = LanguageModel(shape, positions, num_blocks=num_blocks).to(dtype)
        tokens = torch.empty(size.batch, size.length, dtype=torch.int64)
        targets = torch.empty(size.batch, size.length, dtype=torch.int64)
    return Task(model, (tokens, targets))
