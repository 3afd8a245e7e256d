"""ActivationPolicy: validated when it is written down, and never changed after that."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch

import ebbtide
from ebbtide import ActivationPolicy, PolicyError


def test_defaults() -> None:
    policy = ActivationPolicy()
    assert dataclasses.asdict(policy) == {
        "num_layers": None,
        "min_bytes": 1024 * 1024,
        "keep_last": 0,
        "max_inflight_bytes": None,
        "rebuild": True,
        "mode": "offload",
    }


def test_sizes_are_bytes_however_they_were_written() -> None:
    policy = ActivationPolicy(min_bytes="64KiB", max_inflight_bytes="1.5 MiB")
    assert policy.min_bytes == 64 * 1024
    assert policy.max_inflight_bytes == 1024 * 1024 + 512 * 1024
    assert policy == ActivationPolicy(min_bytes=65536, max_inflight_bytes=1572864)
    assert hash(policy) == hash(ActivationPolicy(min_bytes=65536, max_inflight_bytes=1572864))


@pytest.mark.parametrize("value", [0, 1, 100])
def test_counts_from_zero_are_taken(value: int) -> None:
    policy = ActivationPolicy(num_layers=value, keep_last=value, min_bytes=value)
    assert (policy.num_layers, policy.keep_last, policy.min_bytes) == (value, value, value)


@pytest.mark.parametrize("name", ["num_layers", "keep_last"])
@pytest.mark.parametrize("value", [-1, 1.0, "4", True, [1]])
def test_other_counts_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(PolicyError, match=name):
        ActivationPolicy(**{name: value})


def test_keep_last_is_a_number_even_when_num_layers_is_none() -> None:
    with pytest.raises(PolicyError):
        ActivationPolicy(keep_last=None)


@pytest.mark.parametrize("name", ["min_bytes", "max_inflight_bytes"])
@pytest.mark.parametrize("value", [-1, 1.5, "much", True, "-1MiB"])
def test_other_sizes_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(PolicyError, match=name):
        ActivationPolicy(**{name: value})


def test_a_policy_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="num_layers"):
        ActivationPolicy(num_layers=-1)
    assert issubclass(PolicyError, ebbtide.EbbtideError)


@pytest.mark.parametrize("field", dataclasses.fields(ActivationPolicy), ids=lambda f: f.name)
def test_no_field_can_be_set(field: dataclasses.Field) -> None:
    policy = ActivationPolicy()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(policy, field.name, 1)
    assert policy == ActivationPolicy()


def test_replace_validates_again() -> None:
    policy = ActivationPolicy(num_layers=2, min_bytes="1KiB")
    changed = dataclasses.replace(policy, min_bytes="2KiB")
    assert changed == ActivationPolicy(num_layers=2, min_bytes=2048)
    with pytest.raises(PolicyError):
        dataclasses.replace(policy, num_layers=-1)


def test_a_policy_survives_pickling() -> None:
    policy = ActivationPolicy(num_layers=3, min_bytes="1KiB", keep_last=1)
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_rebuild_is_a_switch() -> None:
    with pytest.raises(PolicyError):
        ActivationPolicy(rebuild="yes")


def test_counting_layers() -> None:
    assert not ActivationPolicy().counts_layers
    assert ActivationPolicy(num_layers=0).counts_layers
    assert ActivationPolicy(keep_last=1).counts_layers


@pytest.mark.parametrize("value", [-1, 1.5, True])
@pytest.mark.parametrize("name", ["num_layers", "keep_last"])
def test_weight_policy_counts(name: str, value: object) -> None:
    with pytest.raises(PolicyError, match=name):
        ebbtide.WeightPolicy(**{name: value})


def test_weight_policy_flags_and_sizes() -> None:
    assert ebbtide.WeightPolicy(min_bytes="2KiB").min_bytes == 2048
    with pytest.raises(PolicyError):
        ebbtide.WeightPolicy(double_buffering=1)
    for given in (torch.float32, "bfloat16", 16):
        with pytest.raises(PolicyError, match="param_dtype"):
            ebbtide.WeightPolicy(param_dtype=given)
