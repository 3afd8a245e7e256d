"""Loaders of Darcy samples for neuraloperator, and the reader of the published files."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader, Dataset

from ebbtide.problems.fields import MIN_RESOLUTION, check_integer
from ebbtide.problems.samples import DarcySamples, Split

if TYPE_CHECKING:
    from neuralop.data.transforms.data_processors import DefaultDataProcessor
    from neuralop.data.transforms.normalizers import UnitGaussianNormalizer

Batches = DataLoader[dict[str, torch.Tensor]]
Loaders = tuple[Batches, dict[int, Batches], "DefaultDataProcessor"]
ReadSamples = Callable[[Split, int, int], DarcySamples]

ENCODINGS = ("channel-wise", "pixel-wise")
INSTALL_NEURALOP = 'the Darcy loaders need neuraloperator: pip install "ebbtide[neuralop]"'


@dataclasses.dataclass(frozen=True)
class LoaderRequest:
    """The validated arguments of the two loaders; see ``darcy.load_darcy_flow_small``.

    Raises:
        ValueError: A count, resolution or choice is out of range, or the lists differ in length.
    """

    n_train: int
    n_tests: Sequence[int]
    batch_size: int
    test_batch_sizes: Sequence[int]
    train_resolution: int
    test_resolutions: Sequence[int]
    encode_input: bool
    encode_output: bool
    encoding: str
    channel_dim: int
    num_workers: int

    def __post_init__(self) -> None:
        self._check_lists()
        for name in ("n_train", "batch_size"):
            check_integer(name, getattr(self, name), least=1)
        for name in ("n_tests", "test_batch_sizes"):
            for value in getattr(self, name):
                check_integer(f"every entry of {name}", value, least=1)
        check_integer("num_workers", self.num_workers, least=0)
        for resolution in (self.train_resolution, *self.test_resolutions):
            check_integer("every resolution", resolution, least=MIN_RESOLUTION)
        if self.channel_dim not in (1, 2, 3, -1, -2, -3):
            raise ValueError(f"channel_dim must be 1, 2 or 3 in a batch, got {self.channel_dim}")
        self._check_encoding()

    def _check_lists(self) -> None:
        lists = {
            name: getattr(self, name)
            for name in ("test_resolutions", "n_tests", "test_batch_sizes")
        }
        for name, values in lists.items():
            if not isinstance(values, Sequence) or isinstance(values, str):
                raise ValueError(
                    f"{name} must be a list with one entry per test set, got {values!r}"
                )
        lengths = {name: len(values) for name, values in lists.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"these lists need one entry per test set each, got lengths {lengths}")
        if len(set(self.test_resolutions)) < len(self.test_resolutions):
            raise ValueError(
                f"name each of test_resolutions once; there are repeats in {self.test_resolutions}"
            )

    def _check_encoding(self) -> None:
        if self.encoding not in ENCODINGS:
            raise ValueError(f"encoding must be one of {ENCODINGS}, got {self.encoding!r}")
        encodes = self.encode_input or self.encode_output
        others = set(self.test_resolutions) - {self.train_resolution}
        if encodes and self.encoding == "pixel-wise" and others:
            raise ValueError(
                f"a pixel-wise encoding is valid at one resolution only; test at "
                f"{self.train_resolution} alone, or use encoding='channel-wise'"
            )


def make_loaders(request: LoaderRequest, read: ReadSamples) -> Loaders:
    """Build the training loader, the test loaders by resolution, and the data processor.

    Args:
        request: The validated arguments.
        read: Returns the samples, given the split, the resolution and the number of samples.

    Raises:
        ImportError: neuraloperator is not installed.
    """
    try:
        from neuralop.data.datasets.tensor_dataset import TensorDataset
        from neuralop.data.transforms.data_processors import DefaultDataProcessor
    except ImportError as error:
        raise ImportError(INSTALL_NEURALOP) from error

    def dataset(split: Split, resolution: int, n_samples: int) -> TensorDataset:
        samples = read(split, resolution, n_samples)
        return TensorDataset(*(field.unsqueeze(request.channel_dim) for field in samples))

    train = dataset(Split.TRAIN, request.train_resolution, request.n_train)
    tests = zip(request.test_resolutions, request.n_tests, request.test_batch_sizes, strict=True)
    test_loaders = {
        resolution: _loader(dataset(Split.TEST, resolution, n_test), batch_size, request)
        for resolution, n_test, batch_size in tests
    }
    processor = DefaultDataProcessor(
        in_normalizer=_normalizer(train.x, request) if request.encode_input else None,
        out_normalizer=_normalizer(train.y, request) if request.encode_output else None,
    )
    return _loader(train, request.batch_size, request), test_loaders, processor


def _loader(
    dataset: Dataset[dict[str, torch.Tensor]], batch_size: int, request: LoaderRequest
) -> Batches:
    return DataLoader(
        dataset,
        batch_size=batch_size,
        num_workers=request.num_workers,
        pin_memory=torch.accelerator.is_available(),
    )


def _normalizer(data: torch.Tensor, request: LoaderRequest) -> UnitGaussianNormalizer:
    from neuralop.data.transforms.normalizers import UnitGaussianNormalizer

    reduced = list(range(data.ndim))
    if request.encoding == "channel-wise":
        reduced.pop(request.channel_dim)
    else:
        reduced = [0]
    normalizer = UnitGaussianNormalizer(dim=reduced)
    normalizer.fit(data)
    return normalizer


def read_published(root: Path, split: Split, resolution: int, n_samples: int) -> DarcySamples:
    """Read the first ``n_samples`` samples of a published file.

    Raises:
        ValueError: The file has fewer samples or does not hold a dict of ``x`` and ``y``.
        OSError: The file is missing or cannot be read.
    """
    path = root / f"darcy_{split.name.lower()}_{resolution}.pt"
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        advice = "get it from Zenodo record 12784353, or leave out data_root to generate the data"
        raise FileNotFoundError(error.errno, advice, str(path)) from error
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise OSError(f"{path} is damaged or was not written by torch.save: {error}") from error
    if not isinstance(data, dict) or not all(torch.is_tensor(data.get(name)) for name in "xy"):
        raise ValueError(f"{path} must hold a dict with the tensors 'x' and 'y'")
    if len(data["x"]) < n_samples:
        raise ValueError(f"{path} has {len(data['x'])} samples, not {n_samples}; ask for fewer")
    return DarcySamples(*(_without_channel(data[name][:n_samples], path) for name in "xy"))


def _without_channel(data: torch.Tensor, path: Path) -> torch.Tensor:
    if data.ndim == 4 and data.shape[1] == 1:
        data = data.squeeze(1)
    if data.ndim != 3:
        raise ValueError(f"{path} must hold one channel on a 2-D grid, got shape {data.shape}")
    return data.to(torch.float32)
