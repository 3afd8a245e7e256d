"""Steps inside backward, with weights at rest on the software accelerator."""

from __future__ import annotations

import random
from collections import Counter

import torch
from torch import nn

import ebbtide
from harness import make_store
from loops import on_device
from overlap_programs import check_loops
from soft_programs import make_device, running


def check_overlap(seed: int, order: str = "threads") -> Counter[str]:
    """Train twice with weights at rest, with and without an optimizer that overlaps; compare."""

    def offload(net: nn.Module) -> ebbtide.OffloadHandle:
        device = make_device(seed, random.Random(seed).choice((0.0, 0.5)))
        with on_device(device, lambda: make_store(device, "host"), 2**18):
            return ebbtide.offload(net.to("softdevice"), weights=ebbtide.WeightPolicy())

    with running("overlap", seed, order), torch.device("cpu"):  # where the optimizer makes state
        return check_loops(seed, offload, torch.accelerator.synchronize)
