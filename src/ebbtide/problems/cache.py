"""Cache arrays on disk under a key that records the parameters they were made with."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ebbtide.interface.warning import warn_user

Arrays = dict[str, NDArray[Any]]


def cache_directory(chosen: str | os.PathLike[str] | None = None) -> Path:
    """Return ``chosen`` if given, else ``$EBBTIDE_CACHE``, else the user's cache directory."""
    if chosen is not None:
        return Path(chosen).expanduser()
    if from_environment := os.environ.get("EBBTIDE_CACHE"):
        return Path(from_environment).expanduser()
    return _user_cache_root() / "ebbtide"


def _user_cache_root() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def cache_path(directory: Path, name: str, key: str) -> Path:
    """Return the path of the file for ``key``: a readable name, then a hash of the key."""
    return directory / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"


def read_cached(path: Path, key: str, names: Sequence[str]) -> Arrays | None:
    """Read the arrays ``names`` stored under ``key``.

    Returns:
        The arrays. None if the file is missing, damaged (zip members carry checksums) or stored
        under another key; a warning reports the last two cases.

    Raises:
        OSError: The file exists but cannot be opened.
    """
    try:
        file = path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        return None
    with file:
        try:
            return _parse(file, key, names)
        except _DAMAGE as error:
            problem = str(error) or type(error).__name__
    warn_user(
        "cache-damaged",
        f"cache file {path} cannot be used ({problem}) and will be made again; nothing needs to be "
        f"done, unless it happens again: then check the disk, or choose another directory",
    )
    return None


# The errors that NumPy and zipfile raise for damaged bytes. OSError is one of them because a
# damaged offset makes a seek fail.
_DAMAGE = (zipfile.BadZipFile, ValueError, TypeError, LookupError, EOFError, RuntimeError, OSError)


def _parse(file: IO[bytes], key: str, names: Sequence[str]) -> Arrays:
    with np.load(file, allow_pickle=False) as stored:
        if str(stored["key"]) != key:
            raise ValueError("it was made with other parameters")
        return {name: stored[name] for name in names}


def write_cached(path: Path, key: str, arrays: Arrays) -> None:
    """Store the arrays under ``key``.

    The file is replaced atomically: a reader sees the old file or the new one, never a part.

    Raises:
        OSError: The directory cannot be written to; the message says how to choose another.
    """
    with _temporary_file(path.parent) as temporary:
        members: dict[str, Any] = {"key": np.array(key), **arrays}
        np.savez(temporary, **members)
        temporary.close()
        os.replace(temporary.name, path)


def check_writable(directory: Path) -> None:
    """Check that a file can be created in ``directory``; create the directory if it is missing.

    Call this before a long computation, so that its result is sure to find a place.

    Raises:
        OSError: As for ``write_cached``.
    """
    with _temporary_file(directory):
        pass


@contextlib.contextmanager
def _temporary_file(directory: Path) -> Iterator[IO[bytes]]:
    """Open a new file in ``directory`` and delete it on exit, unless the caller has moved it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, suffix=".part", delete=False) as file:
            try:
                yield file
            finally:
                file.close()
                Path(file.name).unlink(missing_ok=True)
    except OSError as error:
        advice = "cannot write the cache; pass another cache_dir or set EBBTIDE_CACHE"
        raise OSError(error.errno, f"{advice} ({error.strerror})", str(directory)) from error
