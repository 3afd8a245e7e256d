"""Darcy flow: the map from a rock's permeability to the pressure of the water in it.

The equation is ``-div(a grad u) = f`` on the unit square, ``u = 0`` on the boundary, ``f = 1``. The
permeability ``a`` is 12 where a Gaussian random field is positive and 3 where it is negative; a
neural operator learns the map from ``a`` to ``u``. Samples are generated on this machine and cached
on disk.

A grid has ``resolution`` nodes along each side, boundary included: node ``(i, j)`` lies at
``(i h, j h)`` with ``h = 1 / (resolution - 1)``.

Source:
    Li et al., Fourier Neural Operator for Parametric Partial Differential Equations, ICLR 2021,
    section 5.2 and appendix A.3.2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from rich.console import Console
from rich.progress import track
from scipy.fft import dctn, dstn, idstn
from torch.utils.data import DataLoader

from ebbtide.policy import parse_number, refuse

if TYPE_CHECKING:
    from neuralop.data.datasets.tensor_dataset import TensorDataset
    from neuralop.data.transforms.data_processors import DefaultDataProcessor

__all__ = [
    "DarcySpec",
    "apply_elliptic",
    "gaussian_field",
    "generate_darcy",
    "load_darcy",
    "load_darcy_flow_small",
    "solve_elliptic",
]

# ---- Gaussian random fields on the unit square, and a solver for the elliptic equation on it ----

FloatArray = NDArray[np.float64]

MIN_RESOLUTION = 4
SOLVER_TOLERANCE = 1e-10
MAX_ITERATIONS = 10_000


def gaussian_field(resolution: int, rng: np.random.Generator) -> FloatArray:
    """Draw a Gaussian field of mean zero and covariance ``(-Laplacian + 9)^-2``.

    The Laplacian has a zero Neumann boundary condition. Its eigenfunctions are therefore cosines,
    and the Karhunen-Loeve sum over all modes below ``resolution`` is one cosine transform. The
    constant mode is left out, as in the code that made the published data. Generators in the same
    state give the same coefficient to the same mode at every resolution, so a finer grid shows the
    same field with more of its fine detail.

    Args:
        resolution: Nodes along each side, boundary included.
        rng: Source of the coefficients; advanced by ``resolution ** 2`` normal draws.

    Returns:
        The field at the nodes.

    Raises:
        ValueError: ``resolution`` is below ``MIN_RESOLUTION``.

    Shape:
        return: (resolution, resolution), float64.

    Source:
        Li et al., Fourier Neural Operator for Parametric Partial Differential Equations, ICLR
        2021, section 5.2 and appendix A.3.2; GRF.m in the neuraloperator repository.
    """
    check_integer("resolution", resolution, least=MIN_RESOLUTION)
    mode = np.arange(resolution)
    row, column = np.meshgrid(mode, mode, indexing="ij")
    eigenvalue = (np.pi**2 * (row**2 + column**2) + 9.0) ** -2.0
    coefficient = np.sqrt(eigenvalue) * _draw_by_shell(row, column, rng)
    coefficient[0, 0] = 0.0
    # The normalised cosines are sqrt(2) cos(pi k x) for k > 0. The weights undo the counting of
    # SciPy's type-1 transform, which takes every inner coefficient twice and the two outer ones
    # once.
    weight = np.full(resolution, np.sqrt(2.0) / 2.0)
    weight[0] = 1.0
    weight[-1] = np.sqrt(2.0)
    field: FloatArray = dctn(coefficient * np.outer(weight, weight), type=1)
    return field


def _draw_by_shell(
    row: NDArray[np.int_], column: NDArray[np.int_], rng: np.random.Generator
) -> FloatArray:
    """Draw one normal number per mode, shell by shell.

    Mode (k, l) belongs to shell max(k, l). A finer grid only appends shells, so every mode keeps
    its number.
    """
    shell = np.maximum(row, column)
    position = shell**2 + np.where(row == shell, column, 2 * shell - row)
    draws: FloatArray = rng.standard_normal(row.size)[position]
    return draws


def apply_elliptic(a: FloatArray, u: FloatArray) -> FloatArray:
    """Apply ``-div(a grad u)`` at the interior nodes by the conservative 5-point scheme.

    The flux through a cell face uses the mean of the coefficients at the two nodes beside it, as in
    the solver of the published data.

    Shape:
        a: (n, n), float64. u: (n, n), float64, boundary included. return: (n - 2, n - 2), float64.
    """
    flux_row = _face_mean(a[:, 1:-1]) * np.diff(u[:, 1:-1], axis=0)
    flux_column = _face_mean(a[1:-1].T).T * np.diff(u[1:-1], axis=1)
    cells = a.shape[0] - 1
    outflow: FloatArray = -(cells**2) * (np.diff(flux_row, axis=0) + np.diff(flux_column, axis=1))
    return outflow


def _face_mean(a: FloatArray) -> FloatArray:
    mean: FloatArray = 0.5 * (a[1:] + a[:-1])
    return mean


def solve_elliptic(a: ArrayLike, f: ArrayLike = 1.0) -> FloatArray:
    """Solve ``-div(a grad u) = f`` on the unit square with ``u = 0`` on the boundary.

    The method is conjugate gradients, preconditioned by the constant-coefficient Laplacian, which
    the sine transform inverts exactly. The condition number is then at most ``max(a) / min(a)`` on
    every grid, so the number of iterations (20 for coefficients 3 and 12) does not grow with the
    resolution.

    Args:
        a: Coefficient at the nodes, positive.
        f: Right-hand side at the nodes, or one number for all of them.

    Returns:
        The solution at the nodes, second-order accurate where ``a`` is smooth.

    Raises:
        ValueError: ``a`` is not a positive square grid, or ``f`` does not fit it.
        ArithmeticError: The iteration does not converge, because ``max(a) / min(a)`` is extreme.

    Shape:
        a: (n, n). f: () or (n, n). return: (n, n), float64.
    """
    coefficient = np.asarray(a, dtype=np.float64)
    if coefficient.ndim != 2 or len(set(coefficient.shape)) > 1 or not (coefficient > 0).all():
        raise ValueError(f"a must be one square grid of positive nodes, not {coefficient.shape}")
    load = np.broadcast_to(np.asarray(f, dtype=np.float64), coefficient.shape)
    cells = coefficient.shape[0] - 1
    half_angle = np.pi * np.arange(1, cells) / (2 * cells)
    eigenvalue_1d = (2 * cells * np.sin(half_angle)) ** 2
    eigenvalue = np.add.outer(eigenvalue_1d, eigenvalue_1d)

    def operator(interior: FloatArray) -> FloatArray:
        return apply_elliptic(coefficient, np.pad(interior, 1))

    def preconditioner(residual: FloatArray) -> FloatArray:
        inverse: FloatArray = idstn(dstn(residual, type=1) / eigenvalue, type=1)
        return inverse

    return np.pad(_conjugate_gradients(operator, preconditioner, load[1:-1, 1:-1]), 1)


def _conjugate_gradients(
    operator: Callable[[FloatArray], FloatArray],
    preconditioner: Callable[[FloatArray], FloatArray],
    load: FloatArray,
) -> FloatArray:
    """Run preconditioned conjugate gradients, with a result independent of the thread count.

    SciPy's ``cg`` takes its inner products from BLAS, whose order of summation depends on the
    number of threads, so the last bits of a sample would too. NumPy's sum has a fixed order.
    """
    solution = np.zeros_like(load)
    residual = load.copy()
    direction = preconditioner(residual)
    product = np.sum(residual * direction)
    target = SOLVER_TOLERANCE**2 * product
    for _ in range(MAX_ITERATIONS):
        if product <= target:
            return solution
        image = operator(direction)
        step = product / np.sum(image * direction)
        solution += step * direction
        residual -= step * image
        correction = preconditioner(residual)
        previous, product = product, np.sum(residual * correction)
        direction = correction + (product / previous) * direction
    raise ArithmeticError(
        f"no convergence in {MAX_ITERATIONS} iterations; lower the contrast max(a) / min(a)"
    )


def check_integer(name: str, value: int, *, least: int) -> None:
    """Raise PolicyError, a ValueError, unless ``value`` is an integer and at least ``least``."""
    if parse_number(name, value) < least:
        refuse(name, f"an integer of at least {least}", value)


# ---- Generate samples of the Darcy problem (coefficient and solution) and cache them on disk ----

Array32 = NDArray[np.float32]

# Part of the name of every cache file. Increase it whenever a change makes the same spec give other
# numbers.
FORMAT_VERSION = 2
LOW, HIGH = 3.0, 12.0  # the coefficient where the Gaussian field is negative, and elsewhere
# Below this resolution a sample takes a few ms of short NumPy calls, which threads cannot speed up
# because they only wait for one another.
THREADED_RESOLUTION = 96


@dataclasses.dataclass(frozen=True)
class DarcySpec:
    """Everything that determines the numbers of sample ``i``.

    The number of samples is not part of the spec, because sample ``i`` does not depend on it.

    Args:
        resolution: Nodes along each side, boundary included; at least 4.
        is_test: Whether these are test samples, which share no random numbers with those to train
            on.
        seed: Random seed, 0 or more.

    Raises:
        ValueError: A value is outside its range.
    """

    resolution: int
    is_test: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("resolution", self.resolution, least=MIN_RESOLUTION)
        check_integer("seed", self.seed, least=0)

    def file_name(self) -> str:
        """Return the name of the file of these samples in a cache."""
        return f"darcy-{self.resolution}-{self.split}-seed{self.seed}-v{FORMAT_VERSION}.npz"

    @property
    def split(self) -> str:
        """The name of the stream of samples."""
        return "test" if self.is_test else "train"


Samples = tuple[torch.Tensor, torch.Tensor]
"""Coefficients and the corresponding solutions, (n, resolution, resolution), float32 each."""


def generate_darcy(spec: DarcySpec, n_samples: int, *, first: int = 0) -> Samples:
    """Draw coefficients and solve for the pressure, without touching the cache.

    Sample ``i`` depends on the spec and on ``i`` alone. With the same NumPy and SciPy on the same
    kind of processor it has the same bits whatever ``n_samples``, ``first`` and torch's number of
    threads are.

    Args:
        spec: Determines the samples.
        n_samples: Number of samples.
        first: Index of the first sample.

    Returns:
        Coefficients and solutions of samples ``first`` to ``first + n_samples - 1``.

    Raises:
        ValueError: A count is out of range.

    Shape:
        return: (n_samples, resolution, resolution), float32, twice.
    """
    check_integer("n_samples", n_samples, least=1)
    check_integer("first", first, least=0)
    workers = torch.get_num_threads() if spec.resolution >= THREADED_RESOLUTION else 1
    shape = (n_samples, spec.resolution, spec.resolution)
    coefficients, solutions = torch.empty(shape), torch.empty(shape)
    label = f"Darcy flow {spec.resolution}x{spec.resolution}, {spec.split}"
    pairs = track(
        _solve_all(spec, range(first, first + n_samples), workers),
        label,
        n_samples,
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
    for i, (a, u) in enumerate(pairs):
        coefficients[i] = torch.from_numpy(a)
        solutions[i] = torch.from_numpy(u)
    return coefficients, solutions


def load_darcy(
    spec: DarcySpec,
    n_samples: int,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Samples:
    """Return the first ``n_samples`` samples, reading from the cache those that it has.

    One file holds all samples of a spec. If more are asked for than it has, only the missing ones
    are computed, and the file grows. A file that cannot be read is made again.

    Args:
        spec: Determines the samples.
        n_samples: Number of samples.
        cache_dir: Directory of the cache. None means ``$EBBTIDE_CACHE``, else ``ebbtide`` in the
            user's cache directory.

    Returns:
        Coefficients and solutions, as `generate_darcy` does.

    Raises:
        ValueError: A count is out of range.
        OSError: Samples have to be computed and the cache directory cannot be written to.
    """
    check_integer("n_samples", n_samples, least=1)
    path = cache_directory(cache_dir) / spec.file_name()
    a, u = _read_cached(path, spec)
    n_cached = len(a)
    if n_cached < n_samples:
        with _replacing(path) as file:
            more_a, more_u = generate_darcy(spec, n_samples - n_cached, first=n_cached)
            a, u = torch.cat([a, more_a]), torch.cat([u, more_u])
            np.savez(file, a=a.numpy(), u=u.numpy())
    return a[:n_samples], u[:n_samples]


def cache_directory(chosen: str | os.PathLike[str] | None = None) -> Path:
    """Return ``chosen`` if given, else ``$EBBTIDE_CACHE``, else the user's cache directory."""
    named = chosen or os.environ.get("EBBTIDE_CACHE")
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "ebbtide"
    return Path(named or user_cache).expanduser()


def _read_cached(path: Path, spec: DarcySpec) -> Samples:
    """Read a cache file; return zero samples if there is none, or none that can be used."""
    # NumPy and zipfile raise many errors for damaged bytes, whose zip members carry checksums.
    with contextlib.suppress(Exception), np.load(path, allow_pickle=False) as stored:
        return torch.from_numpy(stored["a"]), torch.from_numpy(stored["u"])
    empty = torch.empty(0, spec.resolution, spec.resolution)
    return empty, empty


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Write a file that takes the place of another one when the block ends well.

    It is opened first, so that the result of a long computation is sure to find a place. Readers
    see the old file or the new one, never a part.

    Raises:
        OSError: The directory cannot be written to; the message says how to choose another.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = tempfile.NamedTemporaryFile(  # noqa: SIM115  # closed below
            dir=path.parent, suffix=".part", delete=False
        )
    except OSError as error:
        advice = "cannot write the cache; pass another cache_dir or set EBBTIDE_CACHE"
        raise OSError(error.errno, f"{advice} ({error.strerror})", str(path.parent)) from error
    try:
        with file:
            yield file
        os.replace(file.name, path)
    finally:
        Path(file.name).unlink(missing_ok=True)


def _sample(spec: DarcySpec, index: int) -> tuple[Array32, Array32]:
    stream = np.random.SeedSequence(spec.seed, spawn_key=(int(spec.is_test), index))
    rng = np.random.Generator(np.random.PCG64(stream))
    a = np.where(gaussian_field(spec.resolution, rng) >= 0, HIGH, LOW)
    return a.astype(np.float32), solve_elliptic(a).astype(np.float32)


def _solve_all(
    spec: DarcySpec, indices: Iterable[int], workers: int
) -> Iterator[tuple[Array32, Array32]]:
    """Yield the samples in order.

    Threads are enough to use several cores, because NumPy and SciPy's FFT release the GIL.
    """
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(functools.partial(_sample, spec), indices)


# ---- Loaders of Darcy samples for neuraloperator ----

Batches = DataLoader[dict[str, torch.Tensor]]
Loaders = tuple[Batches, dict[int, Batches], "DefaultDataProcessor"]

INSTALL_NEURALOP = 'the Darcy loaders need neuraloperator: pip install "ebbtide[neuralop]"'


# It has this many parameters because neuraloperator's function has them.
def load_darcy_flow_small(
    n_train: int,
    n_tests: Sequence[int],
    batch_size: int,
    test_batch_sizes: Sequence[int],
    *,
    train_resolution: int = 16,
    test_resolutions: Sequence[int] = (16, 32),
    encode_input: bool = False,
    encode_output: bool = True,
    num_workers: int = 0,
    seed: int = 0,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Loaders:
    """Load Darcy flow data for neuraloperator, in the place of its function of the same name.

    The training loader yields samples in the order of their index, without shuffling. Test samples
    never occur in the training set. Sample ``i`` is the same physical field at every test
    resolution, drawn and solved on that resolution's own grid. Inputs are the coefficients
    themselves, 3 and 12.

    Args:
        n_train: Number of training samples.
        n_tests: Number of test samples, per test resolution.
        batch_size: Training batch size.
        test_batch_sizes: Test batch size, per test resolution.
        train_resolution: Nodes along each side of the training grid, boundary included.
        test_resolutions: Nodes along each side of each test grid, boundary included.
        encode_input: Whether to fit a normalizer to the training inputs; ``data_processor``
            applies it.
        encode_output: The same for the outputs.
        num_workers: Worker processes per loader.
        seed: Random seed of the samples.
        cache_dir: As for ``load_darcy``.

    Returns:
        ``(train_loader, test_loaders, data_processor)``: a loader, a dict from resolution to
        loader, and neuraloperator's ``DefaultDataProcessor``.

    Raises:
        ValueError: A count or resolution is out of range, or the lists differ in length.
        OSError: The cache directory cannot be written to.
        ImportError: neuraloperator is not installed.

    Shape:
        batch["x"], batch["y"]: (batch, 1, resolution, resolution), float32.
    """
    lengths = [len(each) for each in (test_resolutions, n_tests, test_batch_sizes)]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"test_resolutions, n_tests and test_batch_sizes need one entry per test set each, got "
            f"{lengths}"
        )
    try:
        from neuralop.data.datasets.tensor_dataset import TensorDataset
        from neuralop.data.transforms.data_processors import DefaultDataProcessor
        from neuralop.data.transforms.normalizers import UnitGaussianNormalizer
    except ImportError as error:
        raise ImportError(INSTALL_NEURALOP) from error

    def dataset(resolution: int, n_samples: int, *, is_test: bool) -> TensorDataset:
        spec = DarcySpec(resolution, is_test=is_test, seed=seed)
        samples = load_darcy(spec, n_samples, cache_dir=cache_dir)
        return TensorDataset(*(field.unsqueeze(1) for field in samples))

    def loader(data: TensorDataset, size: int) -> Batches:
        pin_memory = torch.accelerator.is_available()
        return DataLoader(data, batch_size=size, num_workers=num_workers, pin_memory=pin_memory)

    def normalizer(data: torch.Tensor) -> UnitGaussianNormalizer:
        fitted = UnitGaussianNormalizer(dim=[0, 2, 3])
        fitted.fit(data)
        return fitted

    train = dataset(train_resolution, n_train, is_test=False)
    tests = zip(test_resolutions, n_tests, test_batch_sizes, strict=True)
    test_loaders = {
        resolution: loader(dataset(resolution, n_test, is_test=True), size)
        for resolution, n_test, size in tests
    }
    processor = DefaultDataProcessor(
        in_normalizer=normalizer(train.x) if encode_input else None,
        out_normalizer=normalizer(train.y) if encode_output else None,
    )
    return loader(train, batch_size), test_loaders, processor
