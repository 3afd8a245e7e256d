"""The jobs that `benchmarks.gpu` runs, the most valuable first.

A job measures one model shape or answers one other question, such as how fast the link is. It runs
once in each of its modes, each time in a process of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.trial import Shape

GIB = 2**30

PLANNED = ("ebbtide-default", "ebbtide-80%", "ebbtide-60%", "ebbtide-40%")
EVERY = (
    "none",
    "save_on_cpu",
    "ebbtide",
    "checkpoint",
    *PLANNED,
    "ebbtide-keep-1",
    "checkpoint+save_on_cpu",
    "checkpoint+ebbtide",
    "torchtune",
    "trl",
    "ebbtide-tiered",
    "megatron",
    "fsdp2",
    "ebbtide-weights",
)
OF_WEIGHTS = ("fsdp2", "ebbtide-weights")
WITHOUT_WEIGHTS = tuple(mode for mode in EVERY if mode not in OF_WEIGHTS)
FOR_CAPACITY = ("none", "save_on_cpu", "checkpoint", "ebbtide", "checkpoint+ebbtide")
FOR_OVERHEAD = ("none", "save_on_cpu", "torchtune", "trl", "ebbtide")


@dataclass(frozen=True)
class Job:
    """One measurement, made in several modes.

    Args:
        name: name of the job, for `--only`. It begins with the name of the case whose result file
            the job joins.
        task: task of `benchmarks.trial` to run.
        modes: names of the modes to run it in.
        shape: shape of the model, if there is one.
        more: further arguments of the task.
    """

    name: str
    task: str
    modes: tuple[str, ...]
    shape: Shape | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def case(self) -> str:
        """Name of the case: ``link``, ``transformer``, ``fno`` or ``overhead``."""
        return "fno" if self.name.startswith("fno") else self.name.split("-")[0]


def jobs() -> list[Job]:
    """Return the whole suite, sized for one accelerator of 80 GB."""
    link = Job("link", "link", ("none",), None, {"size_bytes": GIB, "steps": 5})
    overhead = _overhead(10_000)
    return [
        link,
        _transformer(8192, 1),
        _fno("fno2d", 1024, 4, 64),
        _capacity("size", 16, "fno2d", 64, 4096),
        _transformer(32_768, 1),
        _fno("fno3d", 128, 2, 32),
        overhead,
        _capacity("batch", 16, "fno2d", 1, 512),
        *(_capacity("size", limit, "fno2d", 64, 6144) for limit in (24, 40, 80)),
        *(_capacity("size", limit, "fno3d", 16, 512) for limit in (16, 24, 40, 80)),
        *(_capacity("batch", limit, "fno2d", 1, 512) for limit in (24, 40, 80)),
        _transformer(2048, 4),
        _fno("fno2d", 512, 8, 64),
        _fno("fno2d", 2048, 1, 64),
        _fno("fno3d", 64, 8, 32),
        _fno("fno3d", 256, 1, 32),
    ]


def tiny_jobs() -> list[Job]:
    """Return jobs that run the code of every case in a minute or two on two cores."""
    # Nearly every activation of models this small moves.
    steps = {"warmup": 1, "steps": 2, "threads": 1, "min_bytes": 1024}
    transformer = Shape("transformer", 64, 2, 128, 3)
    fno2d, fno3d = Shape("fno2d", 32, 2, 8, 2, 8), Shape("fno3d", 16, 1, 8, 2, 4)
    capacity = {"field": "size", "multiple": 8, "most": 16, "limit_bytes": GIB, "min_bytes": 1024}
    return [
        Job("link", "link", ("none",), None, {"size_bytes": 2**20, "steps": 2}),
        Job("transformer-64", "steps", EVERY, transformer, steps),
        Job("fno2d-32", "steps", ("none", "ebbtide"), fno2d, steps),
        Job("fno3d-16", "steps", ("none", "ebbtide"), fno3d, steps),
        Job("fno2d-capacity-size-1", "capacity", ("none", "ebbtide"), fno2d, capacity),
        _overhead(100),
    ]


def _transformer(length: int, batch: int) -> Job:
    """Return a job on a transformer with 1.14 billion weights.

    There are 20 x 12 x 2048^2 weights in blocks and 2 x 32,000 x 2048 in the embedding and the
    output layer.
    """
    shape = Shape("transformer", length, batch, 2048, 20, precision="bf16")
    return Job(f"transformer-{length}", "steps", EVERY, shape, {"warmup": 3, "steps": 7})


def _fno(model: str, points: int, batch: int, channels: int) -> Job:
    shape = Shape(model, points, batch, channels, 4, 32 if model == "fno2d" else 16)
    steps = {"warmup": 3, "steps": 7}
    return Job(f"{model}-{points}", "steps", WITHOUT_WEIGHTS, shape, steps)


def _capacity(field_name: str, limit_gib: int, model: str, multiple: int, most: int) -> Job:
    """Return a job that finds the largest size or batch that trains within a memory limit.

    The size is found for one sample, and the batch on a grid of 512 points along each side.
    """
    channels, modes = (64, 32) if model == "fno2d" else (32, 16)
    points = 512 if field_name == "batch" else multiple
    shape = Shape(model, points, 1, channels, 4, modes)
    more = {
        "field": field_name,
        "multiple": multiple,
        "most": most,
        "limit_bytes": limit_gib * GIB,
    }
    return Job(f"{model}-capacity-{field_name}-{limit_gib}", "capacity", FOR_CAPACITY, shape, more)


def _overhead(tensors: int) -> Job:
    more = {"tensors": tensors, "warmup": 1, "steps": 11}
    return Job("overhead", "overhead", FOR_OVERHEAD, None, more)
