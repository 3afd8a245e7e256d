"""Train a small transformer on Python's own source in a pipeline, with its activations offloaded.

Run: torchrun --nproc-per-node 2 examples/pipeline.py
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

import ebbtide
from ebbtide.interop.pipelining import offload_stages

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument(
    "--resident", type=int, default=2, help="maximum microbatches of a stage on the device"
)
parser.add_argument("--microbatches", type=int, default=8)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--length", type=int, default=128, help="characters in a sequence")
parser.add_argument("--steps", type=int, default=4)
args = parser.parse_args()

STAGES_A_RANK, ROWS, CHARACTERS = 2, 8, 128
# The tensors of this small model are below the default of min_bytes.
POLICY = ebbtide.ActivationPolicy(min_bytes="64KiB")


class Stage(nn.Module):
    """Two layers; the first stage embeds characters, the last one predicts the next characters."""

    def __init__(self, number: int, num_stages: int) -> None:
        super().__init__()
        first, last = number == 0, number == num_stages - 1
        self.embed = nn.Embedding(CHARACTERS, args.width) if first else nn.Identity()
        self.layers = nn.Sequential(
            *[
                nn.TransformerEncoderLayer(
                    args.width, 4, 4 * args.width, activation="gelu", batch_first=True
                )
                for _ in range(2)
            ]
        )
        self.head = nn.Linear(args.width, CHARACTERS) if last else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def load_text() -> torch.Tensor:
    """Return the ASCII characters in the sources of Python's standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files[:60])
    text = bytes(character for character in text if character < CHARACTERS)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def train(resident: int) -> tuple[list[float], ebbtide.StepStats, str]:
    """Train for some steps.

    Returns:
        The loss of each step (empty except on the rank of the last stage), ebbtide's statistics of
        the last step, and the schedule as text.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    num_stages = STAGES_A_RANK * world
    stages = []
    for number in range(rank, num_stages, world):
        torch.manual_seed(number)
        stages.append(PipelineStage(Stage(number, num_stages), number, num_stages, device))

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    pipeline = ScheduleInterleaved1F1B(stages, args.microbatches, loss_fn=loss_fn)
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(rank)  # for dropout
    history = []

    # The one line that ebbtide adds. Losses, gradients and weights stay the same to the bit.
    with offload_stages(pipeline, resident=resident, activations=POLICY) as handle:
        for _ in range(args.steps):
            count = args.microbatches * ROWS
            begins = torch.randint(len(text) - args.length - 1, (count, 1), generator=generator)
            rows = text[begins + torch.arange(args.length + 1)]
            batch = (rows[:, :-1],) if rank == 0 else ()
            losses: list[torch.Tensor] = []
            optimizer.zero_grad()
            pipeline.step(*batch, target=rows[:, 1:], losses=losses)
            optimizer.step()
            history += [torch.stack(losses).mean().item()] if losses else []
    return history, handle.stats, str(handle.schedule)


device = torch.device("cpu")  # with accelerators, use one per rank and the backend "nccl"
torch.set_num_threads(1)
dist.init_process_group("gloo")
text = load_text()

# The first run has room for everything, so nothing is offloaded.
everything, kept, _ = train(resident=STAGES_A_RANK * args.microbatches)
history, stats, schedule = train(args.resident)
assert history == everything

report = f"rank {dist.get_rank()}: peak of activations for backward "
report += f"{kept.peak_device_bytes / 2**20:.1f} MiB, offloaded "
report += f"{stats.peak_device_bytes / 2**20:.1f} MiB\n{schedule}\n"
if history:
    report += "losses " + " ".join(f"{loss:.4f}" for loss in history)
reports: list[str | None] = [None] * dist.get_world_size()
dist.all_gather_object(reports, report)
if dist.get_rank() == 0:
    print("\n\n".join(map(str, reports)))
dist.destroy_process_group()
