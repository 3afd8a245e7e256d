"""Loops in which anything may come between two statements, on the software accelerator."""

from __future__ import annotations

import random
from collections import Counter

import ebbtide
from harness import drain_autograd, make_store, poll_weakly
from loops import on_device
from soft_programs import Leftovers, make_device, running
from weight_programs import Net
from weight_statements import Loop, check_same, offload_weights, statements


def check_statements(seed: int, order: str = "threads", kind: str = "host") -> Counter[str]:
    """Carry out a loop, plainly and with weights at rest; compare everything.

    Args:
        seed: of the loop, and of the knobs of its bench.
        order: of execution.
        kind: of the store.
    """
    with running("statements", seed, order):
        leftovers = Leftovers()
        device = make_device(seed, random.Random(seed).choice((0.0, 0.5)))

        def offload(net: Net, draw: random.Random) -> ebbtide.OffloadHandle:
            bound_bytes = draw.choice((0, 2**18))
            with on_device(device, lambda: make_store(device, kind), bound_bytes) as built:
                handle = offload_weights(net, draw)
            built[0].store.on_progress = poll_weakly(built[0])
            return handle

        plain, mine = Loop(seed, None), Loop(seed, offload)
        done: list[str] = []
        for name, statement_seed in statements(seed):
            done.append(name)
            for loop in (plain, mine):
                loop.run(name, statement_seed)
            if random.Random(statement_seed).random() < 0.1:  # looking waits for the device
                drain_autograd()
                check_same(plain, mine, f"after {done}")
        for loop in (plain, mine):
            loop.end()
        drain_autograd()
        check_same(plain, mine, f"at the end, after {done}")
        content = mine.content
        del plain, mine, loop
        leftovers.check(device)
    return content
