"""Darcy flow: the field's statistics, the solver's order, the cache, the loaders."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
import torch

from ebbtide.tools.darcy import (
    THREADED_RESOLUTION,
    DarcySpec,
    apply_elliptic,
    gaussian_field,
    generate_darcy,
    load_darcy,
    load_darcy_flow_small,
    solve_elliptic,
)

SPEC = DarcySpec(16)


def grid(resolution: int) -> tuple[np.ndarray, np.ndarray]:
    nodes = np.linspace(0.0, 1.0, resolution)
    return np.meshgrid(nodes, nodes, indexing="ij")


def same_bits(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


# The Gaussian field


@pytest.fixture(scope="module")
def fields() -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.stack([gaussian_field(12, rng) for _ in range(4000)])


def analytic_covariance(resolution: int, alpha: float = 2.0, tau: float = 3.0) -> np.ndarray:
    """Sum over modes of eigenvalue x eigenfunction x eigenfunction, constant mode left out."""
    x = np.linspace(0.0, 1.0, resolution)
    k = np.arange(resolution)
    cosines = np.where(k > 0, np.sqrt(2.0), 1.0) * np.cos(np.pi * np.outer(x, k))
    eigenvalues = (np.pi**2 * np.add.outer(k**2, k**2) + tau**2) ** -alpha
    eigenvalues[0, 0] = 0.0
    modes = np.einsum("xk,yl->xykl", cosines, cosines).reshape(resolution**2, resolution**2)
    return (modes * eigenvalues.ravel()) @ modes.T


def test_field_has_the_covariance_of_the_operator(fields: np.ndarray) -> None:
    flat = fields.reshape(len(fields), -1)
    expected = analytic_covariance(12)
    # An entry of the sample covariance of n draws deviates by sqrt((C_ii C_jj + C_ij^2) / n).
    variance = np.diag(expected)
    deviation = np.sqrt((np.outer(variance, variance) + expected**2) / len(flat))
    errors = (flat.T @ flat / len(flat) - expected) / deviation
    # 144 x 144 correlated entries: the largest is seen within 5, their mean square near 1.
    assert np.abs(errors).max() < 5
    assert 0.7 < np.sqrt((errors**2).mean()) < 1.3


# The solver


def manufactured(resolution: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A smooth coefficient and solution, and f = -(a_x u_x + a_y u_y + a (u_xx + u_yy))."""
    x, y = grid(resolution)
    pi = np.pi
    a = 2 + np.sin(2 * pi * x) * np.cos(pi * y)
    a_x = 2 * pi * np.cos(2 * pi * x) * np.cos(pi * y)
    a_y = -pi * np.sin(2 * pi * x) * np.sin(pi * y)
    u = np.sin(pi * x) * np.sin(2 * pi * y)
    u_x = pi * np.cos(pi * x) * np.sin(2 * pi * y)
    u_y = 2 * pi * np.sin(pi * x) * np.cos(2 * pi * y)
    laplacian = -5 * pi**2 * u
    return a, u, -(a_x * u_x + a_y * u_y + a * laplacian)


def test_solver_converges_with_order_two() -> None:
    errors = []
    for resolution in (17, 33, 65, 129):
        a, u, f = manufactured(resolution)
        errors.append(np.abs(solve_elliptic(a, f) - u).max())
    orders = np.log2(np.array(errors[:-1]) / np.array(errors[1:]))
    assert ((orders > 1.9) & (orders < 2.1)).all(), orders


@pytest.mark.parametrize("resolution", [4, 5, 16, 33, 50])
def test_solver_agrees_with_a_direct_solve(resolution: int) -> None:
    a = np.random.default_rng(resolution).uniform(1, 20, (resolution, resolution))
    f = np.random.default_rng(0).normal(size=a.shape)
    inside = resolution - 2
    unit_vectors = np.eye(inside**2).reshape(-1, inside, inside)
    columns = [apply_elliptic(a, np.pad(unit, 1)).ravel() for unit in unit_vectors]
    matrix = scipy.sparse.csc_array(np.array(columns).T)
    assert np.abs(matrix - matrix.T).max() == 0
    direct = scipy.sparse.linalg.spsolve(matrix, f[1:-1, 1:-1].ravel())
    solution = solve_elliptic(a, f)
    np.testing.assert_allclose(
        solution[1:-1, 1:-1].ravel(), direct, rtol=0, atol=1e-9 * np.abs(direct).max()
    )


# Samples


def test_samples_have_two_values_and_solve_their_own_grid() -> None:
    a, u = generate_darcy(SPEC, 50)
    assert a.shape == u.shape == (50, 16, 16)
    assert a.dtype == u.dtype == torch.float32
    assert set(a.unique().tolist()) == {3.0, 12.0}
    # Half of the field is positive: 50 samples of deviation 0.05 put the mean within 5 x 0.05 / 7.
    assert abs((a == 12).float().mean().item() - 0.5) < 0.04
    again = solve_elliptic(a[7].numpy()).astype(np.float32)
    assert np.array_equal(u[7].numpy(), again)


def test_a_sample_depends_on_its_index_alone() -> None:
    ten = generate_darcy(SPEC, 10)
    assert same_bits([each[:4] for each in ten], generate_darcy(SPEC, 4))
    assert same_bits([each[6:] for each in ten], generate_darcy(SPEC, 4, first=6))
    large, threads = DarcySpec(THREADED_RESOLUTION), torch.get_num_threads()
    expected = generate_darcy(large, 3)
    torch.set_num_threads(3 if threads != 3 else 2)
    try:
        assert same_bits(expected, generate_darcy(large, 3))
    finally:
        torch.set_num_threads(threads)


def test_seeds_and_splits_share_no_sample() -> None:
    specs = [DarcySpec(16, split, seed) for split in (False, True) for seed in (0, 1)]
    a = torch.cat([generate_darcy(spec, 20)[0] for spec in specs])
    assert len(a.flatten(1).unique(dim=0)) == 80


def test_a_sample_is_the_same_physical_field_at_every_resolution() -> None:
    coarse_a, coarse_u = generate_darcy(DarcySpec(17), 8)
    fine_a, fine_u = generate_darcy(DarcySpec(65), 8)
    nodes = (slice(None), slice(None, None, 4), slice(None, None, 4))
    assert (coarse_a == fine_a[nodes]).float().mean() > 0.95
    assert (coarse_u - fine_u[nodes]).norm() / fine_u[nodes].norm() < 0.06


# The cache


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Records (first, n_samples) of every computation."""
    calls: list[tuple[int, int]] = []

    def record(spec: DarcySpec, n_samples: int, *, first: int = 0, **options: object) -> object:
        calls.append((first, n_samples))
        return generate_darcy(spec, n_samples, first=first, **options)

    monkeypatch.setattr("ebbtide.tools.darcy.generate_darcy", record)
    return calls


def test_cache_computes_only_what_is_missing(
    tmp_path: Path, generated: list[tuple[int, int]]
) -> None:
    expected = generate_darcy(SPEC, 7)
    load_darcy(SPEC, 4, cache_dir=tmp_path)
    three = load_darcy(SPEC, 3, cache_dir=tmp_path)
    assert generated == [(0, 4)]
    seven = load_darcy(SPEC, 7, cache_dir=tmp_path)
    again = load_darcy(SPEC, 7, cache_dir=tmp_path)
    assert generated == [(0, 4), (4, 3)]
    assert same_bits(seven, expected)
    assert same_bits(again, expected)
    assert same_bits(three, [each[:3] for each in expected])
    assert len(list(tmp_path.iterdir())) == 1


def test_every_parameter_has_a_cache_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"resolution": 17, "is_test": True, "seed": 1}
    assert set(changes) == set(DarcySpec.__dataclass_fields__)
    load_darcy(SPEC, 1, cache_dir=tmp_path)
    for name, value in changes.items():
        load_darcy(DarcySpec(**{"resolution": 16, name: value}), 1, cache_dir=tmp_path)
    monkeypatch.setattr("ebbtide.tools.darcy.FORMAT_VERSION", 10**6)
    load_darcy(SPEC, 1, cache_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1 + len(changes) + 1


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage_foreign(path: Path) -> None:
    np.save(path.with_suffix(".npy"), np.ones(3))
    path.with_suffix(".npy").replace(path)


@pytest.mark.parametrize("damage", [damage_truncate, damage_empty, damage_flip, damage_foreign])
def test_a_damaged_cache_file_is_made_again(
    tmp_path: Path, generated: list[tuple[int, int]], damage: object
) -> None:
    expected = load_darcy(SPEC, 2, cache_dir=tmp_path)
    damage(next(tmp_path.iterdir()))
    assert same_bits(load_darcy(SPEC, 2, cache_dir=tmp_path), expected)
    assert same_bits(load_darcy(SPEC, 2, cache_dir=tmp_path), expected)
    assert generated == [(0, 2), (0, 2)]


def test_an_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_darcy(SPEC, 1, cache_dir=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def interrupted(file: object, **_: object) -> None:
        file.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_darcy(SPEC, 2, cache_dir=tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


# The loaders

SMALL = {
    "n_train": 6,
    "n_tests": [4, 3],
    "batch_size": 4,
    "test_batch_sizes": [2, 3],
    "test_resolutions": [16, 24],
}


def test_loaders_yield_what_neuraloperator_trains_on(tmp_path: Path) -> None:
    pytest.importorskip("neuralop")
    from neuralop import H1Loss
    from neuralop.models import FNO

    torch.manual_seed(0)
    train_loader, test_loaders, processor = load_darcy_flow_small(**SMALL, cache_dir=tmp_path)
    assert [batch["x"].shape for batch in train_loader] == [(4, 1, 16, 16), (2, 1, 16, 16)]
    assert {n: len(loader.dataset) for n, loader in test_loaders.items()} == {16: 4, 24: 3}
    assert [batch["y"].shape for batch in test_loaders[24]] == [(3, 1, 24, 24)]

    model = FNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    processor.wrap(model)
    losses = []
    for _ in range(5):
        batch = processor.preprocess(next(iter(train_loader)))
        assert set(batch) == {"x", "y"}
        output, batch = processor.postprocess(model(batch["x"]), batch)
        loss = H1Loss(d=2)(output, batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_encoders_are_fitted_to_the_training_set(tmp_path: Path) -> None:
    pytest.importorskip("neuralop")
    train, _, processor = load_darcy_flow_small(**SMALL, encode_input=True, cache_dir=tmp_path)
    x, y = train.dataset.x, train.dataset.y
    encoded = processor.in_normalizer.transform(x)
    assert processor.in_normalizer.mean.shape == (1, 1, 1, 1)
    torch.testing.assert_close(processor.out_normalizer.mean.flatten(), y.mean().reshape(1))
    torch.testing.assert_close(encoded.std(), torch.tensor(1.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_train": 0}, "n_samples must be an integer of at least 1"),
        ({"n_tests": [4]}, "one entry per test set"),
        ({"n_tests": [4, 0]}, "n_samples must be an integer of at least 1"),
        ({"batch_size": 0}, "batch_size"),
        ({"test_batch_sizes": [2, 0]}, "batch_size"),
        ({"test_resolutions": [16, 2]}, "resolution must be an integer of at least 4"),
        ({"train_resolution": 2}, "resolution must be an integer of at least 4"),
        ({"seed": -1}, "seed"),
    ],
)
def test_loader_refuses_bad_input(tmp_path: Path, change: dict[str, object], message: str) -> None:
    pytest.importorskip("neuralop")
    with pytest.raises(ValueError, match=message):
        load_darcy_flow_small(**SMALL | {"cache_dir": tmp_path} | change)


@pytest.mark.slow
def test_a_sample_does_not_depend_on_the_threads_of_linear_algebra() -> None:
    """At 128 x 128 points, OpenBLAS adds up inner products in as many parts as it has threads."""
    code = (
        "import hashlib, numpy as np; from ebbtide.tools.darcy import solve_elliptic;"
        "a = np.where(np.random.default_rng(0).standard_normal((128, 128)) < 0, 3.0, 12.0);"
        "print(hashlib.sha256(solve_elliptic(a).tobytes()).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), threads),
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        for threads in ("1", "2")
    }
    assert len(found) == 1
