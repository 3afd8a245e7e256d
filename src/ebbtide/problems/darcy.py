"""Darcy flow: the map from a rock's permeability to the pressure of the water in it.

The equation is ``-div(a grad u) = f`` on the unit square, ``u = 0`` on the boundary, ``f = 1``. The
permeability ``a`` is 12 where a Gaussian random field is positive and 3 where it is negative; a
neural operator learns the map from ``a`` to ``u``. Samples are generated on this machine and cached
on disk (``load_darcy``), or read from the published files (``load_darcy_pt``).
``load_darcy_flow_small`` and ``load_darcy_pt`` can replace neuraloperator's functions of the same
names: they take the same arguments and return the same kinds of objects.

Source:
    Li et al., Fourier Neural Operator for Parametric Partial Differential Equations, ICLR 2021,
    section 5.2 and appendix A.3.2.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path

from ebbtide.problems.fields import apply_elliptic, gaussian_field, solve_elliptic
from ebbtide.problems.loaders import LoaderRequest, Loaders, make_loaders, read_published
from ebbtide.problems.samples import DarcySamples, DarcySpec, Split, generate_darcy, load_darcy

__all__ = [
    "DarcySamples",
    "DarcySpec",
    "Split",
    "apply_elliptic",
    "gaussian_field",
    "generate_darcy",
    "load_darcy",
    "load_darcy_flow_small",
    "load_darcy_pt",
    "solve_elliptic",
]

UNIT_SQUARE = ((0, 1), (0, 1))


# The two loaders have this many parameters because neuraloperator's functions have them.
def load_darcy_flow_small(
    n_train: int,
    n_tests: Sequence[int],
    batch_size: int,
    test_batch_sizes: Sequence[int],
    *,
    data_root: str | os.PathLike[str] | None = None,
    train_resolution: int = 16,
    test_resolutions: Sequence[int] = (16, 32),
    grid_boundaries: Sequence[Sequence[float]] = UNIT_SQUARE,
    encode_input: bool = False,
    encode_output: bool = True,
    encoding: str = "channel-wise",
    channel_dim: int = 1,
    num_workers: int = 0,
    seed: int = 0,
    refinement: int = 1,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Loaders:
    """Load Darcy flow data for neuraloperator; generate them unless ``data_root`` is given.

    The training loader yields samples in the order of their index, without shuffling. Test samples
    never occur in the training set. Sample ``i`` is the same physical field at every test
    resolution, drawn and solved on that resolution's own grid. Inputs are the coefficients
    themselves, 3 and 12.

    Args:
        n_train: Number of training samples.
        n_tests: Number of test samples, per test resolution.
        batch_size: Training batch size.
        test_batch_sizes: Test batch size, per test resolution.
        data_root: Directory with the published files, which are read as by ``load_darcy_pt``;
            ``seed``, ``refinement``, ``cache_dir`` and ``progress`` then have no effect.
        train_resolution: Nodes along each side of the training grid, boundary included.
        test_resolutions: Nodes along each side of each test grid, boundary included.
        grid_boundaries: Must be the unit square, on which the problem is posed.
        encode_input: Whether to fit a normalizer to the training inputs; ``data_processor``
            applies it.
        encode_output: The same for the outputs.
        encoding: ``"channel-wise"``, or ``"pixel-wise"`` (a mean and deviation per node, so
            every test resolution has to be the training resolution).
        channel_dim: Position of the channel dimension in a batch.
        num_workers: Worker processes per loader.
        seed: Random seed of the samples.
        refinement: As in ``DarcySpec``.
        cache_dir: As for ``load_darcy``.
        progress: As for ``generate_darcy``.

    Returns:
        ``(train_loader, test_loaders, data_processor)``: a loader, a dict from resolution to
        loader, and neuraloperator's ``DefaultDataProcessor``.

    Raises:
        ValueError: A count, resolution or choice is out of range, or the lists differ in length.
        OSError: The cache directory cannot be written to, or a published file is missing.
        ImportError: neuraloperator is not installed.

    Shape:
        batch["x"], batch["y"]: (batch, 1, resolution, resolution), float32.
    """
    if [list(side) for side in grid_boundaries] != [list(side) for side in UNIT_SQUARE]:
        raise ValueError(
            f"the problem is posed on the unit square; leave grid_boundaries at its default "
            f"(got {grid_boundaries}) and scale the model's positional embedding instead"
        )
    request = LoaderRequest(
        n_train, n_tests, batch_size, test_batch_sizes, train_resolution, test_resolutions,
        encode_input, encode_output, encoding, channel_dim, num_workers,
    )  # fmt: skip

    def read(split: Split, resolution: int, n_samples: int) -> DarcySamples:
        if data_root is not None:
            return read_published(Path(data_root), split, resolution, n_samples)
        spec = DarcySpec(resolution, split=split, seed=seed, refinement=refinement)
        return load_darcy(spec, n_samples, cache_dir=cache_dir, progress=progress)

    return make_loaders(request, read)


def load_darcy_pt(
    n_train: int,
    n_tests: Sequence[int],
    batch_size: int,
    test_batch_sizes: Sequence[int],
    *,
    data_root: str | os.PathLike[str],
    train_resolution: int = 16,
    test_resolutions: Sequence[int] = (16, 32),
    encode_input: bool = False,
    encode_output: bool = True,
    encoding: str = "channel-wise",
    channel_dim: int = 1,
    num_workers: int = 0,
) -> Loaders:
    """Load Darcy flow data from the published files, which must already be on this machine.

    The files are ``darcy_train_{resolution}.pt`` and ``darcy_test_{resolution}.pt`` of Zenodo
    record 12784353. Each holds a dict of ``x`` and ``y``, with or without a channel dimension.
    Values of any type (``x`` may be boolean) are converted to float32 without rescaling.

    Args:
        n_train: Number of training samples, taken from the start of the file.
        n_tests: Number of test samples, per test resolution.
        batch_size: Training batch size.
        test_batch_sizes: Test batch size, per test resolution.
        data_root: Directory with the files.
        train_resolution: Resolution of the training file to read.
        test_resolutions: Resolutions of the test files to read.
        encode_input: As for ``load_darcy_flow_small``.
        encode_output: As for ``load_darcy_flow_small``.
        encoding: As for ``load_darcy_flow_small``.
        channel_dim: As for ``load_darcy_flow_small``.
        num_workers: As for ``load_darcy_flow_small``.

    Returns:
        As for ``load_darcy_flow_small``.

    Raises:
        ValueError: As for ``load_darcy_flow_small``, or a file has fewer samples than asked for
            or does not hold such a dict.
        OSError: A file is missing or cannot be read.
        ImportError: neuraloperator is not installed.

    Shape:
        batch["x"], batch["y"]: (batch, 1, resolution, resolution), float32.
    """
    request = LoaderRequest(
        n_train, n_tests, batch_size, test_batch_sizes, train_resolution, test_resolutions,
        encode_input, encode_output, encoding, channel_dim, num_workers,
    )  # fmt: skip
    return make_loaders(request, functools.partial(read_published, Path(data_root)))
