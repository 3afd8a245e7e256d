"""Parts of chains of rebuilt storages that change before backward: what torch trains, trains."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ebbtide

_OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": nn.functional.gelu,  # saves its input
    "exp": torch.exp,  # saves its output
    "square": lambda x: x * x,  # saves its input twice
}
_CHANGES = ["the input, of which a metric was dropped", "the input", "first", "second", "third"]


class Chain(nn.Module):
    """Three operations in a row, of which one tensor changes in place before backward."""

    def __init__(self, names: tuple[str, ...], changed: str) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(16, 16), nn.Linear(16, 16)
        self.operations = [_OPERATIONS[name] for name in names]
        self.changed = _CHANGES.index(changed)

    def forward(self, x: Tensor) -> Tensor:
        links = [self.before(x)]
        metric = (links[0] * links[0]).sum() if self.changed == 0 else None
        for operation in self.operations:
            links.append(operation(links[-1]))
        y = self.after(links[-1])
        del metric
        with torch.no_grad():
            links[max(0, self.changed - 1)].mul_(0.5)
        return y


def _train(names: tuple[str, ...], changed: str, *, offloaded: bool) -> list[bytes] | str:
    """Return the bits of the gradients of two steps, or that torch refuses the change."""
    torch.manual_seed(0)
    model = Chain(names, changed)
    if offloaded:
        ebbtide.offload(model, activations=ebbtide.ActivationPolicy(min_bytes=1))
    bits = []
    for _ in range(2):
        try:
            model(torch.randn(8, 16)).square().mean().backward()
        except RuntimeError:
            return "refused"
        for parameter in model.parameters():
            assert parameter.grad is not None
            bits.append(parameter.grad.numpy().tobytes())
    return bits


@pytest.mark.parametrize("changed", _CHANGES)
def test_a_changed_part_of_a_chain_is_what_it_is_without_offload(changed: str) -> None:
    for names in itertools.product(_OPERATIONS, repeat=3):
        plain = _train(names, changed, offloaded=False)
        assert _train(names, changed, offloaded=True) == plain, names
