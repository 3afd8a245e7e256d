"""A user's own model, named as ``module:function``."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ebbtide.errors import PolicyError
from ebbtide.studies.models.built_in_models import ModelOptions
from ebbtide.studies.tasks import Size, Task, TaskFamily

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
    function = _find(address)
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


def _find(address: str) -> Callable[..., Any]:
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
    arguments = {
        name: value
        for name, value in ((length_name, size.length), ("batch", size.batch))
        if value is not None
    }
    with _current_directory():
        try:
            with torch.device("meta"):
                made = function(**arguments)
        except Exception:
            try:
                made = function(**arguments)
            except Exception as error:
                called = ", ".join(f"{name}={value}" for name, value in arguments.items())
                raise PolicyError(
                    f"{address} fails when it is called with ({called}): "
                    f"{type(error).__name__}: {error}"
                ) from error
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        kinds = (
            f"({', '.join(type(each).__name__ for each in made)})"
            if isinstance(made, tuple)
            else f"a {type(made).__name__}"
        )
        raise PolicyError(f"{address} must return {_RETURNS} with an nn.Module first, not {kinds}")
    if len(made) == 3 and made[2] is not None and not callable(made[2]):
        raise PolicyError(
            f"the loss that {address} returns must be a function of the model's output, not a "
            f"{type(made[2]).__name__}"
        )
    return Task(*made)
