"""Generate samples of the Darcy problem (coefficient and solution) and cache them on disk."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import operator
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ebbtide.problems.cache import (
    cache_directory,
    cache_path,
    check_writable,
    read_cached,
    write_cached,
)
from ebbtide.problems.fields import (
    MIN_RESOLUTION,
    check_integer,
    gaussian_field,
    solve_elliptic,
)

Array32 = NDArray[np.float32]

# Part of every cache key. Increase it whenever a change makes the same spec give other numbers.
FORMAT_VERSION = 1
# Below this resolution a sample takes a few ms of short NumPy calls, which threads cannot speed up
# because they only wait for one another.
THREADED_RESOLUTION = 96


class Split(enum.Enum):
    """A stream of samples. Streams share no random numbers; the value is the stream's index."""

    TRAIN = 0
    TEST = 1


@dataclasses.dataclass(frozen=True)
class DarcySpec:
    """Everything that determines the numbers of sample ``i``.

    The number of samples is not part of the spec, because sample ``i`` does not depend on it.

    Args:
        resolution: Nodes along each side, boundary included; at least 4.
        split: ``Split.TRAIN`` or ``Split.TEST``.
        seed: Random seed, 0 or more.
        low: Coefficient where the Gaussian field is negative.
        high: Coefficient elsewhere.
        forcing: Right-hand side, constant over the square.
        alpha: Smoothness of the Gaussian field (``fields.gaussian_field``).
        tau: Inverse correlation length of the Gaussian field, in units of 1 / side of the square.
        refinement: The problem is drawn and solved on a grid this many times finer, and every
            ``refinement``-th node is kept. With 1, each pair satisfies the discrete equation on its
            own grid.

    Raises:
        ValueError: A value is outside its range.
    """

    resolution: int
    split: Split = Split.TRAIN
    seed: int = 0
    low: float = 3.0
    high: float = 12.0
    forcing: float = 1.0
    alpha: float = 2.0
    tau: float = 3.0
    refinement: int = 1

    def __post_init__(self) -> None:
        check_integer("resolution", self.resolution, least=MIN_RESOLUTION)
        check_integer("seed", self.seed, least=0)
        check_integer("refinement", self.refinement, least=1)
        if not 0 < self.low < self.high < math.inf:
            raise ValueError(f"need 0 < low < high, got low={self.low} and high={self.high}")
        if not (self.alpha > 1 and self.tau > 0 and math.isfinite(self.alpha + self.tau)):
            raise ValueError(f"need alpha > 1 and tau > 0, got {self.alpha} and {self.tau}")
        if not math.isfinite(self.forcing):
            raise ValueError(f"forcing must be finite, got {self.forcing}")

    def key(self) -> str:
        """Return the cache key of the spec: every parameter and the format version, as JSON."""
        fields = dataclasses.asdict(self) | {"split": self.split.name, "format": FORMAT_VERSION}
        return json.dumps(fields, sort_keys=True, default=operator.index)


class DarcySamples(NamedTuple):
    """Coefficients ``a`` and the corresponding solutions ``u``.

    Shape:
        a: (n, resolution, resolution), float32. u: the same.
    """

    a: torch.Tensor
    u: torch.Tensor


def generate_darcy(
    spec: DarcySpec,
    n_samples: int,
    *,
    first: int = 0,
    workers: int | None = None,
    progress: bool | None = None,
) -> DarcySamples:
    """Draw coefficients and solve for the pressure, without touching the cache.

    Sample ``i`` depends on the spec and on ``i`` alone. With the same NumPy and SciPy on the same
    kind of processor it has the same bits whatever ``n_samples``, ``first`` and ``workers`` are.

    Args:
        spec: Determines the samples.
        n_samples: Number of samples.
        first: Index of the first sample.
        workers: Number of threads. None means torch's number of threads, or one on small grids.
        progress: Whether to draw a progress bar on stderr. None means only if stderr is a terminal.

    Returns:
        Samples ``first`` to ``first + n_samples - 1``.

    Raises:
        ValueError: A count is out of range.

    Source:
        Li et al., Fourier Neural Operator for Parametric Partial Differential Equations, ICLR
        2021, section 5.2 and appendix A.3.2.
    """
    check_integer("n_samples", n_samples, least=1)
    check_integer("first", first, least=0)
    if workers is None:
        workers = torch.get_num_threads() if _solved_on(spec) >= THREADED_RESOLUTION else 1
    check_integer("workers", workers, least=1)
    shape = (n_samples, spec.resolution, spec.resolution)
    samples = DarcySamples(torch.empty(shape), torch.empty(shape))
    pairs = _solve_all(spec, range(first, first + n_samples), workers)
    for i, (a, u) in enumerate(_with_progress(pairs, spec, n_samples, progress)):
        samples.a[i] = torch.from_numpy(a)
        samples.u[i] = torch.from_numpy(u)
    return samples


def load_darcy(
    spec: DarcySpec,
    n_samples: int,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    progress: bool | None = None,
) -> DarcySamples:
    """Return the first ``n_samples`` samples, reading from the cache those that it has.

    One file holds all samples of a spec. If more are asked for than it has, only the missing ones
    are computed, and the file grows.

    Args:
        spec: Determines the samples.
        n_samples: Number of samples.
        cache_dir: Directory of the cache. None means ``$EBBTIDE_CACHE``, else ``ebbtide`` in the
            user's cache directory.
        workers: As for ``generate_darcy``.
        progress: As for ``generate_darcy``.

    Raises:
        ValueError: A count is out of range.
        OSError: Samples have to be computed and the cache directory cannot be written to.
    """
    check_integer("n_samples", n_samples, least=1)
    name = f"darcy-{spec.resolution}-{spec.split.name.lower()}"
    path = cache_path(cache_directory(cache_dir), name, spec.key())
    samples = _read(path, spec)
    n_cached = len(samples.a)
    if n_cached < n_samples:
        check_writable(path.parent)
        missing = generate_darcy(
            spec, n_samples - n_cached, first=n_cached, workers=workers, progress=progress
        )
        samples = DarcySamples(*map(torch.cat, zip(samples, missing, strict=True)))
        write_cached(path, spec.key(), {"a": samples.a.numpy(), "u": samples.u.numpy()})
    return DarcySamples(samples.a[:n_samples], samples.u[:n_samples])


def _read(path: Path, spec: DarcySpec) -> DarcySamples:
    """Read a cache file; return zero samples if there is none, or none that can be used."""
    arrays = read_cached(path, spec.key(), DarcySamples._fields)
    if arrays is None:
        empty = torch.empty(0, spec.resolution, spec.resolution)
        return DarcySamples(empty, empty)
    return DarcySamples(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def _solved_on(spec: DarcySpec) -> int:
    """Return the nodes along each side of the grid on which the samples are solved."""
    return (spec.resolution - 1) * spec.refinement + 1


def _sample(spec: DarcySpec, index: int) -> tuple[Array32, Array32]:
    stream = np.random.SeedSequence(spec.seed, spawn_key=(spec.split.value, index))
    rng = np.random.Generator(np.random.PCG64(stream))
    field = gaussian_field(_solved_on(spec), rng, alpha=spec.alpha, tau=spec.tau)
    a = np.where(field >= 0, spec.high, spec.low)
    u = solve_elliptic(a, spec.forcing)
    nodes = slice(None, None, spec.refinement)
    return a[nodes, nodes].astype(np.float32), u[nodes, nodes].astype(np.float32)


def _solve_all(
    spec: DarcySpec, indices: Iterable[int], workers: int
) -> Iterator[tuple[Array32, Array32]]:
    """Yield the samples in order.

    Threads are enough to use several cores, because NumPy and SciPy's FFT release the GIL.
    """
    if workers == 1:
        yield from map(functools.partial(_sample, spec), indices)
        return
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(functools.partial(_sample, spec), indices)


def _with_progress(
    pairs: Iterator[tuple[Array32, Array32]], spec: DarcySpec, total: int, progress: bool | None
) -> Iterator[tuple[Array32, Array32]]:
    if progress is None:
        progress = sys.stderr.isatty()
    if not progress:
        return pairs
    # Imported here because rich is needed only when a bar is drawn.
    from rich.console import Console
    from rich.progress import track

    grid = f"{spec.resolution}x{spec.resolution}"
    label = f"Darcy flow {grid}, {spec.split.name.lower()}"
    return iter(track(pairs, label, total, console=Console(stderr=True)))
