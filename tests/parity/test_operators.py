"""Every operator that torch has samples for gives the same bits, whatever its saves go through."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

import ebbtide
from ebbtide import ActivationPolicy

POLICIES = {
    "offload": ActivationPolicy(min_bytes=1, rebuild=False),
    "rebuild": ActivationPolicy(min_bytes=1),
    "recompute": ActivationPolicy(min_bytes=1, mode="recompute"),
}
DTYPES = (torch.float32, torch.complex64)
SAMPLES = 2
EVERY = 7  # of the samples that torch draws, which begin with the plainest
RUNS = 2  # the first proves that what is recomputed has the same bits

# On a CPU, autocast casts to float32 before `pinverse`, and within the operator that it calls; a
# recomputed layer cannot tell the two (docs/guides/recompute.md).
KNOWN = {("pinverse", "recompute", True)}

# What plain torch raises an error for in this training, and why.
PHASES = "their phases are free, so a loss of them has no gradient"
UNTRAINED = {
    "linalg.eig": PHASES,
    "linalg.eigh": PHASES,
    "pca_lowrank": PHASES,
    "svd_lowrank": PHASES,
    "linalg.pinv": "under autocast its kernel multiplies bfloat16 by float32",
    "sparse.sampled_addmm": "its result is of a layout that nothing multiplies",
}

Call = Callable[[Sequence[Tensor]], Any]


class _Layer(nn.Module):
    """Calls an operator between two that save tensors, of which it may write the first's result."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([[0.75, 0.5]]))
        self.call = call

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        scaled = [x * self.scale[0, 0].to(x.dtype) if x.requires_grad else x for x in inputs]
        results = [each for each in tree_flatten(self.call(scaled))[0] if _is_differentiable(each)]
        return [each * each * self.scale[0, 1].to(each.dtype) for each in results]


def _is_differentiable(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _gradients(
    call: Call, inputs: Sequence[Tensor], policy: ActivationPolicy | None, *, casts: bool
) -> list[Tensor | None]:
    model = nn.Sequential(_Layer(call))
    found: list[Tensor | None] = []
    handle = None
    if policy is not None:
        handle = ebbtide.offload(model, activations=policy, layers=[model[0]])
    for run in range(RUNS):
        torch.manual_seed(run)
        leaves = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            loss = sum(each.abs().sum().double() for each in model(leaves))
        if not isinstance(loss, Tensor):
            return []
        loss.backward()
        found += [loss.detach(), *(each.grad for each in leaves), model[0].scale.grad]
        model.zero_grad()
    if handle is not None:
        handle.detach()
    return found


def _are_same(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    return all(
        a is b or (a is not None and b is not None and torch.equal(_bytes(a), _bytes(b)))
        for a, b in zip(one, other, strict=True)
    )


def _bytes(tensor: Tensor) -> Tensor:
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return dense.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "operator",
    [each for each in op_db if each.supports_autograd],
    ids=lambda each: f"{each.name}.{each.variant_test_name}".rstrip("."),
)
def test_an_operator_gives_the_same_bits(operator: Any) -> None:
    for dtype, casts in itertools.product(DTYPES, (False, True)):
        if dtype not in operator.backward_dtypes or (casts and dtype.is_complex):
            continue
        samples = operator.sample_inputs("cpu", dtype, requires_grad=True)
        for sample in itertools.islice(samples, 0, SAMPLES * EVERY, EVERY):
            flat, form = tree_flatten(((sample.input, *sample.args), sample.kwargs))
            places = [place for place, each in enumerate(flat) if isinstance(each, Tensor)]

            def call(
                tensors: Sequence[Tensor], flat: Any = flat, places: Any = places, form: Any = form
            ) -> Any:
                values = list(flat)
                for place, each in zip(places, tensors, strict=True):
                    values[place] = each
                args, kwargs = tree_unflatten(values, form)
                return operator.op(*args, **kwargs)

            inputs = [flat[place] for place in places]
            try:
                plain, again = (_gradients(call, inputs, None, casts=casts) for _ in range(2))
            except RuntimeError:
                assert operator.name in UNTRAINED
                continue
            assert _are_same(plain, again), "plain training varies"
            for name, policy in POLICIES.items():
                if (operator.name, name, casts) not in KNOWN:
                    mine = _gradients(call, inputs, policy, casts=casts)
                    assert _are_same(plain, mine), f"{name}, {dtype}, casts={casts}"
