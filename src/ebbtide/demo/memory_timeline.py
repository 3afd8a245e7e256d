"""Samples memory from a thread while a step runs."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import final

from ebbtide.memory.measured_memory import AbstractMemory

_SAMPLE_EVERY_S = 0.005


@final
class Timeline:
    """Samples memory from a thread while its `with` block runs.

    Attributes:
        samples: pairs of seconds since the block began and bytes in use, one every 5 ms.
    """

    def __init__(self, memory: AbstractMemory) -> None:
        self._memory = memory
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.samples: list[tuple[float, int]] = []

    def __enter__(self) -> Timeline:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        begin_s = time.perf_counter()
        while not self._over.wait(_SAMPLE_EVERY_S):
            self.samples.append((time.perf_counter() - begin_s, self._memory.now_bytes()))
