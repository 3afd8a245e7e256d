"""Measure how much host memory the host store takes for the tensors of training steps.

A model trains on the CPU with ebbtide's engine and a real `PinnedStore`, and every offload and
every drop is recorded. The same steps are then replayed with every tensor larger by the scale, as
if the grid were finer or the batch larger. The replay copies nothing, so its memory is only mapped.
The result is compared with torch's page-locked allocator, which rounds each tensor up to a power of
two and reuses a block only for tensors that round up to the same size.

Run: ``python -m benchmarks.pinned``
"""

from __future__ import annotations

import argparse
import collections
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from benchmarks import record
from ebbtide.devices.cpu import CpuDevice
from ebbtide.devices.device import AbstractEvent
from ebbtide.devices.lanes import LaneEvent
from ebbtide.policy import ActivationPolicy
from ebbtide.runtime.activations import Activations
from ebbtide.runtime.parameter_index import ParameterIndex
from ebbtide.runtime.rebuild import Placement
from ebbtide.runtime.saved_tensors import SavedTensorHooks
from ebbtide.runtime.transfers import Transfers
from ebbtide.stores.pinned import PinnedStore
from ebbtide.stores.store import AbstractStore, RestingSlot, Slot, Target
from ebbtide.tools.demo import build_model
from ebbtide.units import format_size

_BOUND_BYTES = 64 * 2**20
_STEPS = 3


class Move(NamedTuple):
    """One offload, or the drop of the slot that an offload returned."""

    number: int
    size_bytes: int
    drops: bool


@final
class NotingStore(AbstractStore):
    """A store that records its offloads and drops in `moves`.

    Args:
        store: store that does the work.
    """

    def __init__(self, store: AbstractStore) -> None:
        super().__init__()
        self.moves: list[Move] = []
        self._store = store
        self._numbers: dict[Slot, int] = {}
        self._count = itertools.count()

    @property
    def capacity_bytes(self) -> int:
        return self._store.capacity_bytes

    @property
    def room_bytes(self) -> int:
        return self._store.room_bytes

    @property
    def used_bytes(self) -> int:
        return self._store.used_bytes

    def offload(self, source: Tensor, ready: AbstractEvent) -> Slot:
        slot = self._store.offload(source, ready)
        self._numbers[slot] = next(self._count)
        self.moves.append(Move(self._numbers[slot], slot.size_bytes, drops=False))
        return slot

    def reload(self, slot: Slot, target: Target | None = None) -> tuple[Tensor, AbstractEvent]:
        return self._store.reload(slot, target)

    def allocate_resting(self, size_bytes: int, *, reserved: bool = False) -> RestingSlot:
        return self._store.allocate_resting(size_bytes, reserved=reserved)

    def write(
        self, slot: RestingSlot, offset_bytes: int, source: Tensor, ready: AbstractEvent
    ) -> tuple[AbstractEvent, AbstractEvent]:
        return self._store.write(slot, offset_bytes, source, ready)

    def drop(self, slot: Slot) -> None:
        self.moves.append(Move(self._numbers.pop(slot), slot.size_bytes, drops=True))
        self._store.drop(slot)

    def take_over(self, other: AbstractStore, resting: Iterable[RestingSlot]) -> None:
        self._store.take_over(other, resting)

    def close(self) -> None:
        self._store.close()


def main() -> None:
    """Measure and write the result file."""
    arguments = _arguments()
    torch.manual_seed(0)
    results = {}
    rows = [
        "| model | tensors a step | requested | pinned in step 1 | from step 2 | after step 3 "
        "| requested / pinned | torch's allocator |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, make in (("FNO", _fno), ("transformer", _transformer)):
        steps = _note_steps(*make(arguments), arguments.min_bytes)
        figures = _replay(steps, arguments.scale) | {
            "torch_bytes": _torch_bytes(steps, arguments.scale)
        }
        results[name] = figures | {"moves": steps}
        sizes = [
            format_size(figures[key])
            for key in ("requested_bytes", "step_1_bytes", "step_2_bytes", "step_3_bytes")
        ]
        tensors = sum(not move.drops for move in steps[0])
        cells = [name, str(tensors), *sizes, f"{figures['efficiency']:.4f}"]
        rows.append(f"| {' | '.join(cells)} | {format_size(figures['torch_bytes'])} |")
    table = "\n".join(rows)
    print(table)
    print(record.save("pinned", vars(arguments), results, table).name)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--resolution", type=int, default=64, help="nodes along each side of the FNO's grid"
    )
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--min-bytes", type=int, default=16 * 1024)
    parser.add_argument(
        "--scale", type=int, default=64, help="factor on the size of every tensor in the replay"
    )
    return parser.parse_args()


def _fno(arguments: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    x = torch.rand(arguments.batch_size, 1, arguments.resolution, arguments.resolution)
    return build_model(torch.device("cpu")), x


def _transformer(arguments: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(
        d_model=192, nhead=3, dim_feedforward=768, batch_first=True, norm_first=True
    )
    model = nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False)
    return model, torch.rand(arguments.batch_size, 197, 192)  # 14 x 14 patches and a class token


def _note_steps(model: nn.Module, x: Tensor, min_bytes: int) -> list[list[Move]]:
    """Train for some steps and return the moves that each step asks of the store."""
    device = CpuDevice()
    store = NotingStore(PinnedStore(device))
    transfers = Transfers(device, store, _BOUND_BYTES)
    placement = Placement(ActivationPolicy(min_bytes=min_bytes, rebuild=False))
    hooks = SavedTensorHooks(Activations(transfers), placement, ParameterIndex([model]))
    optimizer = torch.optim.AdamW(model.parameters())
    steps = []
    for _ in range(_STEPS):
        hooks.begin()
        try:
            loss = model(x).square().mean()
        finally:
            hooks.end()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
        transfers.poll()
        steps.append(store.moves)
        store.moves = []
    transfers.close()
    return steps


def _replay(steps: list[list[Move]], scale: int) -> dict[str, Any]:
    """Replay the steps and return how much memory the store holds after each of them."""
    device = _NoCopies()
    store = PinnedStore(device.device)
    capacities = []
    slots: dict[int, Slot] = {}
    requested_bytes = 0  # the most bytes of tensors that the store held at once
    begun = LaneEvent()
    begun.finish()
    for step in steps:
        for move in step:
            if move.drops:
                store.drop(slots.pop(move.number))
            else:
                source = torch.empty(move.size_bytes * scale, dtype=torch.uint8)
                slots[move.number] = store.offload(source, begun)
                held_bytes = sum(slot.size_bytes for slot in slots.values())
                requested_bytes = max(requested_bytes, held_bytes)
        capacities.append(store.capacity_bytes)
    store.has_room(1)  # trims memory that is not needed, as the next step's first request would
    figures = {
        "requested_bytes": requested_bytes,
        "step_1_bytes": capacities[0],
        "step_2_bytes": capacities[1],
        "step_3_bytes": store.capacity_bytes,
        "efficiency": requested_bytes / store.capacity_bytes,
    }
    store.close()
    return figures


@final
class _NoCopies:
    """Holds a CPU device whose offloads copy nothing."""

    def __init__(self) -> None:
        self.device = CpuDevice()
        copy: Callable[..., AbstractEvent] = self._copy
        self.device.copy_down = copy  # type: ignore[method-assign]

    def _copy(self, target: Tensor, source: Tensor, *after: AbstractEvent) -> AbstractEvent:
        assert target.numel() == source.numel()
        return after[0]


def _torch_bytes(steps: list[list[Move]], scale: int) -> int:
    """Return the bytes torch's allocator holds after the steps.

    It keeps every block and reuses it only for tensors that round up to the same size.
    """
    now: collections.Counter[int] = collections.Counter()
    most: collections.Counter[int] = collections.Counter()
    for move in itertools.chain.from_iterable(steps):
        block_bytes = 1 << (move.size_bytes * scale - 1).bit_length()
        now[block_bytes] += -1 if move.drops else 1
        most[block_bytes] = max(most[block_bytes], now[block_bytes])
    return sum(block_bytes * count for block_bytes, count in most.items())


if __name__ == "__main__":
    main()
