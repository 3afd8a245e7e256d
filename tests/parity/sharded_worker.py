"""The processes that test_sharded.py looks at. Writes what each rank saw.

python sharded_worker.py DIRECTORY [WORLD [CASE]]

The processes are forked from one that has imported torch, so that they start at once.
"""

import contextlib
import functools
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed._composable import replicate
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recompute

import ebbtide
from ebbtide.planning import Decision, LayerMode, LayerPlan, LayerProfile, Plan

BATCH, LENGTH, WIDTH, HEADS, BLOCKS = 2, 32, 32, 4, 2
STEPS = 3
CPU = torch.device("cpu")
EVERYTHING = ebbtide.ActivationPolicy(min_bytes=1024)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for y in (self.q(x), self.k(x), self.v(x))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mix = nn.Parameter(torch.rand(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        mix = self.mix.to_local() if isinstance(self.mix, DTensor) else self.mix
        # Nothing in autograd's graph tells that the second factor is a parameter.
        return y @ mix @ mix.detach()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            if self.checkpointed and number:
                x = recompute(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(x)


Sharding = Callable[[Net], nn.Module]


def fsdp(net: Net, *, root: bool = True, **options: Any) -> nn.Module:
    """FSDP2 of each block, and of the rest."""
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options) if root else net


def partly(net: Net) -> nn.Module:
    """FSDP2 of one block, of two other modules as one, and of the rest."""
    fully_shard(net.blocks[0])
    fully_shard([net.embed, net.head])
    return fully_shard(net)


def fsdp1(net: Net, **options: Any) -> nn.Module:
    """The FSDP before FSDP2, whose parameters are views of a flat one."""
    for number, block in enumerate(net.blocks):
        net.blocks[number] = FullyShardedDataParallel(block, device_id=CPU, **options)
    return FullyShardedDataParallel(net, device_id=CPU, **options)


def hsdp(net: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "shard"))
    return fsdp(net, mesh=mesh)


def tensor_parallel(net: Net, mesh: Any = None, *, plain: bool = True) -> nn.Module:
    """Tensor parallelism, with sequence parallelism between the products.

    Args:
        net: the model.
        mesh: the processes; None means all.
        plain: whether the inner tensors of `Mlp` are plain tensors; else they are DTensors.
    """
    if mesh is None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sequence = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    rowwise = RowwiseParallel(output_layouts=Shard(1))
    for block in net.blocks:
        plan = {
            "norm1": SequenceParallel(use_local_output=True),
            "norm2": SequenceParallel(use_local_output=plain),
            "attention": sequence,
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.out": rowwise,
            "mlp": sequence,
            "mlp.up": ColwiseParallel(use_local_output=plain),
            "mlp.down": rowwise,
        }
        block.mlp.mix = nn.Parameter(distribute_tensor(block.mlp.mix, mesh, [Replicate()]))
        parallelize_module(block, mesh, plan)
    embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return parallelize_module(net, mesh, {"embed": embed, "head": head})


def two_dimensions(net: Net) -> nn.Module:
    """FSDP2 over tensor parallelism."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel(net, mesh["tp"])
    return fsdp(net, mesh=mesh["dp"])


def ddp(net: Net, **options: Any) -> nn.Module:
    return DistributedDataParallel(net, **options)


@dataclass(frozen=True)
class Case:
    """How a model is sharded, in which order it is offloaded, and how it is trained."""

    shard: Sharding
    first: bool = False  # whether the offload comes first
    wrap: bool = False  # whether `wrap_forward_with_offload` is used
    checkpointed: bool = False
    accumulate: int = 1  # forwards and backwards for one step of the optimizer
    frozen: str = ""  # parameters with this in their name are frozen
    autocast: bool = False
    clip: bool = False
    mode: Any = "offload"  # of `ActivationPolicy`

    def data_rank(self) -> int:
        """Which share of the data a rank has; with tensor parallelism ranks share theirs."""
        if self.shard is two_dimensions:
            return dist.get_rank() // 2
        return 0 if self in TP.values() else dist.get_rank()

    def build(self) -> Net:
        torch.manual_seed(0)
        net = Net(checkpointed=self.checkpointed)
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(not self.frozen or self.frozen not in name)
        return net


def attach(case: Case, net: nn.Module) -> ebbtide.OffloadHandle:
    if not case.wrap:
        return ebbtide.offload(net, activations=replace(EVERYTHING, mode=case.mode))
    net.forward = ebbtide.wrap_forward_with_offload(net.forward, activations=EVERYTHING)
    return net.forward.handle


@contextlib.contextmanager
def without_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients where they are, as each kind of sharding has it."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    else:
        yield


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def train(case: Case, shard: Sharding | None, *, offloaded: bool) -> tuple[dict[str, Any], Any]:
    """Losses, gradients and parameters of some steps, and the statistics of each step."""
    net = case.build()
    handle = attach(case, net) if offloaded and case.first else None
    model = net if shard is None else shard(net)
    if offloaded and not case.first:
        handle = attach(case, model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    mixed = len({isinstance(p, DTensor) for p in parameters}) > 1  # as with inner modules only
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=not mixed)
    generator = torch.Generator().manual_seed(7 + case.data_rank())
    seen: dict[str, Any] = {"losses": [], "gradients": [], "parameters": []}
    stats = []
    for _ in range(STEPS):
        for part in range(case.accumulate):
            last = part == case.accumulate - 1
            with contextlib.nullcontext() if last else without_sync(model):
                x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
                with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                    loss = model(x).square().mean()
                loss.backward()
                seen["losses"].append(loss.detach().clone())
                if handle is not None:
                    stats.append(handle.stats)
        if case.clip:
            norm = nn.utils.clip_grad_norm_(parameters, 0.01)
            seen["losses"].append(local(norm))
        seen["gradients"] += [local(p.grad) for p in parameters if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    seen["parameters"] = [local(p) for p in model.parameters()]
    if handle is not None:
        handle.detach()
    return seen, stats


@functools.cache
def train_plain(case: Case) -> dict[str, Any]:
    """Losses, gradients and parameters without ebbtide."""
    return train(case, case.shard, offloaded=False)[0]


@functools.cache
def train_whole(case: Case) -> list[ebbtide.StepStats]:
    """The statistics of a model that is not sharded at all."""
    return train(case, None, offloaded=True)[1]


def look_at(case: Case) -> dict[str, Any]:
    """What a rank saw of a case."""
    alike = replace(case, first=False, wrap=False)
    plain = train_plain(alike)
    seen, stats = train(case, case.shard, offloaded=True)
    whole = train_whole(replace(alike, shard=fsdp, clip=False))
    return {
        "same": {
            name: len(seen[name]) == len(plain[name]) > 0
            and all(map(torch.equal, seen[name], plain[name]))
            for name in plain
        },
        "counts": {name: len(tensors) for name, tensors in plain.items()},
        "moved": bool(any(gradient.any() for gradient in plain["gradients"])),
        "offloaded_bytes": [each.offloaded_bytes for each in stats],
        "parameter_bytes": [each.parameter_bytes for each in stats],
        "whole_offloaded_bytes": [each.offloaded_bytes for each in whole],
        "whole_parameter_bytes": [each.parameter_bytes for each in whole],
    }


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FSDP: dict[str, Case] = {
    "fsdp": Case(fsdp),
    "fsdp-after": Case(fsdp, first=True),
    "fsdp-inner": Case(partial(fsdp, root=False)),
    "fsdp-inner-after": Case(partial(fsdp, root=False), first=True),
    "fsdp-wrap": Case(fsdp, wrap=True),
    "fsdp-wrap-after": Case(fsdp, first=True, wrap=True),
    "fsdp-stays-unsharded": Case(partial(fsdp, reshard_after_forward=False)),
    "fsdp-offload-policy": Case(partial(fsdp, offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "fsdp-bfloat16": Case(partial(fsdp, mp_policy=BF16)),
    "fsdp-autocast": Case(fsdp, autocast=True),
    "fsdp-checkpoint": Case(fsdp, checkpointed=True),
    "fsdp-accumulate": Case(fsdp, accumulate=3),
    "fsdp-frozen": Case(fsdp, frozen="attention"),
    "fsdp-frozen-autocast": Case(fsdp, frozen="attention", autocast=True),
    "fsdp-clip": Case(fsdp, clip=True),
    "fsdp-recompute": Case(fsdp, mode="recompute+offload"),
    "fsdp-recompute-after": Case(fsdp, first=True, mode="recompute+offload"),
}
TP: dict[str, Case] = {
    "tp": Case(tensor_parallel),
    "tp-after": Case(tensor_parallel, first=True),
    "tp-wrap": Case(tensor_parallel, wrap=True),
    "tp-dtensors": Case(partial(tensor_parallel, plain=False)),
    "tp-checkpoint": Case(tensor_parallel, checkpointed=True),
    "tp-clip": Case(tensor_parallel, clip=True),
    "tp-recompute": Case(tensor_parallel, mode="recompute+offload"),
    "tp-autocast": Case(tensor_parallel, autocast=True),
}
DDP: dict[str, Case] = {
    "ddp": Case(ddp),
    "ddp-after": Case(ddp, first=True),
    "ddp-static": Case(partial(ddp, static_graph=True)),
    "ddp-accumulate": Case(ddp, accumulate=3),
    "ddp-recompute": Case(ddp, mode="recompute+offload"),
}
OTHERS: dict[str, Case] = {
    "fsdp-root-only": Case(fully_shard),
    "fsdp-partly": Case(partly),
    "fsdp1": Case(fsdp1),
    "fsdp1-original": Case(partial(fsdp1, use_orig_params=True)),
    "replicate": Case(replicate),
}
CASES: dict[int, dict[str, Case]] = {
    1: {name: (FSDP | TP | DDP)[name] for name in ("fsdp", "fsdp-after", "tp", "ddp")},
    2: FSDP | TP | DDP | OTHERS,
    4: {
        "hsdp": Case(hsdp),
        "hsdp-after": Case(hsdp, first=True),
        "fsdp-tp": Case(two_dimensions),
        "fsdp-tp-after": Case(two_dimensions, first=True),
        "tp": TP["tp"],
    },
}


def check_state_dict(directory: Path) -> dict[str, bool]:
    """Save an offloaded model and its optimizer, load them into another one, and train both."""

    def build(seed: int) -> tuple[nn.Module, ebbtide.OffloadHandle, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = fsdp(Net())
        handle = ebbtide.offload(model, activations=EVERYTHING)
        return model, handle, torch.optim.AdamW(model.parameters(), foreach=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        model(torch.ones(BATCH, LENGTH, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [local(p) for p in model.parameters()]

    first, _, optimizer = build(seed=0)
    step(first, optimizer)
    weights, state = get_state_dict(first, optimizer)
    checkpoint.save({"weights": weights, "state": state}, checkpoint_id=directory / "checkpoint")
    whole = get_model_state_dict(first, options=StateDictOptions(full_state_dict=True))
    expected = step(first, optimizer)

    second, handle, its_optimizer = build(seed=1)
    weights, state = get_state_dict(second, its_optimizer)
    loaded = {"weights": weights, "state": state}
    checkpoint.load(loaded, checkpoint_id=directory / "checkpoint")
    set_state_dict(
        second,
        its_optimizer,
        model_state_dict=loaded["weights"],
        optim_state_dict=loaded["state"],
    )
    return {
        "names": whole.keys() == dict(Net().named_parameters()).keys(),
        "same": all(map(torch.equal, step(second, its_optimizer), expected)),
        "left": handle.stats.offloaded_bytes > 0,
    }


def check_weights(_: Path) -> dict[str, bool]:
    """Weights of sharded models are refused, whichever comes first."""
    policy = ebbtide.WeightPolicy(min_bytes=1)
    found = {}
    for name, shard in {"fsdp": fsdp, "root": fully_shard, "tp": tensor_parallel}.items():
        model = shard(Net())
        try:
            ebbtide.offload(model, weights=policy)
        except ebbtide.PolicyError as error:
            found[f"{name} first"] = "CPUOffloadPolicy" in str(error)
        net = Net()
        with ebbtide.offload(net, weights=policy):
            model = shard(net)
            try:
                model(torch.ones(BATCH, LENGTH, WIDTH))
            except ebbtide.PolicyError as error:
                found[f"{name} last"] = "CPUOffloadPolicy" in str(error)
    return found


def check_weights_ddp(_: Path) -> dict[str, bool]:
    """DDP leaves whole weights on each rank, so that they can rest elsewhere."""
    runs = []
    for weights in (None, ebbtide.WeightPolicy(min_bytes=1)):
        torch.manual_seed(0)
        net = Net()
        handle = ebbtide.offload(net, activations=EVERYTHING, weights=weights)
        model = ddp(net)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(STEPS):
            model(torch.full((BATCH, LENGTH, WIDTH), dist.get_rank() + 1.0)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        handle.detach()
        runs.append([local(p) for p in model.parameters()])
    return {"same": all(map(torch.equal, *runs))}


def check_layers(_: Path) -> dict[str, bool]:
    """Blocks of which only some are sharded are the layers of one model."""
    with ebbtide.offload(partly(Net())) as handle:
        return {"found": handle.layers == ("blocks.0", "blocks.1")}


BUDGETED: dict[str, Sharding] = {
    "fsdp": fsdp,
    "fsdp-bfloat16": partial(fsdp, mp_policy=BF16),
    "fsdp1": fsdp1,
    "tp": tensor_parallel,
    "tp-dtensors": partial(tensor_parallel, plain=False),
    "replicate": replicate,
    "ddp": ddp,
}


def halve(layer: LayerProfile) -> LayerPlan:
    """Offload every other storage of a layer."""
    leaves = [storage.may_leave and storage.number % 2 for storage in layer.storages]
    return LayerPlan(
        decisions=tuple(Decision.OFFLOAD if each else Decision.KEEP for each in leaves)
    )


def recompute_others(layers: Sequence[LayerProfile]) -> Plan:
    """Recompute every other layer, and on each rank others than on the last."""
    modes = itertools.cycle([LayerMode.RECOMPUTE, LayerMode.AS_IS])
    own_modes = itertools.islice(modes, dist.get_rank(), None)
    kept = ((Decision.KEEP,) * len(layer.storages) for layer in layers)
    return Plan(
        layers=tuple(
            LayerPlan(mode=mode, decisions=decisions)
            for decisions, mode in zip(kept, own_modes, strict=False)
        )
    )


def check_budgets(directory: Path) -> dict[str, bool]:
    """A sharded model is planned from its first step, with the same bits under any plan."""
    policy = ebbtide.ActivationPolicy(min_bytes=1)
    file = directory / f"plan{dist.get_rank()}.json"

    def steps(model: nn.Module, count: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(count):
            x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
            model(x).square().mean().backward()
        return [local(p.grad) for p in model.parameters() if p.grad is not None]

    def run(shard: Sharding, count: int, **options: Any) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        model = shard(Net())
        with ebbtide.offload(model, **options) if options else contextlib.nullcontext() as handle:
            return steps(model, count), handle

    found = {}
    for name, shard in BUDGETED.items():
        gradients, handle = run(shard, 24, budget="90%", activations=policy)
        found[f"{name} budget"] = all(map(torch.equal, gradients, run(shard, 24)[0]))
        planned = handle.plan
        found[f"{name} settles"] = planned is not None and planned.settled
        halved = Plan(layers=tuple(halve(layer) for layer in planned.profile.layers))
        replace(planned, plan=halved).save(file)
        gradients, handle = run(shard, 3, plan=file, activations=policy)
        found[f"{name} plan"] = all(map(torch.equal, gradients, run(shard, 3)[0]))
        stats = handle.stats
        found[f"{name} moves"] = stats.offloaded_bytes > 0 and stats.kept_bytes > 0
        # Each rank plans for itself, so that they may recompute different layers.
        replace(planned, plan=recompute_others(planned.profile.layers)).save(file)
        gradients, handle = run(shard, 3, plan=file, activations=policy)
        found[f"{name} plans"] = all(map(torch.equal, gradients, run(shard, 3)[0]))
    return found


CHECKS: dict[str, Callable[[Path], dict[str, bool]]] = {
    "budgets": check_budgets,
    "state-dict": check_state_dict,
    "weights": check_weights,
    "weights-ddp": check_weights_ddp,
    "layers": check_layers,
}


def run_rank(rank: int, world: int, directory: Path, only: str) -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{directory}/rendezvous{world}"
    # Ranks that do not communicate in the same order find out soon.
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    looks = {name: partial(look_at, case) for name, case in CASES[world].items()}
    if world == 2:
        looks |= {name: partial(check, directory) for name, check in CHECKS.items()}
    seen: dict[str, Any] = {}
    for name, look in looks.items():
        if only in (name, ""):
            try:
                seen[name] = look()
            except Exception:
                seen[name] = {"error": traceback.format_exc()}
    (directory / f"world{world}-rank{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


def main(directory: str, world: str = "", only: str = "") -> None:
    for count in [int(world)] if world else CASES:
        arguments = (count, Path(directory), only)
        mp.start_processes(run_rank, arguments, nprocs=count, start_method="fork")


if __name__ == "__main__":
    main(*sys.argv[1:])
