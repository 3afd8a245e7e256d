"""What a study is about: a model, its batch and its loss, at any size."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import inspect
import io
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ebbtide.errors import PolicyError
from ebbtide.planning.hardware import Hardware
from ebbtide.units import parse_budget_bytes


class Task(NamedTuple):
    """One training step.

    Attributes:
        model: the model, on the meta device or on the CPU.
        batch: what it is called with.
        loss: computes the loss from what it returns; None: see `profile_with_fake_tensors`.
    """

    model: nn.Module
    batch: Any
    loss: Callable[[Any], Tensor] | None = None


class Size(NamedTuple):
    """How large a step is.

    Attributes:
        length: points along each side of a grid, or tokens of a sequence; None if the task has no
            such number.
        batch: samples; None if the task has no such number.
    """

    length: int | None
    batch: int | None


@final
@dataclass(frozen=True, kw_only=True)
class TaskFamily:
    """A training step at all its sizes.

    Args:
        title: what it is, for people.
        build: makes the task of a size.
        size: the size that was asked for.
        length_name: ``"resolution"`` or ``"sequence"``; "" if the length is None.
        dimensions: dimensions of the grid; 1 for sequences; 0 if not known.
        length_step: the sizes that count are multiples of this.
        num_blocks: number of equal blocks in the middle of the model, if `build_short` is given.
        build_short: makes the task with fewer blocks than it has; None if it cannot.
    """

    title: str
    build: Callable[[Size], Task]
    size: Size
    length_name: str = ""
    dimensions: int = 1
    length_step: int = 1
    num_blocks: int = 0
    build_short: Callable[[Size, int], Task] | None = None

    def describe(self, size: Size) -> str:
        """Return a size in words, such as ``"512 x 512, batch 8"``."""
        length = [] if size.length is None else [self.describe_length(size.length)]
        return ", ".join(length + ([] if size.batch is None else [f"batch {size.batch}"]))

    def describe_length(self, length: int) -> str:
        """Return a length in words, such as ``"512 x 512"``."""
        if self.length_name == "sequence":
            return f"{length} tokens"
        if not self.dimensions:
            return f"resolution {length}"
        sides = " x ".join([str(length)] * self.dimensions)
        return sides if self.dimensions > 1 else f"{length} points"


# ---- A GPT and a Llama in plain torch, as far as memory and time depend on them ----


class LanguageModelShape(NamedTuple):
    """The shape of a causal language model.

    Attributes:
        width: width of the residual stream.
        num_layers: number of blocks.
        num_heads: number of query heads, which share the width.
        num_kv_heads: number of key and value heads.
        inner_width: width inside the MLP.
        vocabulary: number of tokens.
    """

    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    inner_width: int
    vocabulary: int


def _gpt(width: int, num_layers: int, num_heads: int) -> LanguageModelShape:
    return LanguageModelShape(width, num_layers, num_heads, num_heads, 4 * width, 50257)


GPT_SHAPES: Final = {
    "124m": _gpt(768, 12, 12),
    "350m": _gpt(1024, 24, 16),
    "774m": _gpt(1280, 36, 20),
    "1.5b": _gpt(1600, 48, 25),
    "2.7b": _gpt(2560, 32, 32),
    "6.7b": _gpt(4096, 32, 32),
    "13b": _gpt(5120, 40, 40),
}
"""Source: GPT-2 (Radford et al. 2019), and from 2.7b on table 2.1 of GPT-3 (arXiv:2005.14165)."""

LLAMA_SHAPES: Final = {
    "1b": LanguageModelShape(2048, 16, 32, 8, 8192, 128256),
    "3b": LanguageModelShape(3072, 28, 24, 8, 8192, 128256),
    "7b": LanguageModelShape(4096, 32, 32, 32, 11008, 32000),
    "8b": LanguageModelShape(4096, 32, 32, 8, 14336, 128256),
    "13b": LanguageModelShape(5120, 40, 40, 40, 13824, 32000),
    "70b": LanguageModelShape(8192, 80, 64, 8, 28672, 128256),
}
"""Source: Llama 2 (7b and 13b, arXiv:2307.09288) and Llama 3 (arXiv:2407.21783; 3.2 for 1b, 3b)."""


@final
class _Attention(nn.Module):
    """Causal attention, by query heads that share key and value heads."""

    def __init__(self, shape: LanguageModelShape, *, rotary: bool, bias: bool) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = shape.num_heads, shape.num_kv_heads
        self.rotary = rotary
        head_width = shape.width // shape.num_heads
        self.q = nn.Linear(shape.width, shape.width, bias=bias)
        self.k = nn.Linear(shape.width, shape.num_kv_heads * head_width, bias=bias)
        self.v = nn.Linear(shape.width, shape.num_kv_heads * head_width, bias=bias)
        self.out = nn.Linear(shape.width, shape.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.num_heads, -1).transpose(1, 2)
        k = self.k(x).view(batch, length, self.num_kv_heads, -1).transpose(1, 2)
        v = self.v(x).view(batch, length, self.num_kv_heads, -1).transpose(1, 2)
        if self.rotary:
            q, k = _rotate(q), _rotate(k)
        shared = self.num_heads // self.num_kv_heads
        if shared > 1:
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return y


def _rotate(x: Tensor) -> Tensor:
    """Rotate pairs of numbers by angles that grow with the position.

    Source: RoFormer, Su et al. 2021, arXiv:2104.09864.
    """
    length, width = x.shape[-2:]
    rates = 10000.0 ** (-torch.arange(0, width, 2, device=x.device) / width)
    angles = torch.outer(torch.arange(length, device=x.device), rates)
    cosine = torch.cat([angles, angles], -1).cos().to(x.dtype)
    sine = torch.cat([angles, angles], -1).sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


@final
class _Block(nn.Module):
    """Attention and an MLP, each after a norm.

    Args:
        shape: the shape of the model.
        rotary: as in a Llama: rotary attention, RMS norms, an MLP with a SiLU gate, and no biases.
            Otherwise as in a GPT: layer norms, an MLP with GELU, and biases.
    """

    def __init__(self, shape: LanguageModelShape, *, rotary: bool) -> None:
        super().__init__()
        width, inner, bias = shape.width, shape.inner_width, not rotary
        norm = nn.RMSNorm if rotary else nn.LayerNorm
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention = _Attention(shape, rotary=rotary, bias=bias)
        self.gate = nn.Linear(width, inner, bias=bias) if rotary else None
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        inner = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        z: Tensor = self.down(inner)
        return x + z


@final
class LanguageModel(nn.Module):
    """A causal language model that returns its loss.

    Args:
        shape: its shape.
        length: number of positions; None: no learned positions, but rotary ones, as in a Llama.
        num_blocks: number of blocks if not that of the shape.
    """

    def __init__(
        self, shape: LanguageModelShape, length: int | None, *, num_blocks: int | None = None
    ) -> None:
        super().__init__()
        norm = nn.RMSNorm if length is None else nn.LayerNorm
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = None if length is None else nn.Embedding(length, shape.width)
        count = shape.num_layers if num_blocks is None else num_blocks
        self.blocks = nn.ModuleList(_Block(shape, rotary=length is None) for _ in range(count))
        self.norm = norm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if length is not None:
            self.head.weight = self.tokens.weight  # GPT-2 ties them

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss.

        Shape:
            tokens: (batch, length), int64.
            targets: the same.
        """
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# ---- The models that `ebbtide plan` knows by name: neural operators and language models ----

OPERATORS: Final = {"fno1d": 1, "fno2d": 2, "fno3d": 3, "tfno": 2, "uno": 2}
"""Neural operators, and the dimensions of their grids."""

LANGUAGE_MODELS: Final[Mapping[str, Mapping[str, LanguageModelShape]]] = {
    "gpt": GPT_SHAPES,
    "llama": LLAMA_SHAPES,
}

NAMES: Final = (*OPERATORS, *LANGUAGE_MODELS)

_RESOLUTIONS: Final = {1: 8192, 2: 512, 3: 128}
_MODES: Final = {1: 64, 2: 16, 3: 16}
_RESOLUTION_STEPS: Final = {1: 64, 2: 16, 3: 8}
_SEQUENCE_STEP: Final = 256
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
        size: size of a language model, such as ``"7b"``.
    """

    resolution: int | None = None
    seq: int | None = None
    batch: int | None = None
    width: int | None = None
    modes: int | None = None
    layers: int | None = None
    size: str | None = None

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
                raise PolicyError(f"{model} has no --{name}; it takes {options}")
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
    build = _language_family if name in LANGUAGE_MODELS else _operator_family
    return build(name, options)


# ---- neural operators ---------------------------------------------------------------------------


def _operator_family(name: str, options: ModelOptions) -> TaskFamily:
    layers = () if name == "uno" else ("layers",)
    options.check(name, ("resolution", "batch", "width", "modes", *layers))
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
    width = options.width or (64 if name == "fno1d" else 32)
    modes = options.modes or _MODES[dimensions]
    depth = len(_UNO_CHANNELS) if name == "uno" else options.layers or 4
    length = options.resolution or _RESOLUTIONS[dimensions]
    if length < 2 * modes:
        raise PolicyError(
            f"--resolution {length} is too coarse for {modes} Fourier modes in each direction; "
            f"give {2 * modes} or more, or fewer --modes"
        )
    if name == "uno" and length % 2:
        raise PolicyError(f"uno halves its grid; give an even --resolution, not {length}")
    what = {"tfno": "TFNO (Tucker, rank 0.05) in", "uno": "UNO in"}.get(name, "FNO in")

    def build(size: Size) -> Task:
        assert size.length is not None
        assert size.batch is not None
        # neuralop warns that its defaults will change, and UNO prints its arguments.
        quiet = contextlib.redirect_stdout(io.StringIO())
        with torch.device("meta"), warnings.catch_warnings(), quiet:
            warnings.simplefilter("ignore")
            model = _build_operator(name, dimensions, width, modes, depth)
            x = torch.empty(size.batch, 1, *[size.length] * dimensions)
        return Task(model, x, _mean_square)

    return TaskFamily(
        title=f"{what} {dimensions}D, width {width}, {modes} modes, {depth} layers, float32",
        build=build,
        size=Size(length, options.batch or (8 if dimensions < 3 else 1)),
        length_name="resolution",
        dimensions=dimensions,
        length_step=_RESOLUTION_STEPS[dimensions],
    )


def _build_operator(name: str, dimensions: int, width: int, modes: int, depth: int) -> nn.Module:
    from neuralop.models import FNO, TFNO, UNO

    common: dict[str, Any] = {
        "in_channels": 1,
        "out_channels": 1,
        "hidden_channels": width,
        "n_layers": depth,
    }
    all_modes = (modes,) * dimensions
    model: nn.Module
    if name == "uno":
        model = UNO(
            **common,
            uno_out_channels=[times * width for times in _UNO_CHANNELS],
            uno_n_modes=[[max(1, modes // by)] * dimensions for by in _UNO_MODES],
            uno_scalings=[[scaling] * dimensions for scaling in _UNO_SCALINGS],
            channel_mlp_skip="linear",
        )
    elif name == "tfno":
        model = TFNO(all_modes, **common, factorization="tucker", rank=0.05)
    else:
        model = FNO(all_modes, **common)
    return model


def _mean_square(y: Tensor) -> Tensor:
    """Take the place of a loss against data, which saves as much: the difference, once."""
    return y.square().mean()


# ---- language models ----------------------------------------------------------------------------


def _language_family(name: str, options: ModelOptions) -> TaskFamily:
    options.check(name, ("seq", "batch", "size"))
    shapes = LANGUAGE_MODELS[name]
    size = (options.size or next(iter(shapes))).lower()
    if size not in shapes:
        raise PolicyError(f"{name} has no --size {size}; its sizes are {', '.join(shapes)}")
    shape = shapes[size]
    task = functools.partial(_language_task, name, shape)
    return TaskFamily(
        title=f"{name.upper() if name == 'gpt' else 'Llama'} {size}, {shape.num_layers} layers of "
        f"width {shape.width}, all in bfloat16",
        build=task,
        size=Size(options.seq or (1024 if name == "gpt" else 8192), options.batch or 1),
        length_name="sequence",
        length_step=_SEQUENCE_STEP,
        num_blocks=shape.num_layers,
        build_short=task,
    )


def _language_task(
    name: str, shape: LanguageModelShape, size: Size, num_blocks: int | None = None
) -> Task:
    assert size.length is not None
    assert size.batch is not None
    with torch.device("meta"):
        positions = size.length if name == "gpt" else None
        model = LanguageModel(shape, positions, num_blocks=num_blocks).bfloat16()
        tokens = torch.empty(size.batch, size.length, dtype=torch.int64)
        targets = torch.empty(size.batch, size.length, dtype=torch.int64)
    return Task(model, (tokens, targets))


# ---- A user's own model, named as ``module:function`` ----

_KNOWN: Final = ("resolution", "seq", "batch")
_RETURNS: Final = "(model, batch) or (model, batch, loss)"


def load_family(address: str, options: ModelOptions) -> TaskFamily:
    """Return the training step that a user's function makes.

    The function is called with the numbers among ``resolution``, ``seq`` and ``batch`` that it has
    parameters for. It is called on the meta device first, where tensors have no memory, and as it
    is if that fails.

    Args:
        address: ``module:function``; the module is looked for in the current directory, too.
        options: what the user said.

    Raises:
        PolicyError: there is no such function, it takes no such option, or it fails.
    """
    options.check(address, _KNOWN)
    if options.resolution is not None and options.seq is not None:
        raise PolicyError("give --resolution or --seq, not both")
    function = find_function(address)
    taken = _parameters(address, function)
    given = {name: getattr(options, name) for name in _KNOWN if getattr(options, name) is not None}
    for name in given:
        if name not in taken:
            raise PolicyError(
                f"{address} has no parameter {name!r}, so --{name} means nothing to it; write "
                f"def {function.__name__}({name}=...)"
            )
    for name, default in taken.items():
        if name in given:
            continue
        if default is inspect.Parameter.empty:
            raise PolicyError(f"{address} needs to know its {name}: give --{name}")
        if isinstance(default, int):
            given[name] = default
    length_name = next((name for name in ("resolution", "seq") if name in given), "")
    size = Size(given.get(length_name), given.get("batch"))
    return TaskFamily(
        title=address,
        build=functools.partial(_build, address, function, length_name),
        size=size,
        length_name={"seq": "sequence"}.get(length_name, length_name),
        dimensions=0,
        length_step=16,
    )


def find_function(address: str) -> Callable[..., Any]:
    """Import ``module:function``; the module is looked for in the current directory, too.

    Raises:
        PolicyError: there is no such function.
    """
    module_name, _, name = address.partition(":")
    if not module_name or not name:
        raise PolicyError(f"{address!r} is not of the form module:function, such as train:build")
    try:
        with _current_directory():
            module = importlib.import_module(module_name.removesuffix(".py").replace("/", "."))
    except Exception as error:
        raise PolicyError(
            f"the module {module_name!r} cannot be imported from here "
            f"({type(error).__name__}: {error})"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        has = f"its functions are {', '.join(functions)}" if functions else "it has no functions"
        raise PolicyError(f"{module_name} has no function {name!r}; {has}")
    return function  # type: ignore[no-any-return]


@contextlib.contextmanager
def _current_directory() -> Iterator[None]:
    """Let modules be imported from the current directory, as ``python -m`` does."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)


def _parameters(address: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameters among `_KNOWN`, with their defaults.

    Raises:
        PolicyError: another parameter has no default.
    """
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in _KNOWN:
            found[name] = parameter.default
        elif parameter.default is parameter.empty:
            raise PolicyError(
                f"{address} has a parameter {name!r} without a default; `ebbtide plan` gives "
                f"resolution, seq and batch only"
            )
    return found


def _build(address: str, function: Callable[..., Any], length_name: str, size: Size) -> Task:
    given = {length_name: size.length, "batch": size.batch}
    arguments = {name: value for name, value in given.items() if value is not None}
    with _current_directory():
        try:
            try:
                with torch.device("meta"):
                    made = function(**arguments)
            except Exception:
                made = function(**arguments)
        except Exception as error:
            called = ", ".join(f"{name}={value}" for name, value in arguments.items())
            raise PolicyError(
                f"{address} fails when it is called with ({called}): "
                f"{type(error).__name__}: {error}"
            ) from error
    return read_task(address, made)


def read_task(address: str, made: Any) -> Task:
    """Return the training step that a user's function has made.

    Raises:
        PolicyError: it has made something else.
    """
    parts = made if isinstance(made, tuple) else (made,)
    if len(parts) not in (2, 3) or not isinstance(parts[0], nn.Module):
        kinds = ", ".join(type(each).__name__ for each in parts)
        raise PolicyError(f"{address} must return {_RETURNS} with an nn.Module first, not {kinds}")
    if len(parts) == 3 and parts[2] is not None and not callable(parts[2]):
        raise PolicyError(
            f"the loss that {address} returns must be a function of the model's output, not a "
            f"{type(parts[2]).__name__}"
        )
    return Task(*parts)


# ---- Reads what a user says to `ebbtide plan`: the model, the machine and the budget ----


def read_model(name: str, options: ModelOptions) -> TaskFamily:
    """Return the training step of a built-in model or of ``module:function``.

    Raises:
        PolicyError: there is no such model, or an option is wrong.
        ImportError: the model needs a package that is not installed.
    """
    if name.lower() in NAMES:
        return build_family(name.lower(), options)
    if ":" in name:
        return load_family(name, options)
    near = difflib.get_close_matches(name.lower(), NAMES, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise PolicyError(
        f"there is no model {name!r}{hint}; give one of {', '.join(NAMES)}, or module:function for "
        f"your own"
    )


def read_hardware(text: str) -> Hardware:
    """Return a preset, or what a file of ``ebbtide doctor --json`` says.

    Raises:
        PolicyError: there is neither such a preset nor such a file, or the file is something else.
    """
    path = Path(text)
    if path.suffix == ".json" or path.is_file():
        try:
            content = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PolicyError(
                f"--hardware {text} cannot be read ({error}); `ebbtide doctor --json > {text}` "
                f"writes such a file"
            ) from None
        try:
            return Hardware.from_json(content)
        except PolicyError as error:
            raise PolicyError(f"--hardware {text}: {error}") from None
    return Hardware.named(text, achievable=True)


def read_budget_bytes(text: str, hardware: Hardware) -> int:
    """Return a budget such as ``"24GiB"``, or ``"90%"`` of the device's memory, in bytes.

    Raises:
        PolicyError: it cannot be read, or is more than the device has.
    """
    device_bytes = hardware.device_memory_bytes
    size_bytes = parse_budget_bytes(text, device_bytes, name="--budget")
    if size_bytes > device_bytes:
        raise PolicyError(
            f"--budget={text!r} is more than {hardware.name} has ({device_bytes / 1e9:g} GB, "
            f"{device_bytes / 2**30:.1f} GiB); give less, or other --hardware"
        )
    return size_bytes
