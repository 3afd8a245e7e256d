"""A process group of one process that can send to itself, which Gloo cannot.

torch 2.11 begins each pipeline with a small message from every stage to its neighbours, also where
a neighbour is in the same process. Gloo then raises "Pair is not connected". torch 2.13 hands
tensors over inside a process.
"""

from collections import deque

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future


class LoopbackGroup(dist.ProcessGroup):
    """Messages arrive in the order in which they were sent, whoever comes first."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        assert size == 1
        self._messages: deque[tuple[list[Tensor], Future]] = deque()
        self._receivers: deque[tuple[list[Tensor], Future]] = deque()

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "loopback"

    def send(self, tensors: list[Tensor], _destination: int, _tag: int) -> dist.Work:
        sent: Future = Future()
        self._messages.append((tensors, sent))
        self._deliver()
        return _create_work_from_future(sent)

    def recv(self, tensors: list[Tensor], _source: int, _tag: int) -> dist.Work:
        received: Future = Future()
        self._receivers.append((tensors, received))
        self._deliver()
        return _create_work_from_future(received)

    def _deliver(self) -> None:
        while self._messages and self._receivers:
            message, sent = self._messages.popleft()
            buffers, received = self._receivers.popleft()
            for buffer, tensor in zip(buffers, message, strict=True):
                buffer.copy_(tensor)
            sent.set_result(message)
            received.set_result(buffers)


def register() -> None:
    """Make ``"loopback"`` a backend of ``init_process_group``."""
    if not hasattr(dist.Backend, "LOOPBACK"):
        dist.Backend.register_backend(
            "loopback", lambda _store, rank, size, _timeout: LoopbackGroup(rank, size), False, "cpu"
        )
