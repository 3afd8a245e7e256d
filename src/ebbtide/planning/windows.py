"""Opens a window for copies in each pass of a step: as many bytes as the pass has room for.

[Note: windows] One bound on the bytes in flight for a whole step is what the pass with the highest
peak has room for, and often that is nothing. With windows, each pass has a bound of its own. A
forward pass begins when what is on its way down fits into its window; what it saves itself leaves
without a wait, because the pass needs it in memory anyway. The backward begins when all copies down
are complete, and a backward pass queues reloads while the bytes that were brought back and not used
yet fit. Unlike the one bound, a window is never exceeded, not by a single copy either: with a
window of 0, a pass brings back what it needs itself, and nothing for later passes.

A buffer that was brought back for a later pass also occupies the passes between. So the window of a
backward pass is never larger than what the passes after it use up and have room for.

Torch tells when a layer's backward begins and not when it ends. So the backward of the work before
a layer has that layer's window, and the backward of work behind the last layer brings back nothing
ahead of its need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ebbtide.planning.plan import Plan
from ebbtide.planning.prediction import StorageUses
from ebbtide.planning.profile import StepProfile


def open_windows(
    plan: Plan,
    profile: StepProfile,
    uses: StorageUses,
    peaks: Sequence[int],
    device_bytes: int,
) -> Plan:
    """Return a plan whose windows use the memory that it leaves free.

    Args:
        plan: the plan.
        profile: the step.
        uses: what its layers save.
        peaks: what each position of the step needs if all windows are closed.
        device_bytes: how much each may need.
    """
    count = len(profile.layers)
    rooms = [max(0, device_bytes - peak_bytes) for peak_bytes in peaks]
    windows = rooms[: count + 1] + [0] * count
    used = uses.under(plan)
    ahead_bytes = sum(
        memory.size_bytes for memory in uses.memories
    )  # what may be there for passes after the one that is looked at
    for group in reversed(backward_groups(profile)):
        if group[0] == count:
            windows[count] = min(rooms[position] for position in group)
            break
        window = min(ahead_bytes, *(rooms[position] for position in group))
        ahead_bytes = window
        for position in group:
            windows[position] = window
            ahead_bytes += uses.offloaded_bytes(used, used.needed[2 * count - position])
    return dataclasses.replace(plan, windows=tuple(windows), max_inflight_bytes=max(windows))


def backward_groups(profile: StepProfile) -> list[list[int]]:
    """Return the loss and the positions of the backward passes, by whose window they have.

    Each group but the first begins with the backward of a layer. See [Note: windows].
    """
    count = len(profile.layers)
    groups = [[count]]
    for index in reversed(range(count)):
        if profile.layers[index].between:
            groups[-1].append(2 * count - index)
        else:
            groups.append([2 * count - index])
    return groups
