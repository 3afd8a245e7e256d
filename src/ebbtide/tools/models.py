"""What a study is about: a model, its batch and its loss."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import pkgutil
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ebbtide.devices.hardware import Hardware
from ebbtide.errors import PolicyError
from ebbtide.runtime.torch_internals import tree_leaves
from ebbtide.units import parse_budget_bytes


class Task(NamedTuple):
    """One training step.

    Attributes:
        model: the model, on the meta device or on the CPU.
        batch: what it is called with.
        loss: computes the loss from what it returns; None: see `profile_with_fake_tensors`.
        title: what it is, for people: the model, and its options in words.
        options: such as ``resolution`` or ``seq``, and ``batch``, as far as it has them.
    """

    model: nn.Module
    batch: Any
    loss: Callable[[Any], Tensor] | None = None
    title: str = ""
    options: Mapping[str, int | str] = {}


# ---- How a model is called with a batch, and the loss that a user need not give ----


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with one argument, a tuple or list of them, or a mapping of them by name."""
    if isinstance(batch, inspect.BoundArguments):
        return model(*batch.args, **batch.kwargs)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _mean_square_of(output: Tensor) -> Tensor:
    real = torch.view_as_real(output) if output.is_complex() else output.float()
    return real.square().mean()


def default_loss(output: Any, reduce: Callable[[Tensor], Tensor] = _mean_square_of) -> Tensor:
    """Return the loss of a model that was given none: its attribute ``loss``, or a sum.

    Args:
        output: what the model has returned.
        reduce: makes one number of each tensor in it that depends on a parameter.

    Raises:
        PolicyError: there is no such tensor.
    """
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    outputs = [
        reduce(leaf)
        for leaf in tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not outputs:
        raise PolicyError("the model returns no tensor that depends on a parameter; give loss=")
    return torch.stack(outputs).sum() if len(outputs) > 1 else outputs[0]


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
    """

    def __init__(self, shape: LanguageModelShape, length: int | None) -> None:
        super().__init__()
        norm = nn.RMSNorm if length is None else nn.LayerNorm
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = None if length is None else nn.Embedding(length, shape.width)
        blocks = (_Block(shape, rotary=length is None) for _ in range(shape.num_layers))
        self.blocks = nn.ModuleList(blocks)
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


# ---- The models that `ebbtide plan` knows by name, as functions like those that users write ----


def _make_operator(
    kind: str, dimensions: int, *, resolution: int, batch: int, width: int, modes: int, layers: int
) -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    # neuralop warns that its defaults will change, and UNO prints its arguments.
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            from neuralop import models
        except ImportError as error:
            raise ImportError(
                f"{kind} comes from neuraloperator, which is not installed: pip install "
                f'"ebbtide[neuralop]". gpt, llama and module:function work without it'
            ) from error
        shape: dict[str, Any] = {"n_modes": (modes,) * dimensions}
        if kind == "TFNO":
            shape |= {"factorization": "tucker", "rank": 0.05}
        elif kind == "UNO":  # all layers but the first and the last one are on a coarse grid
            inner = layers - 2
            all_modes = modes, *[max(1, modes // 2)] * inner, modes
            scalings = 1, 0.5, *[1] * (inner - 1), 2
            shape = {
                "uno_out_channels": [width, *[2 * width] * inner, width],
                "uno_n_modes": [[each] * dimensions for each in all_modes],
                "uno_scalings": [[each] * dimensions for each in scalings],
                "channel_mlp_skip": "linear",
            }
        common = {"in_channels": 1, "out_channels": 1, "hidden_channels": width, "n_layers": layers}
        model: nn.Module = getattr(models, kind)(**common, **shape)
    return model, torch.empty(batch, 1, *[resolution] * dimensions), _mean_square


def _mean_square(y: Tensor) -> Tensor:
    """Take the place of a loss against data, which saves as much: the difference, once."""
    return y.square().mean()


def _make_language_model(
    shapes: Mapping[str, LanguageModelShape], *, seq: int, batch: int, size: str
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    if size.lower() not in shapes:
        raise PolicyError(f"there is no --size {size} of it; its sizes are {', '.join(shapes)}")
    model = LanguageModel(shapes[size.lower()], seq if shapes is GPT_SHAPES else None).bfloat16()
    tokens, targets = (torch.empty(batch, seq, dtype=torch.int64) for _ in range(2))
    return model, (tokens, targets)


def _operator(kind: str, dimensions: int, layers: int = 4, **more: int) -> Callable[..., Any]:
    return functools.partial(_make_operator, kind, dimensions, layers=layers, **more)


BUILT_IN: Final[Mapping[str, Callable[..., Any]]] = {
    "fno1d": _operator("FNO", 1, resolution=8192, batch=8, width=64, modes=64),
    "fno2d": _operator("FNO", 2, resolution=512, batch=8, width=32, modes=16),
    "fno3d": _operator("FNO", 3, resolution=128, batch=1, width=32, modes=16),
    "tfno": _operator("TFNO", 2, resolution=512, batch=8, width=32, modes=16),
    "uno": _operator("UNO", 2, resolution=512, batch=8, width=32, modes=16, layers=5),
    "gpt": functools.partial(_make_language_model, GPT_SHAPES, seq=1024, batch=1, size="124m"),
    "llama": functools.partial(_make_language_model, LLAMA_SHAPES, seq=8192, batch=1, size="1b"),
}
"""Their options are their keyword arguments."""

# ---- Reads what a user says to `ebbtide plan`: the model, the machine and the budget ----

_OPTIONS: Final = ("resolution", "seq", "batch", "width", "modes", "layers", "size")


def read_model(name: str, **options: int | str | None) -> Task:
    """Make the training step of a built-in model or of ``module:function``.

    Args:
        name: one of `BUILT_IN`, or a function of the user's.
        options: ``resolution``, ``seq``, ``batch``, ``width``, ``modes``, ``layers`` and ``size``,
            of which the model takes some; None: not said.

    Raises:
        PolicyError: there is no such model, or it takes no such option.
    """
    if ":" in name:
        function = find_function(name)
    elif (name := name.lower()) in BUILT_IN:
        function = BUILT_IN[name]
    else:
        raise PolicyError(
            f"there is no model {name!r}; give one of {', '.join(BUILT_IN)}, or "
            f"module:function for your own"
        )
    chosen = _options_of(name, function)
    for key, value in options.items():
        if value is None:
            continue
        if key not in chosen:
            takes = ", ".join(f"--{each}" for each in chosen) or "none"
            raise PolicyError(f"{name} has no --{key}; it takes {takes}")
        if isinstance(value, int) and value < 1:
            raise PolicyError(f"--{key} must be 1 or more, got {value}")
        chosen[key] = value
    for key, value in chosen.items():
        if value is inspect.Parameter.empty:
            raise PolicyError(f"{name} needs to know its {key}: give --{key}")
    task = _make(name, function, chosen)
    title = ", ".join([name, *(f"{key} {value}" for key, value in chosen.items())])
    return task._replace(title=title, options=chosen)


def _options_of(address: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return those parameters of a model's function that are options, with their defaults.

    Raises:
        PolicyError: another parameter has no default.
    """
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in _OPTIONS:
            found[name] = parameter.default
        elif parameter.default is parameter.empty:
            raise PolicyError(
                f"{address} has a parameter {name!r} without a default; `ebbtide plan` gives "
                f"{', '.join(_OPTIONS)} only"
            )
    return found


def _make(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Task:
    try:
        try:
            with torch.device("meta"):
                made = function(**arguments)
        except Exception:
            made = function(**arguments)
    except (PolicyError, ImportError):
        raise
    except Exception as error:
        called = ", ".join(f"{key}={value}" for key, value in arguments.items())
        raise PolicyError(
            f"{name} fails when it is called with ({called}): {type(error).__name__}: {error}"
        ) from error
    return read_task(name, made)


def find_function(address: str) -> Callable[..., Any]:
    """Import ``module:function``; from now on, modules of the current directory can be imported.

    Raises:
        PolicyError: there is no such function.
    """
    sys.path.insert(0, str(Path.cwd()))  # as for ``python -m``
    try:
        function = pkgutil.resolve_name(address.replace(".py:", ":").replace("/", "."))
    except Exception as error:
        raise PolicyError(
            f"{address!r} cannot be imported from here as module:function, such as train:build "
            f"({type(error).__name__}: {error})"
        ) from error
    if not callable(function):
        raise PolicyError(f"{address!r} is no function")
    return function  # type: ignore[no-any-return]


def read_task(address: str, made: Any) -> Task:
    """Return the training step that a user's function has made.

    Raises:
        PolicyError: it has made something else.
    """
    parts = made if isinstance(made, tuple) else (made,)
    is_loss = len(parts) == 2 or (len(parts) == 3 and (parts[2] is None or callable(parts[2])))
    if not is_loss or not isinstance(parts[0], nn.Module):
        kinds = ", ".join(type(each).__name__ for each in parts)
        raise PolicyError(
            f"{address} must return (model, batch) or (model, batch, loss) with an nn.Module first "
            f"and a function last, not {kinds}"
        )
    return Task(*parts)


def read_hardware(text: str) -> Hardware:
    """Return a preset, or what a file of ``ebbtide doctor --json`` says.

    Raises:
        PolicyError: there is neither such a preset nor such a file, or the file is something else.
    """
    path = Path(text)
    if path.suffix == ".json" or path.is_file():
        try:
            return Hardware.from_json(path.read_text())
        except (OSError, UnicodeDecodeError, PolicyError) as error:
            raise PolicyError(
                f"--hardware {text}: {error}; `ebbtide doctor --json > {text}` writes such a file"
            ) from None
    return Hardware.named(text)


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
