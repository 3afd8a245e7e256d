"""Compiles the device, once for each state of its sources, of torch and of the compiler's flags."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCES = Path(__file__).parents[1] / "csrc"
FLAGS = ("-O1", "-std=c++20", "-fPIC", "-w")
LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch")


class NoCompilerError(RuntimeError):
    """The device cannot be built here."""


def build() -> Path:
    """Return the compiled device, from the cache if it is there.

    The cache is $XDG_CACHE_HOME/ebbtide/softdevice, by default in ~/.cache. It can be deleted at
    any time.

    Raises:
        NoCompilerError: there is no C++ compiler.
        RuntimeError: the compiler refused the sources; says what it printed.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ebbtide/softdevice"
    compiler = _compiler()
    # Resolved, so that checkouts that share an environment by a link share what is compiled.
    includes = [f"-I{Path(folder).resolve()}" for folder in cpp_extension.include_paths()]
    links = [f"-L{Path(folder).resolve()}" for folder in cpp_extension.library_paths()]
    about = (compiler, torch.__version__, sys.version, *FLAGS, *LIBRARIES, *includes, *links)
    headers = sorted(SOURCES.glob("*.h"))
    # Each file by itself, so that a change to one of them compiles that one.
    objects = {
        cache / f"{source.stem}-{_hash(about, source, *headers)}.o": source
        for source in sorted(SOURCES.glob("*.cpp"))
    }
    library = cache / f"softdevice-{_hash([file.name for file in objects])}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    print("building the software accelerator (about a minute, once)", file=sys.stderr, flush=True)
    missing = [file for file in objects if not file.exists()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(
            pool.map(
                lambda file: _make(file, compiler, "-c", *FLAGS, *includes, str(objects[file])),
                missing,
            )
        )
    _make(library, compiler, "-shared", *map(str, objects), *links, *LIBRARIES)
    return library


def _compiler() -> str:
    name = os.environ.get("CXX", "g++")
    found = shutil.which(name)
    if found is None:
        raise NoCompilerError(
            f"the software accelerator is C++, and there is no compiler {name!r} on PATH: install "
            "g++ 11 or newer, or name another compiler in the environment variable CXX"
        )
    return found


def _hash(names: list[str] | tuple[str, ...], *files: Path) -> str:
    digest = hashlib.sha256("\0".join(names).encode())
    for file in files:
        digest.update(b"\0" + file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _make(file: Path, *command: str) -> None:
    """Run the compiler, which makes `file`. Other processes see it only once it is whole."""
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    finished = subprocess.run(
        [*command, "-o", str(partial)], capture_output=True, text=True, check=False
    )
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{finished.stderr[-8000:]}")
    os.replace(partial, file)
