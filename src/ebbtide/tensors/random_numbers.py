"""The states of all random numbers that a forward may draw."""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, final

import torch


def note_random_numbers(devices: Iterable[torch.device]) -> Callable[[], None]:
    """Note the states of the random numbers of torch, Python and NumPy.

    Args:
        devices: the devices whose random numbers are noted beside the host's.

    Returns:
        What puts the states back.
    """
    drawn_elsewhere = [each for each in devices if each.type not in ("cpu", "meta")]
    modules = [(torch.get_device_module(each), each) for each in drawn_elsewhere]
    states = [module.get_rng_state(device) for module, device in modules]
    host_state, others = torch.get_rng_state(), NumbersOfPython.now()

    def put_back() -> None:
        for (module, device), state in zip(modules, states, strict=True):
            module.set_rng_state(state, device)
        torch.set_rng_state(host_state)
        others.put_back()

    return put_back


@final
class NumbersOfPython:
    """The states of the random numbers of Python and NumPy, which may be put back.

    To copy both states takes 40 us, and it is done for each call of a recomputed layer. So `now`
    gives the last copy again while the generators' memory has the bytes that it had.
    """

    __slots__ = ("_memory", "_numpy_state", "_state")
    _last: ClassVar[NumbersOfPython | None] = None

    def __init__(self) -> None:
        # NumPy loads and seeds this where it is first used, which may be in the forward.
        from numpy import random as numpy_random

        before = _memory_of_generators()
        self._state = random.getstate()
        self._numpy_state: dict[str, Any] = numpy_random.get_state(legacy=False)
        # If another thread has drawn meanwhile, nothing tells which state was copied.
        self._memory = before if before == _memory_of_generators() else None

    @classmethod
    def now(cls) -> NumbersOfPython:
        """Return the present states."""
        last = cls._last
        if last is None or not last._are_present():
            last = cls._last = cls()
        return last

    def _are_present(self) -> bool:
        return self._memory is not None and self._memory == _memory_of_generators()

    def put_back(self) -> None:
        """Put them back, if they differ from the present ones."""
        if not self._are_present():
            from numpy import random as numpy_random

            random.setstate(self._state)
            numpy_random.set_state(self._numpy_state)


def _memory_of_generators() -> tuple[object, ...] | None:
    """Return what changes whenever the states of the random numbers of Python or NumPy do.

    These are the bytes of the objects that have them, without their reference counts. None if
    NumPy draws from a generator whose state may be elsewhere.
    """
    own, numpy_random = vars(random), sys.modules["numpy.random"]
    of_python: Any = own["_inst"]
    of_numpy: Any = numpy_random.mtrand._rand
    bits = of_numpy._bit_generator
    if type(bits) is not numpy_random.MT19937 or type(of_python) is not random.Random:
        return None
    # The second number of a pair that `random.gauss` has drawn is an attribute.
    gauss = vars(of_python)["gauss_next"]
    return gauss, *[_bytes_of(each).raw for each in (of_python, of_numpy, bits)]


@functools.lru_cache(maxsize=8)
def _bytes_of(owner: object) -> Any:
    """Return a view of an object's memory. The cache keeps the object alive."""
    begin = object.__basicsize__
    size_bytes = type(owner).__basicsize__ - begin
    return (ctypes.c_char * size_bytes).from_address(id(owner) + begin)
