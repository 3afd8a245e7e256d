"""Runs a script or a module as ``__main__``, as ``python`` and ``python -m`` do."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import sys
import types
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, final

from ebbtide.errors import PolicyError


class ScriptNotFoundError(PolicyError):
    """There is no such script, or it cannot be run."""


class _Found(NamedTuple):
    """Where the code of ``__main__`` is.

    Attributes:
        path: its file, which becomes ``__file__``.
        read: returns its code.
        spec: how it was imported; None for a file that was named.
        search: what becomes the first entry of ``sys.path``.
        shown: what becomes ``sys.argv[0]``.
    """

    path: str
    read: Callable[[], types.CodeType]
    spec: importlib.machinery.ModuleSpec | None
    search: str
    shown: str


@final
class MainScript:
    """A script, or a module that is run like one.

    Args:
        name: path of a file, or of a directory or archive with a ``__main__.py``; or a module.
        arguments: what follows it on the command line.
        is_module: whether ``name`` is the name of a module.

    Raises:
        ScriptNotFoundError: there is no such script.
    """

    def __init__(self, name: str, arguments: Sequence[str], *, is_module: bool) -> None:
        self.name = name
        self.arguments = list(arguments)
        self._is_module = is_module
        if not is_module and not os.path.exists(name):
            raise ScriptNotFoundError(f"there is no file {name}")

    def run(self) -> None:
        """Run it. What it raises is raised here.

        Raises:
            ScriptNotFoundError: the module cannot be found, or a directory has no ``__main__.py``.
        """
        before = sys.modules["__main__"]
        _set_search_path(os.getcwd() if self._is_module else "")  # first: it finds the module
        sys.argv[:] = ["-m" if self._is_module else self.name, *self.arguments]
        found = _find_module(self.name) if self._is_module else _find_file(self.name)
        _set_search_path(found.search)
        sys.argv[0] = found.shown
        module = _make_main(found)
        sys.modules["__main__"] = module
        code = found.read()
        exec(code, module.__dict__)
        del before  # until now, or its globals would have gone while its code runs


def script_frames(error: BaseException) -> types.TracebackType | None:
    """Return the traceback of an error without the frames of ebbtide that run and watch the script.

    Python prints such a traceback as it would if it had run the script itself.
    """
    kept = []
    trace = error.__traceback__
    while trace is not None:
        kept.append(trace)
        trace = trace.tb_next
    ours = [number for number, each in enumerate(kept) if _is_ours(each)]
    begin = next((n for n, each in enumerate(kept) if _is_main(each)), max(ours, default=-1) + 1)
    kept = [each for each in kept[begin:] if not _is_ours(each)]
    for number, each in enumerate(kept):
        each.tb_next = kept[number + 1] if number + 1 < len(kept) else None
    return kept[0] if kept else None


def _is_main(trace: types.TracebackType) -> bool:
    return trace.tb_frame.f_globals is vars(sys.modules["__main__"])


def _is_ours(trace: types.TracebackType) -> bool:
    return Path(trace.tb_frame.f_code.co_filename).parent == Path(__file__).parent


def _set_search_path(first: str) -> None:
    """Set the entry of ``sys.path`` that Python sets from what it runs."""
    if not getattr(sys.flags, "safe_path", False):  # python -P has no such entry
        sys.path[0] = first


def _find_file(name: str) -> _Found:
    path = os.path.abspath(name)
    if os.path.isdir(name) or zipfile.is_zipfile(name):
        spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
        if spec is None:
            raise ScriptNotFoundError(f"{name} has no __main__.py, so it cannot be run")
        return _Found(spec.origin or name, lambda: _read_spec(spec), spec, path, name)
    search = os.path.dirname(os.path.realpath(name))
    return _Found(path, lambda: _read_file(path), None, search, name)


def _find_module(name: str) -> _Found:
    """Find a module, or the ``__main__`` of a package. Packages around it are imported."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        if isinstance(error, ImportError) and not _is_missing(error, name):
            raise  # the package itself failed to import something
        spec = None
    if spec is None:
        raise ScriptNotFoundError(f"there is no module named {name}")
    if spec.submodule_search_locations is not None:
        if name.endswith(".__main__"):
            raise ScriptNotFoundError(f"{name} is a package and cannot be run")
        return _find_module(f"{name}.__main__")
    path = spec.origin or name
    return _Found(path, lambda: _read_spec(spec), spec, os.getcwd(), path)


def _is_missing(error: ImportError, name: str) -> bool:
    return error.name is not None and (name == error.name or name.startswith(f"{error.name}."))


def _read_file(path: str) -> types.CodeType:
    with io.open_code(path) as file:
        compiled = pkgutil.read_code(file)  # of a .pyc file
    if compiled is not None:
        return compiled  # type: ignore[no-any-return]
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _read_spec(spec: importlib.machinery.ModuleSpec) -> types.CodeType:
    read = getattr(spec.loader, "get_code", None)
    code = None if read is None else read(spec.name)
    if code is None:
        raise ScriptNotFoundError(f"{spec.name} has no Python code that could be run")
    return code  # type: ignore[no-any-return]


def _make_main(found: _Found) -> types.ModuleType:
    module = types.ModuleType("__main__")
    spec = found.spec
    module.__file__ = found.path
    module.__spec__ = spec
    module.__package__ = None if spec is None else spec.parent
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", found.path)
    if spec is not None:
        module.__loader__ = spec.loader
    vars(module).update(__builtins__=sys.modules["builtins"], __annotations__={})
    vars(module)["__cached__"] = None if spec is None else spec.cached
    return module
