"""A process group for the device: gloo, with tensors staged through the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

NAME = "softgloo"


def register() -> None:
    """Make "softgloo" torch's backend for tensors of the device. Call it after `load`.

    Every collective waits for what is queued on the current stream, runs on the host with gloo, and
    queues the copies back. It hides races between collectives and kernels.
    """
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["softdevice", "cpu"])


def _create(store: dist.Store, rank: int, size: int, timeout: Any) -> dist.ProcessGroup:
    return _Staged(dist.ProcessGroupGloo(store, rank, size, timeout))


def _staged(name: str) -> Callable[..., Any]:
    def call(self: _Staged, *args: Any, **kwargs: Any) -> Any:
        pairs: list[tuple[Tensor, Tensor]] = []

        def down(tensor: Tensor) -> Tensor:
            if tensor.device.type == "cpu":
                return tensor
            host = tensor.detach().cpu()
            pairs.append((tensor.detach(), host))
            return host

        args, kwargs = tree_map_only(Tensor, down, (args, kwargs))
        work = getattr(self.gloo, name)(*args, **kwargs)
        if not pairs:
            return work
        work.wait()
        for tensor, host in pairs:
            tensor.copy_(host)
        return _Done([tensor for tensor, _ in pairs])

    return call


class _Message(dist._Work):
    """A message on its way. What was received is copied to the device when somebody waits."""

    def __init__(self, work: dist._Work, tensors: list[Tensor], hosts: list[Tensor]) -> None:
        super().__init__()
        self._work, self._tensors, self._hosts = work, tensors, hosts

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
        self._work.wait()
        for tensor, host in zip(self._tensors, self._hosts, strict=True):
            tensor.detach().copy_(host)
        self._tensors, self._hosts = [], []
        return True

    def is_completed(self) -> bool:
        return not self._tensors or self._work.is_completed()


class _Done(dist._Work):
    def __init__(self, results: list[Tensor]) -> None:
        super().__init__()
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._future.set_result(results)

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future


class _Staged(dist.ProcessGroup):
    """Runs each collective on the host."""

    def __init__(self, gloo: dist.ProcessGroupGloo) -> None:
        super().__init__(gloo.rank(), gloo.size())
        self.gloo = gloo

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def send(self, tensors: list[Tensor], *to: int) -> dist._Work:
        """Send without waiting: the other rank may be sending, too, before it receives."""
        hosts = [tensor.detach().cpu() for tensor in tensors]
        return _Message(self.gloo.send(hosts, *to), [], [])

    def recv(self, tensors: list[Tensor], *of: int) -> dist._Work:
        hosts = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
        return _Message(self.gloo.recv(hosts, *of), tensors, hosts)

    @property
    def group_name(self) -> str:
        """The name by which functional collectives find the group."""
        return dist.distributed_c10d._world.pg_names[self]


_COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
_NEWER_NAMES = {  # of torch 2.13's groups; its backends have the older ones
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
for _name, _of_gloo in ({name: name for name in _COLLECTIVES} | _NEWER_NAMES).items():
    setattr(_Staged, _name, _staged(_of_gloo))
