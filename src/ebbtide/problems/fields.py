"""Gaussian random fields on the unit square, and a solver for the elliptic equation on it.

A grid has ``resolution`` nodes along each side, boundary included: node ``(i, j)`` lies at
``(i h, j h)`` with ``h = 1 / (resolution - 1)``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.fft import dctn, dstn, idstn

FloatArray = NDArray[np.float64]

MIN_RESOLUTION = 4
SOLVER_TOLERANCE = 1e-10
MAX_ITERATIONS = 10_000


def gaussian_field(
    resolution: int, rng: np.random.Generator, *, alpha: float = 2.0, tau: float = 3.0
) -> FloatArray:
    """Draw a Gaussian field of mean zero and covariance ``(-Laplacian + tau^2)^-alpha``.

    The Laplacian has a zero Neumann boundary condition. Its eigenfunctions are therefore cosines,
    and the Karhunen-Loeve sum over all modes below ``resolution`` is one cosine transform. The
    constant mode is left out, as in the code that made the published data. Generators in the same
    state give the same coefficient to the same mode at every resolution, so a finer grid shows the
    same field with more of its fine detail.

    Args:
        resolution: Nodes along each side, boundary included.
        rng: Source of the coefficients; advanced by ``resolution ** 2`` normal draws.
        alpha: Smoothness; samples are continuous for ``alpha > 1``.
        tau: Inverse correlation length, in units of 1 / side of the square.

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
    eigenvalue = (np.pi**2 * (row**2 + column**2) + tau**2) ** -alpha
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
        ValueError: ``a`` is not a positive finite square grid, or ``f`` does not fit it.
        ArithmeticError: The iteration does not converge, because ``max(a) / min(a)`` is extreme.

    Shape:
        a: (n, n). f: () or (n, n). return: (n, n), float64.
    """
    coefficient, load = _check_problem(a, f)
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


def _check_problem(a: ArrayLike, f: ArrayLike) -> tuple[FloatArray, FloatArray]:
    coefficient = np.asarray(a, dtype=np.float64)
    if coefficient.ndim != 2 or coefficient.shape[0] != coefficient.shape[1]:
        raise ValueError(f"a must be one square grid of nodes, got shape {coefficient.shape}")
    check_integer("resolution of a", coefficient.shape[0], least=MIN_RESOLUTION)
    if not (np.isfinite(coefficient).all() and (coefficient > 0).all()):
        raise ValueError("a must be positive and finite at every node")
    load = np.asarray(f, dtype=np.float64)
    if load.shape not in ((), coefficient.shape):
        raise ValueError(
            f"f must be a number or have a's shape {coefficient.shape}, got shape {load.shape}"
        )
    if not np.isfinite(load).all():
        raise ValueError("f must be finite at every node")
    return coefficient, np.broadcast_to(load, coefficient.shape)


def check_integer(name: str, value: int, *, least: int) -> None:
    """Raise ValueError unless ``value`` is an integer and at least ``least``."""
    try:
        if operator.index(value) >= least:
            return
    except TypeError:
        pass
    raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
