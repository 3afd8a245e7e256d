"""Placement: the one decision of what becomes of a storage that autograd saves."""

from __future__ import annotations

from collections.abc import Container, Mapping, Set
from typing import NamedTuple, final

import torch
from torch import Tensor

from ebbtide.activations.rebuild import RebuildFinder
from ebbtide.activations.records import KEEP, OFFLOAD, REBUILD, Call, Decision
from ebbtide.activations.scope import Scope
from ebbtide.activations.windowed_passes import PassWindows
from ebbtide.policy import ActivationPolicy
from ebbtide.tensors.marks import is_marked
from ebbtide.tensors.memory_parts import may_change_unseen
from ebbtide.transfers.layer import Layer

Plan = Mapping[tuple[int | None, int], Decision]
"""A decision for each storage that it names. The key is the index of the layer, None outside
layers, and the number of the storage in the layer's call. The policy or the schedule decides for
all other storages.
"""


class PlannedLayers(NamedTuple):
    """A plan for all layers of a forward.

    Attributes:
        decisions: what becomes of single storages.
        recomputed: indices of the layers that save their inputs alone.
        kept_inputs: those of them whose inputs stay on the device.
        keeps_outside: whether what is saved outside layers stays unless a decision names it.
        windows: what may be in flight in each pass; None: the bound on bytes in flight says.
        rebuilds: whether storages that no decision names are rebuilt where they can be.
    """

    decisions: Plan
    recomputed: Set[int]
    kept_inputs: Set[int]
    keeps_outside: bool = False
    windows: PassWindows | None = None
    rebuilds: bool = False


@final
class Placement:
    """Decides once for each storage, when it is first saved, to keep, offload or rebuild it.

    The first of these that applies decides: a mark on the tensor (`mark_not_offload`) or memory
    that other code than torch's can write, the plan, a recipe that rebuilds the storage, and last
    the policy or the schedule, which say whether the storages of a layer are offloaded.

    Args:
        policy: which layers are offloaded, and from what size.
        plan: decisions for single storages, which replace those of the policy.
        layers_only: whether all storages saved outside layers are kept, whatever the policy says.
            That is so where a schedule is followed, because a schedule names layers.

    Attributes:
        min_bytes: smaller storages are kept.
        num_calls: number of layer calls in a forward, once that is known.
        finder: finds the calls that rebuild storages; None if nothing is rebuilt.
        refused: names of layers that cannot be recomputed. What they save is offloaded instead.
        wanted_again: layer and number of storages that stay on the device because a second
            backward needs them: see `Activations.wanted_again`. The plan can say otherwise.
    """

    def __init__(
        self, policy: ActivationPolicy, plan: Plan | None = None, *, layers_only: bool = False
    ) -> None:
        self._layers_only = layers_only
        self.min_bytes = max(int(policy.min_bytes), 1)  # no bytes, no copy
        self.num_calls: int | None = None
        self.wanted_again: Set[tuple[int | None, int]] = frozenset()
        self.refused: Container[str] = ()
        self._policy = policy
        self._plan: Plan = {} if plan is None else plan
        self._layers: PlannedLayers | None = None
        self._rebuilds = policy.rebuild
        rebuilds = policy.rebuild or REBUILD in self._plan.values()
        self.finder = RebuildFinder() if rebuilds else None

    def follow(self, layers: PlannedLayers | None) -> None:
        """Have a plan for all layers decide, instead of the policy, from the next forward on.

        What the plan does not name is offloaded, or kept if it is outside layers and the plan says
        so.

        Args:
            layers: the plan; None lets the policy decide again.
        """
        self._layers = layers
        self._plan = {} if layers is None else layers.decisions
        self._rebuilds = self._policy.rebuild if layers is None else layers.rebuilds
        if self.finder is None and (self._rebuilds or REBUILD in self._plan.values()):
            self.finder = RebuildFinder()

    @property
    def packs(self) -> bool:
        """Whether masks and indices are packed before they leave."""
        return self._policy.rebuild

    @property
    def verifies_first(self) -> bool:
        """Whether the policy recomputes layers, which are verified before that."""
        return self._policy.recomputes

    @property
    def wants_any(self) -> bool:
        """Whether the policy wants anything to leave; schedules and plans speak for themselves."""
        policy = self._policy
        if self._layers_only or self._layers is not None:
            return False
        chosen = policy.num_layers != 0 and policy.fraction > 0
        return policy.rebuild or chosen or any(each is not KEEP for each in self._plan.values())

    def offloads(self, layer: Layer | None) -> bool:
        """Whether the storages of a layer are offloaded by default.

        Args:
            layer: the layer; None for what is saved outside layers.
        """
        policy, planned = self._policy, self._layers
        if layer is not None and layer.name in self.refused and self._wants_recomputed(layer):
            return True
        if planned is not None:
            if layer is None:
                return not planned.keeps_outside
            return layer.index not in planned.kept_inputs
        if not policy.offloads:
            return False
        if layer is None:
            return policy.num_layers is None and policy.fraction == 1 and not self._layers_only
        return self._chooses(layer)

    def recomputes(self, layer: Layer) -> bool:
        """Whether only the inputs of a layer are saved, and backward runs its forward again."""
        return layer.name not in self.refused and self._wants_recomputed(layer)

    def _wants_recomputed(self, layer: Layer) -> bool:
        if self._layers is not None:
            return layer.index in self._layers.recomputed
        return self._policy.recomputes and self._chooses(layer)

    def _chooses(self, layer: Layer) -> bool:
        policy = self._policy
        if policy.num_layers is not None and layer.index >= policy.num_layers:
            return False
        last = self.num_calls is not None and layer.index >= self.num_calls - policy.keep_last
        return policy.chooses(layer.index) and not last

    def decide(
        self, scope: Scope, number: int, tensor: Tensor, storage: torch.UntypedStorage
    ) -> tuple[Decision, Call | None]:
        """Decide whether a storage is kept, offloaded or rebuilt.

        Args:
            scope: the scope in which the storage is saved first.
            number: number of the storage in the scope.
            tensor: the tensor that is saved.
            storage: storage of the tensor.

        Returns:
            The decision, and the call that rebuilds the storage if that is the decision.
        """
        # What other code may refill is kept in that code's memory: so does autograd, and backward
        # reads what is there then.
        if is_marked(storage) or may_change_unseen(storage):
            return KEEP, None
        planned = None
        if self._plan or self.wanted_again:
            name = None if scope.layer is None else scope.layer.index, number
            planned = self._plan.get(name)
            if planned is None and name in self.wanted_again:
                return KEEP, None
        size_bytes = storage.nbytes()
        if planned is None or planned is REBUILD:
            leaves = scope.offloads and size_bytes >= self.min_bytes
            rebuilds = planned is not None or self._rebuilds
            if rebuilds and self.finder is not None and size_bytes >= self.min_bytes:
                log = scope.forward
                if tensor.grad_fn is not None and not log.is_mixed:
                    call = self.finder.find(tensor, storage, log.settings)
                    if call is not None:
                        return REBUILD, call
        else:
            leaves = planned is OFFLOAD and size_bytes > 0
        # torch's own quantized tensors have scales beside their storage.
        if leaves and not tensor.is_quantized and (scope.unit is None or not scope.must_stay):
            return OFFLOAD, None
        return KEEP, None
