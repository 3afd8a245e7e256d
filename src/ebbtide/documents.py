"""JSON files of steps, plans and machines: written from dataclasses, and read by their types."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import types
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ebbtide.errors import PolicyError

T = TypeVar("T")


def read_document(text: str, form: str, version: int, key: str, advice: str) -> dict[str, Any]:
    """Return the object under one key of a JSON document of a known format and version.

    Args:
        text: the document.
        form: what its "format" must be.
        version: what its "version" must be.
        key: the key of the object.
        advice: how to get such a document.

    Raises:
        PolicyError: the text is something else.
    """
    try:
        content = json.loads(text)
    except (ValueError, TypeError) as error:
        raise PolicyError(f"this is not the JSON of an {form}: {error}; {advice}") from None
    if not isinstance(content, dict) or content.get("format") != form:
        raise PolicyError(f'this is not the JSON of an {form}: "format" is not {form!r}; {advice}')
    found = content.get("version")
    if found != version or isinstance(found, bool):
        raise PolicyError(
            f"this {form} has version {found!r}, and this ebbtide reads version {version}; {advice}"
        )
    entry = content.get(key)
    if not isinstance(entry, dict):
        raise PolicyError(f"{key!r} of the {form} must be an object, got {entry!r}; {advice}")
    return dict(entry)


def read_as(kind: type[T], entry: Mapping[str, Any]) -> T:
    """Return the dataclass that an object of a JSON document stands for.

    Raises:
        PolicyError: a key is missing or not known, or a value is not of the field's type.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    check_keys(kind.__name__, entry, fields)
    optional = (dataclasses.MISSING, dataclasses.MISSING)
    missing = [
        name
        for name, field in fields.items()
        if (field.default, field.default_factory) == optional and name not in entry
    ]
    if missing:
        raise PolicyError(f"the {kind.__name__} lacks {', '.join(missing)}")
    types_of = _types_of(kind)  # type: ignore[arg-type]
    return kind(**{name: _read(types_of[name], name, value) for name, value in entry.items()})


@functools.cache
def _types_of(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)  # it takes longer than all else


def check_keys(what: str, given: Collection[str], known: Collection[str]) -> None:
    """Check that all keys are known.

    Raises:
        PolicyError: one is not.
    """
    unknown = sorted(set(given) - set(known))
    if unknown:
        near = difflib.get_close_matches(unknown[0], list(known), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PolicyError(f"the {what} has unknown keys: {', '.join(unknown)}{hint}")


def check_number(what: str, value: Any, *, whole: bool, may_be_zero: bool = True) -> None:
    """Check a figure.

    Args:
        what: what it is a figure of.
        value: the figure.
        whole: whether it must be a whole number.
        may_be_zero: whether it may be 0.

    Raises:
        PolicyError: it is not a finite number, or is too small.
    """
    kind: Any = int if whole else int | float
    right = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
    if not right or value < 0 or not (value or may_be_zero):
        wanted = "a whole number" if whole else "a number"
        least = "0 or more" if may_be_zero else "more than 0"
        raise PolicyError(f"{what} must be {wanted}, {least}; got {value!r}")


def _read(kind: Any, name: str, value: Any) -> Any:
    """Return a value of a field of this type; whoever has the field checks numbers."""
    if get_origin(kind) is types.UnionType:
        if value is None:
            return None
        kind = get_args(kind)[0]
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise PolicyError(f"{name} must be a list, got {value!r}")
        return tuple(_read(get_args(kind)[0], name, each) for each in value)
    if get_origin(kind) is Mapping:
        if not isinstance(value, dict):
            raise PolicyError(f"{name} must be an object, got {value!r}")
        of_key, of_value = get_args(kind)
        return {_read(of_key, name, k): _read(of_value, name, each) for k, each in value.items()}
    if not isinstance(kind, type):
        return value
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise PolicyError(f"{name} must be an object, got {value!r}")
        return read_as(kind, value)
    if issubclass(kind, Enum):
        return _read_enum(kind, name, value)
    if issubclass(kind, tuple):
        return _read_tuple(kind, name, value)
    if kind in (bool, int, str) and type(value) is not kind:
        raise PolicyError(f"{name} must be of the type {kind.__name__}, got {value!r}")
    return value


def _read_enum(kind: type[Enum], name: str, value: Any) -> Enum:
    """Return the member of this value; or of this name, where values are texts for people."""
    try:
        return kind.__members__.get(str(value)) or kind(value)
    except ValueError:
        known = ", ".join(repr(each.value) for each in kind)
        raise PolicyError(f"{name} must be one of {known}, got {value!r}") from None


def _read_tuple(kind: type[tuple[Any, ...]], name: str, value: Any) -> Any:
    """Return a named tuple, which JSON has as a list."""
    fields = _types_of(kind)
    if not isinstance(value, list) or len(value) != len(fields):
        raise PolicyError(f"{name} must be [{', '.join(fields)}], got {value!r}")
    pairs = zip(fields.values(), value, strict=True)
    return kind(*(_read(each, name, part) for each, part in pairs))
