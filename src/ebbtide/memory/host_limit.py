"""The user's ``host_budget``: of one process, or of a host whose ranks divide it.

[Note: equal parts] A budget of a host is divided by the number of its ranks once, when the offload
begins. Each rank then knows its limit, so the limit holds whatever the other ranks do, equal steps
stay equal, and a rank that dies leaves nothing to tidy up. One pool for all ranks would give the
memory to whoever asks first: of four equal ranks with a tiered store, one or two would find host
memory and the others only the disk, and every step would take as long as the slowest rank. Ranks
with different needs, such as pipeline stages, can each be given a budget of their own.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from typing import Final, NamedTuple

import torch.distributed as dist

from ebbtide.errors import PolicyError
from ebbtide.units import format_size, parse_size_bytes

_OF_HOST: Final = re.compile(r"(.*)/\s*node\s*", re.IGNORECASE)
_RANKS_OF_HOST: Final = (
    "LOCAL_WORLD_SIZE",  # torchrun, accelerate launch
    "OMPI_COMM_WORLD_LOCAL_SIZE",  # Open MPI
    "MPI_LOCALNRANKS",  # Intel MPI, MPICH
    "MV2_COMM_WORLD_LOCAL_SIZE",  # MVAPICH
)


class HostLimit(NamedTuple):
    """The most host memory that one offload in this process may allocate.

    Attributes:
        size_bytes: the limit.
        origin: the budget that it is a part of, in words; empty if it is a budget of its own.
    """

    size_bytes: int
    origin: str = ""

    def __str__(self) -> str:
        of = f" ({self.origin})" if self.origin else ""
        return format_size(self.size_bytes) + of


def parse_host_budget(host_budget: int | str, *, name: str = "host_budget") -> HostLimit:
    """Parse a budget such as ``"24GiB"``, for this process, or ``"96GiB/node"``, for its host.

    Args:
        host_budget: the budget. That of a host is divided equally; see [Note: equal parts].
        name: name of the argument in error messages.

    Raises:
        PolicyError: the budget cannot be read, or the number of ranks is not known.
    """
    of_host = _OF_HOST.fullmatch(host_budget) if isinstance(host_budget, str) else None
    if of_host is not None:
        size_bytes, num_ranks = parse_size_bytes(of_host[1], name=name), num_host_ranks()
        origin = f"an equal part of {format_size(size_bytes)}/node for {num_ranks} ranks"
        return HostLimit(size_bytes // num_ranks, origin if num_ranks > 1 else "")
    return HostLimit(parse_size_bytes(host_budget, name=name))


def num_host_ranks() -> int:
    """Return how many ranks share this host.

    If only the number of all ranks is known, it is that number: on several hosts it is too large,
    and so each part too small, but the budget is never exceeded.

    Raises:
        PolicyError: this process was started by another Python process, which may have started
            more, and nothing says how many.
    """
    for variable in (*_RANKS_OF_HOST, "WORLD_SIZE"):
        value = os.environ.get(variable, "")
        if variable == "WORLD_SIZE" and dist.is_available() and dist.is_initialized():
            value = str(dist.get_world_size())
        if value.isdigit() and int(value):
            return int(value)
    if multiprocessing.parent_process() is not None:
        raise PolicyError(
            'a host_budget per node ("96GiB/node") is divided among the ranks of the host, and '
            "nothing tells this process how many there are; call init_process_group before "
            'offload, set LOCAL_WORLD_SIZE, or give each rank its part, such as "24GiB"'
        )
    return 1
