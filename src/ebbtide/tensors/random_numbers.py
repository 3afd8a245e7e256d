"""The states of all random numbers that a forward may draw."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

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
    host_state, put_back_others = torch.get_rng_state(), note_numbers_of_python()

    def put_back() -> None:
        for (module, device), state in zip(modules, states, strict=True):
            module.set_rng_state(state, device)
        torch.set_rng_state(host_state)
        put_back_others()

    return put_back


def note_numbers_of_python() -> Callable[[], None]:
    """Note the states of the random numbers of Python and NumPy; return what puts them back."""
    # NumPy loads and seeds this where it is first used, which may be in the forward.
    from numpy import random as numpy_random

    state, numpy_state = random.getstate(), numpy_random.get_state(legacy=False)

    def put_back() -> None:
        random.setstate(state)
        numpy_random.set_state(numpy_state)

    return put_back
