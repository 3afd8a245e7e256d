"""One rank of the pipelines that test_pipelines.py looks at. Run by torchrun; writes what it saw.

python -m torch.distributed.run --nproc-per-node 2 pipeline_worker.py DIRECTORY
"""

import json
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

import ebbtide
from ebbtide.interop.pipelining import offload_stages

ROWS, WIDTH, WIDE = 64, 32, 256
# A stage computes GELU(x A) B. Saved for backward: x, which the pipeline keeps; x A, for the GELU;
# and its result, for the product with B. The last two are of one size.
TENSOR_BYTES = ROWS * WIDE * 4
UNIT_BYTES = 2 * TENSOR_BYTES
STEPS = 3
VOCABULARY, LENGTH = 50, 16


class Mlp(nn.Module):
    """One stage, that knows how much of what it made is still in memory, in whatever hands."""

    made: ClassVar[list[weakref.ref[torch.UntypedStorage]]] = []  # by all stages of this rank
    most_alive = 0

    def __init__(self, _: int, __: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(x)
        bent = F.gelu(wide)
        Mlp.made += [weakref.ref(tensor.untyped_storage()) for tensor in (wide, bent)]
        Mlp.made = [ref for ref in Mlp.made if ref() is not None]
        Mlp.most_alive = max(Mlp.most_alive, len(Mlp.made))
        return self.down(bent)

    @staticmethod
    def batch(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        shape = (count * ROWS, WIDTH)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    @staticmethod
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)


class Transformer(nn.Module):
    """One stage of a small language model, with dropout."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if stage == 0 else nn.Identity()
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, WIDE, activation="gelu", batch_first=True)
        last = stage == num_stages - 1
        self.head = nn.Linear(WIDTH, VOCABULARY) if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x)))

    @staticmethod
    def batch(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        shape = (count * 8, LENGTH)
        tokens = torch.randint(VOCABULARY, shape, generator=generator)
        return tokens, torch.randint(VOCABULARY, shape, generator=generator)

    @staticmethod
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


# name: schedule, model, optimizer, stages a rank, microbatches a rank
Case = tuple[Any, Any, Callable[[list[nn.Parameter]], torch.optim.Optimizer], int, int]
CASES: dict[int, dict[str, Case]] = {
    2: {
        "gpipe": (ScheduleGPipe, Mlp, sgd, 1, 3),
        "1f1b": (Schedule1F1B, Mlp, adamw, 1, 3),
        "interleaved-1f1b": (ScheduleInterleaved1F1B, Mlp, adamw, 2, 3),
        "looped-bfs": (ScheduleLoopedBFS, Mlp, sgd, 2, 2),
        "interleaved-zero-bubble": (ScheduleInterleavedZeroBubble, Mlp, adamw, 2, 3),
        "zbv": (ScheduleZBVZeroBubble, Mlp, sgd, 2, 3),
        "dualpipev": (ScheduleDualPipeV, Mlp, adamw, 2, 4),
        "transformer-gpipe": (ScheduleGPipe, Transformer, adamw, 1, 3),
        "transformer-zbv": (ScheduleZBVZeroBubble, Transformer, adamw, 2, 3),
    },
    4: {
        "gpipe": (ScheduleGPipe, Mlp, adamw, 1, 2),
        "1f1b": (Schedule1F1B, Mlp, sgd, 1, 2),
        "interleaved-1f1b": (ScheduleInterleaved1F1B, Mlp, sgd, 2, 2),
        "interleaved-zero-bubble": (ScheduleInterleavedZeroBubble, Mlp, sgd, 2, 2),
        "zbv": (ScheduleZBVZeroBubble, Mlp, adamw, 2, 2),
        "transformer-1f1b": (Schedule1F1B, Transformer, sgd, 1, 2),
    },
}


def build(case: Case) -> tuple[Any, list[nn.Module], int]:
    """A rank's schedule, its stages' modules and the number of microbatches."""
    kind, model, _, stages_a_rank, share = case
    rank, world = dist.get_rank(), dist.get_world_size()
    num_stages, count = stages_a_rank * world, share * world
    numbers = list(range(rank, num_stages, world))
    if kind in (ScheduleZBVZeroBubble, ScheduleDualPipeV):
        numbers = [rank, num_stages - 1 - rank]
    modules, stages = [], []
    for number in numbers:
        torch.manual_seed(number)
        modules.append(model(number, num_stages))
        stages.append(PipelineStage(modules[-1], number, num_stages, torch.device("cpu")))
    first = stages[0] if stages_a_rank == 1 else stages
    return kind(first, count, loss_fn=model.loss), modules, count


def attach(pipeline: Any, model: Any, least: int) -> ebbtide.OffloadHandle:
    """With as little on the device as this rank's order can be run with, from ``least`` on."""
    # Rebuilding would take the GELU's result away: then there were less to see move.
    policy = ebbtide.ActivationPolicy(min_bytes=1024, rebuild=model is not Mlp)
    weights = ebbtide.WeightPolicy() if model is Transformer else None
    for resident in range(least, 100):
        try:
            return offload_stages(
                pipeline, resident=resident, activations=policy, weights=weights, trace=True
            )
        except ebbtide.ScheduleError:
            continue
    raise AssertionError("no number of units is enough")


def train(case: Case, least: int | None) -> tuple[dict[str, list[Tensor]], Any]:
    """Losses, gradients and parameters of some steps, and the handle if it was offloaded."""
    _, model, make_optimizer, *_ = case
    pipeline, modules, count = build(case)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = make_optimizer(parameters)
    handle = None if least is None else attach(pipeline, model, least)
    generator = torch.Generator().manual_seed(7)
    torch.manual_seed(dist.get_rank())  # for dropout
    seen: dict[str, list[Tensor]] = {"losses": [], "gradients": [], "parameters": []}
    for _ in range(STEPS):
        # The first step is not looked at: it begins with finding out shapes, all stages at once.
        Mlp.made, Mlp.most_alive = [], 0
        batch, target = model.batch(count, generator)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        arguments = (batch,) if dist.get_rank() == 0 else ()
        pipeline.step(*arguments, target=target, losses=losses)
        seen["losses"] += [loss.detach() for loss in losses]
        seen["gradients"] += [p.grad.clone() for p in parameters if p.grad is not None]
        optimizer.step()
    seen["parameters"] = [parameter.detach().clone() for parameter in parameters]
    return seen, handle


def look_at(case: Case) -> dict[str, Any]:
    """What a rank saw of a case."""
    plain, _ = train(case, least=None)
    plain_alive = Mlp.most_alive
    _, kept = train(case, least=99)
    seen, handle = train(case, least=1)
    alive, stats, trace = Mlp.most_alive, handle.stats, handle.trace
    handle.detach()
    return {
        "same": {
            name: len(seen[name]) == len(plain[name])
            and all(map(torch.equal, seen[name], plain[name]))
            for name in plain
        },
        "counts": {name: len(tensors) for name, tensors in plain.items()},
        "moved": bool(any(gradient.any() for gradient in plain["gradients"])),
        "schedule": str(handle.schedule),
        "peak_device_bytes": stats.peak_device_bytes,
        "kept_peak_bytes": kept.stats.peak_device_bytes,
        "offloaded_bytes": stats.offloaded_bytes,
        "reloaded_bytes": stats.reloaded_bytes,
        "plain_alive": plain_alive,
        "alive": alive,
        "events": [(e.what, e.label, e.begin_s, e.end_s) for e in trace.events if not e.kind],
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    looked = {name: look_at(case) for name, case in CASES[world].items()}
    Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps(looked))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
