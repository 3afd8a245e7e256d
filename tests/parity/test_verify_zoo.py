"""`ebbtide.verify` raises no false alarm on the zoo: twenty seeds for each model."""

import contextlib

import pytest
import torch

import ebbtide
from ebbtide import ActivationPolicy, WeightPolicy
from test_weights_zoo import LAYERS
from zoo import ENTRIES, Entry

SEEDS = 20
MODES = ("offload", "recompute", "recompute+offload")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_there_is_no_false_alarm(entry: Entry) -> None:
    model, inputs = entry.build()
    mode = MODES[0 if entry.name == "llama_checkpointed" else len(entry.name) % 3]
    everything = {
        "activations": ActivationPolicy(min_bytes=1, mode=mode),  # type: ignore[arg-type]
        "weights": WeightPolicy(min_bytes=1),
        "layers": LAYERS.get(entry.name),
    }
    autocast = torch.autocast("cpu", entry.autocast) if entry.autocast else contextlib.nullcontext()
    with autocast:
        report = ebbtide.verify(model, inputs, offload=everything, orders=SEEDS)
    assert report.same, str(report)
