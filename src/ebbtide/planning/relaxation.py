"""Bounds all plans within a budget by a linear programme, whose optimum guides the search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

from ebbtide.devices.hardware import Hardware
from ebbtide.planning.prediction import PlanBudget, StorageUses
from ebbtide.planning.profile import LayerProfile, StepProfile

# ---- Minimizes linear costs under linear rows, with SciPy's HiGHS ----

Terms = dict[int, float]
"""Coefficients by the number of a variable."""

ONE: Final = -1
"""The "variable" of the constant term."""


def load_solver() -> None:
    """Load the solver's libraries, so that no later search takes memory that stays taken."""
    minimize([1.0], [1.0], [{0: -1.0, ONE: 0.5}])


def minimize(
    costs: Sequence[float],
    upper: Sequence[float],
    rows: Sequence[Terms],
    limit_s: float | None = None,
) -> tuple[float, list[float]] | None:
    """Minimize costs, with each row at most 0.

    Args:
        costs: the cost of each variable.
        upper: the largest value of each variable; the smallest is 0.
        rows: the rows.
        limit_s: how long this may take; None: as long as it takes.

    Returns:
        The least costs, and the values that have them; None if the rows contradict each other.

    Raises:
        TimeoutError: it would take longer.
    """
    # Imported here: `import ebbtide` must stay light.
    import numpy as np
    from scipy.optimize import milp
    from scipy.sparse import csr_matrix

    limits = np.array([-row.get(ONE, 0.0) for row in rows])
    begins, columns, factors = [0], [], []
    for row in rows:
        for variable, factor in row.items():
            if variable != ONE and factor:
                columns.append(variable)
                factors.append(factor)
        begins.append(len(columns))
    matrix = csr_matrix((factors, columns, begins), shape=(len(rows), len(costs)))
    result: Any = milp(
        np.array(costs),
        bounds=(0, np.array(upper)),
        constraints=(matrix, -np.inf, limits),
        options={} if limit_s is None else {"time_limit": max(limit_s, 1e-3)},
    )
    if result.status == 2:
        return None
    if result.status == 1:
        raise TimeoutError("the linear programme takes longer than it may")
    if result.status != 0:
        raise RuntimeError(f"the linear programme was not solved: {result.message}")
    return float(result.fun), [float(value) for value in result.x]


# ---- Whose weights rest on the host, with their gradients and the optimizer's state ----

_MORE: Final = (0, 1, 2, 4)  # modules beyond the fewest, as copies need room that no bound knows of

Resting = tuple[bool, ...]
"""For each layer of a step, whether its weights rest on the host."""


def nowhere(profile: StepProfile) -> Resting:
    """Return that all weights are on the device."""
    return (False,) * len(profile.layers)


def everywhere(profile: StepProfile) -> Resting:
    """Return that all weights rest on the host."""
    return tuple(layer.parameter_bytes > 0 for layer in profile.layers)


def resting_choices(profile: StepProfile, least_bytes: float) -> Iterator[Resting]:
    """Yield what to try: those first that have the fewest modules on the host.

    Of modules that are equally large, as the blocks of a list are, those are the cheapest to have
    there that compute longest for each byte. First only so many of the cheapest take part as are
    needed, and then all. Modules are spread evenly over the step, so that the copies of one's
    weights have the time in which others compute.

    Args:
        profile: the step.
        least_bytes: bytes of weights, gradients and optimizer state that must rest there.
    """
    modules = list(profile.weight_owners().values())
    alike: dict[int, list[int]] = {}
    for layers in modules:
        alike.setdefault(_bytes(profile, layers), []).extend(layers)
    cheapest: set[int] = set()
    for layers in sorted(
        alike.values(), key=lambda each: _busy_byte_s(profile, each), reverse=True
    ):
        if not cheapest or _bytes(profile, cheapest) < least_bytes:
            cheapest.update(layers)
    tried = {nowhere(profile), everywhere(profile)}
    for taking_part in ([each for each in modules if each[0] in cheapest], modules):
        count, fewest = len(taking_part), 0
        while fewest < count and _bytes(profile, _spread(taking_part, fewest)) < least_bytes:
            fewest += 1
        for more in _MORE:
            chosen = set(_spread(taking_part, min(count, fewest + more)))
            resting = tuple(index in chosen for index in range(len(profile.layers)))
            if resting not in tried:
                tried.add(resting)
                yield resting


def _spread(modules: Sequence[list[int]], count: int) -> Iterator[int]:
    """Yield the layers of so many of the modules, spread evenly over them."""
    for number, layers in enumerate(modules):
        # Module n is chosen if n / len(modules) times the count passes the next whole number.
        if (number + 1) * count // len(modules) > number * count // len(modules):
            yield from layers


def _busy_byte_s(profile: StepProfile, indices: Iterable[int]) -> float:
    layers = [profile.layers[index] for index in indices]
    busy_s = sum(each.forward_s + each.backward_s for each in layers)
    return busy_s / sum(each.parameter_bytes for each in layers)


def _bytes(profile: StepProfile, indices: Iterable[int]) -> int:
    return sum(profile.layers[index].parameter_bytes for index in indices)


# ---- A linear programme that bounds every plan within a budget, and guides the search ----
#
# [Note: relaxation] Every choice of a plan becomes a fraction: how much of a layer is recomputed,
# how many of its bytes are offloaded or rebuilt. The positions of the step are linked by stocks:
# bytes that are kept (K), bytes that wait for their copy down (D), bytes that were reloaded ahead
# of their use (U). Copies fill and drain the stocks at the link's bandwidths, for each direction
# and for both together, for as long as compute runs or waits. The memory at each position is at
# most the budget. What `StepTiming` adds to that costs time or memory: copies that are not split,
# latency, the bound on bytes in flight, the order of the queues. So the optimum is a lower bound
# of the step's time. Of several optima, it is one that copies little, so that a plan rounded
# from it does; the bound is lower for that, by up to 1e-5 of the time of all copies.
#
# Where memory is shared by several layers, the programme counts it only where every plan has it.

_MB: Final = 1e6  # bytes are counted in MB, and seconds in ms, so that the numbers are near 1
_MS: Final = 1e-3
_TIE: Final = 1e-5  # share of the time of a copy that is paid for it, to move no byte in vain


@final
@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """The optimum of the linear programme.

    Args:
        bound_s: no plan has a step of fewer seconds.
        recomputed: the fraction of each layer that is recomputed.
        offloaded_bytes: how many of the bytes that each layer alone saves, its input aside, are
            offloaded.
        offloaded: the fraction that is offloaded of each other piece of memory: of inputs, and of
            what layers share.
        rebuilt: the fraction that is rebuilt of each piece that can be.
        resting_bytes: bytes of weights, gradients and optimizer state that rest on the host.
    """

    bound_s: float
    recomputed: tuple[float, ...]
    offloaded_bytes: tuple[float, ...]
    offloaded: Mapping[int, float]
    rebuilt: Mapping[int, float]
    resting_bytes: float


class User(NamedTuple):
    """A layer that may save a piece of memory.

    Attributes:
        layer: index of the layer.
        saves: whether it saves the piece if it runs as it is.
        is_input: whether it saves the piece, as its input, if it is recomputed.
    """

    layer: int
    saves: bool
    is_input: bool


def users_of(uses: StorageUses) -> list[list[User]]:
    """Return the users of each piece of memory, in the order of the layers."""
    users: list[list[User]] = [[] for _ in uses.memories]
    for index, (saves, source) in enumerate(zip(uses.saves, uses.inputs, strict=True)):
        saved = dict.fromkeys(saves)
        for piece in saved:
            users[piece].append(User(index, True, piece == source))
        if source is not None and source not in saved:
            users[source].append(User(index, False, True))
    return users


def _are_summed(users: Sequence[User]) -> bool:
    """Whether a piece counts with others of its layer: no other has it, and it is no input."""
    return len(users) == 1 and not users[0].is_input


def relax(
    profile: StepProfile,
    hardware: Hardware,
    budget: PlanBudget,
    inflight_bytes: int | None = None,
    *,
    resting: Resting | None = (),
    limit_s: float | None = None,
) -> Relaxation | None:
    """Solve the linear programme.

    Args:
        profile: the step.
        hardware: the link.
        budget: what may be used.
        inflight_bytes: hold the stocks of copies in flight to this many bytes each. The optimum
            is then a guide and no bound. None: no limit.
        resting: whose weights, gradients and optimizer state rest on the host, and need device
            memory only while their layer runs; empty: nobody's. None: the programme chooses, module
            by module and in fractions. Copies of weights cost nothing here, updates on the host do,
            as far as backward is too short to hide them.
        limit_s: how long the solver may take; None: as long as it takes.

    Returns:
        The optimum; None if no plan is within the budget.

    Raises:
        TimeoutError: the solver would take longer.
    """
    return _Programme(profile, hardware, budget, inflight_bytes, resting).solve(limit_s)


def _plus(*parts: Mapping[int, float]) -> Terms:
    total: Terms = {}
    for part in parts:
        for variable, factor in part.items():
            total[variable] = total.get(variable, 0.0) + factor
    return total


def _times(factor: float, terms: Mapping[int, float]) -> Terms:
    return {variable: factor * each for variable, each in terms.items()}


@final
class _Programme:
    """Builds the programme."""

    # Long: all rows are about the same variables, which its methods share.

    def __init__(
        self,
        profile: StepProfile,
        hardware: Hardware,
        budget: PlanBudget,
        inflight_bytes: int | None,
        resting: Resting | None,
    ) -> None:
        self._profile = profile
        self._budget = budget
        self._inflight = None if inflight_bytes is None else inflight_bytes / _MB
        self._down = hardware.d2h_bytes_per_s * _MS / _MB  # MB/ms
        self._up = hardware.h2d_bytes_per_s * _MS / _MB
        both = hardware.duplex_bytes_per_s * _MS / _MB
        self._both = both if both < (self._down + self._up) * (1 - 1e-9) else None
        self._copy_cost = (hardware.copy_cost_s_per_byte or 0.0) * _MB / _MS  # ms/MB, one way
        self._tie = _TIE * (1 / self._down + 1 / self._up)  # ms/MB
        self._resting = nowhere(profile) if resting == () else resting
        self._steps_ahead = profile.ahead is not None and not hardware.computes_on_host
        self._costs: list[float] = []
        self._upper: list[float] = []
        self._rows: list[Terms] = []  # each is at most 0
        self._uses = StorageUses(profile)
        self._users = users_of(self._uses)
        self._count = len(profile.layers)

    # ---- variables and rows -------------------------------------------------------------------

    def _variable(self, cost: float = 0.0, upper: float = float("inf")) -> int:
        self._costs.append(cost)
        self._upper.append(upper)
        return len(self._costs) - 1

    def _at_most(self, *parts: Mapping[int, float]) -> None:
        """Add the row: the sum of the parts is at most 0."""
        self._rows.append(_plus(*parts))

    def _choices(self) -> None:
        """Make the variables of the plan's choices."""
        layers = self._profile.layers
        copy_ms = self._copy_cost  # a copy down; what has not left when it is needed needs no other
        if self._inflight is not None:
            copy_ms += self._copy_cost
        copy_ms += self._tie
        self._c = [
            self._variable(layer.second_forward_s / _MS, 1.0 if layer.may_recompute else 0.0)
            for layer in layers
        ]
        self._o = [self._variable(copy_ms) for _ in layers]
        self._z: dict[int, int] = {}
        self._shared: dict[tuple[int, int], tuple[int, int]] = {}  # kept, offloaded; MB
        self._z_shared: dict[tuple[int, int], int] = {}
        for piece, users in enumerate(self._users):
            memory = self._uses.memories[piece]
            rebuild_ms = None if memory.rebuild_s is None else memory.rebuild_s / _MS
            if _are_summed(users):
                if rebuild_ms is not None:
                    self._z[piece] = self._variable(rebuild_ms, 1.0)
                continue
            size = memory.size_bytes / _MB
            for user in users:
                key = piece, user.layer
                most = size if memory.may_leave else 0.0
                self._shared[key] = self._variable(0.0, size), self._variable(copy_ms, most)
                if rebuild_ms is not None:
                    self._z_shared[key] = self._variable(rebuild_ms, 1.0)

    def _place_weights(self) -> None:
        """Say which weights rest on the host, and how much the others take on the device."""
        layers = self._profile.layers
        self._rests: list[Terms] = [{} for _ in layers]  # fraction on the host
        everything = self._profile.coming_gradients([False] * len(layers))
        last_calls = self._profile.last_calls
        self._gradients = [{ONE: size / _MB} if size else Terms() for size in everything]
        self._h: list[tuple[int, int]] = []  # variables, and the bytes that they place
        away: Terms = {}
        self._updates, self._commits = dict[int, float](), dict[int, float]()  # ms
        for owned in self._profile.weight_owners().values():
            size_bytes = sum(layers[index].parameter_bytes for index in owned)
            if self._resting is None:
                h = self._variable(0.0, 1.0)
                self._h.append((h, size_bytes))
                fraction = {h: 1.0}
            else:
                fraction = {ONE: float(self._resting[owned[0]])}
            away = _plus(away, _times(size_bytes / _MB, fraction))
            update_ms = sum(layers[index].host_update_s for index in owned) / _MS
            self._updates = _plus(self._updates, _times(update_ms, fraction))
            commit_ms = sum(layers[index].commit_s for index in owned) / _MS
            self._commits = _plus(self._commits, _times(commit_ms, fraction))
            for index in owned:
                self._rests[index] = fraction
            last = last_calls[owned[0]]
            if everything[last]:
                resting = _times(-everything[last] / _MB, fraction)
                self._gradients[last] = _plus(self._gradients[last], resting)
        resident = self._profile.fixed_bytes + sum(layer.parameter_bytes for layer in layers)
        coming = _times(-1, _plus(*self._gradients))
        self._resident = self._one_variable(_plus({ONE: resident / _MB}, _times(-1, away), coming))

    def _one_variable(self, terms: Terms) -> Terms:
        """Return what is in many rows as one variable, if it depends on where weights are."""
        return self._stock_of(terms, {}) if self._h else terms

    def _active(self, user: User) -> Terms:
        """Return whether a layer saves a piece of memory."""
        if user.saves and user.is_input:
            return {ONE: 1.0}
        return {ONE: 1.0, self._c[user.layer]: -1.0} if user.saves else {self._c[user.layer]: 1.0}

    # ---- one layer ----------------------------------------------------------------------------

    def _link_choices(self) -> None:
        """Say what each layer saves, how much of it can leave, and what stays."""
        count = self._count
        self._saved: list[Terms] = [{} for _ in range(count)]  # alone, its input aside; MB
        self._input: list[Terms] = [{} for _ in range(count)]  # that no other layer has; MB
        self._first: list[Terms] = [{} for _ in range(count)]  # of shared memory; MB
        self._kept: list[Terms] = [{} for _ in range(count)]  # MB
        self._joins: list[Terms] = [{} for _ in range(count + 1)]  # D at the end of each F; MB
        self._consumed: list[Terms] = [{} for _ in range(count)]  # U at the begin of each B; MB
        self._rebuild: list[Terms] = [{} for _ in range(count)]  # ms
        leaves: list[Terms] = [{} for _ in range(count)]
        for piece, users in enumerate(self._users):
            if _are_summed(users):
                self._link_alone(piece, users[0].layer, leaves)
            elif users:
                self._link_shared(piece, users)
        for index in range(count):
            o = {self._o[index]: 1.0}
            self._at_most(o, _times(-1, leaves[index]))
            self._kept[index] = _plus(self._kept[index], leaves[index], _times(-1, o))
            self._joins[index + 1] = _plus(self._joins[index + 1], o)
            self._consumed[index] = _plus(self._consumed[index], o)

    def _link_alone(self, piece: int, index: int, leaves: list[Terms]) -> None:
        memory = self._uses.memories[piece]
        size = memory.size_bytes / _MB
        saved = {ONE: size, self._c[index]: -size}
        there = saved
        if piece in self._z:
            z = {self._z[piece]: 1.0}
            self._at_most(z, {self._c[index]: 1.0, ONE: -1.0})
            there = _plus(saved, _times(-size, z))
            rebuild_s = memory.rebuild_s or 0.0
            self._rebuild[index] = _plus(self._rebuild[index], _times(rebuild_s / _MS, z))
        self._saved[index] = _plus(self._saved[index], saved)
        stays_or_leaves = leaves if memory.may_leave else self._kept
        stays_or_leaves[index] = _plus(stays_or_leaves[index], there)

    def _link_shared(self, piece: int, users: Sequence[User]) -> None:
        """Link the choices of an input, or of what several layers may save, one of them first."""
        memory = self._uses.memories[piece]
        size = memory.size_bytes / _MB
        so_far: Terms = {}
        for user in users:
            kept, offloaded = self._shared[piece, user.layer]
            first = {kept: 1.0, offloaded: 1.0}
            if (piece, user.layer) in self._z_shared:
                z = self._z_shared[piece, user.layer]
                first[z] = size
                rebuild_s = memory.rebuild_s or 0.0
                index = user.layer
                self._rebuild[index] = _plus(self._rebuild[index], {z: rebuild_s / _MS})
            self._at_most(first, _times(-size, self._active(user)))
            so_far = _plus(so_far, first)
            self._at_most(_times(size, self._active(user)), _times(-1, so_far))
            index = user.layer
            saved = self._input if len(users) == 1 else self._first
            saved[index] = _plus(saved[index], first)
            self._kept[index] = _plus(self._kept[index], {kept: 1.0})
            early = index if user.is_input else index + 1
            self._joins[early] = _plus(self._joins[early], {offloaded: 1.0})
            surely = [
                each.layer
                for each in users
                if (each.saves and each.is_input)
                or (each.saves and not self._profile.layers[each.layer].may_recompute)
            ]
            needed = max([index, *surely])
            self._consumed[needed] = _plus(self._consumed[needed], {offloaded: 1.0})
        self._at_most(so_far, {ONE: -size})

    def _forward_need(self, index: int, layer: LayerProfile) -> Terms:
        """Return what a forward pass needs beside the other layers' storages, in MB."""
        working = layer.forward_working_bytes / _MB
        source = self._uses.inputs[index]
        alone = source is not None and len(self._users[source]) == 1
        size = self._uses.memories[source].size_bytes / _MB if alone and source is not None else 0
        unsaved = self._uses.inside_bytes[index] / _MB + working
        if layer.unsaved_forward_bytes is not None:
            unsaved = layer.unsaved_forward_bytes / _MB
        return _plus(
            self._saved[index],
            self._first[index],
            {ONE: size + working, self._c[index]: unsaved - working},
            _times(layer.weight_bytes / _MB, self._rests[index]),
        )

    def _backward_need(self, index: int, layer: LayerProfile) -> Terms:
        working = layer.backward_working_bytes / _MB
        weights = layer.weight_bytes + layer.gradient_bytes
        again = self._uses.inside_bytes[index] / _MB + layer.second_working_bytes / _MB
        return _plus(
            self._saved[index],
            self._input[index],
            self._first[index],
            {ONE: working, self._c[index]: again - working},
            _times(weights / _MB, self._rests[index]),
        )

    # ---- the step -----------------------------------------------------------------------------

    def _forward(self) -> None:
        profile = self._profile
        self._fits({ONE: profile.before_working_bytes / _MB})
        self._kept_stock: list[Terms] = [{}]  # of the layers before each
        down = self._stock_of({}, self._joins[0])
        for index, layer in enumerate(self._profile.layers):
            wait = self._variable(1.0)
            need = _plus(self._kept_stock[index], self._forward_need(index, layer))
            early = _times(-1, self._joined_by_input(index))
            self._fits(need)
            self._fits(need, down, early, {wait: -self._down})
            pass_ms = {ONE: layer.forward_s / _MS, wait: 1.0}
            self._hold(down, wait)
            down = self._drain(down, pass_ms, self._joins[index + 1])
            self._kept_stock.append(self._stock_of(self._kept_stock[index], self._kept[index]))
        wait = self._variable(1.0)
        working = {ONE: self._profile.loss_working_bytes / _MB}
        self._fits(self._kept_stock[-1], working)
        self._fits(self._kept_stock[-1], working, down, {wait: -self._down})
        self._hold(down, wait)
        loss_ms = {ONE: self._profile.loss_s / _MS, wait: 1.0}
        self._down_stock = self._drain(down, loss_ms, {})

    def _joined_by_input(self, index: int) -> Terms:
        """Return what the begin of a forward pass adds to the bytes that wait for their copy.

        The pass itself needs these bytes, so they count once.
        """
        source = self._uses.inputs[index]
        known = source is not None and self._shared.get((source, index))
        return {known[1]: 1.0} if known else {}

    def _backward(self) -> None:
        down, up = self._down_stock, dict[int, float]()
        hidden: Terms = {}  # ms in which the host may update weights beside backward
        for index in reversed(range(self._count)):
            layer = self._profile.layers[index]
            wait = self._variable(1.0)
            pass_ms = _plus(
                {ONE: layer.backward_s / _MS, wait: 1.0},
                {self._c[index]: layer.second_forward_s / _MS},
                self._rebuild[index],
            )
            hidden = _plus(hidden, pass_ms if self._steps_ahead else {})
            consumed = self._consumed[index]
            if self._gradients[index]:
                with_gradients = _plus(self._resident, self._gradients[index])
                self._resident = self._one_variable(with_gradients)
            self._at_most(consumed, _times(-1, up), {wait: -self._up})
            up_after = {self._variable(): 1.0}
            rise = _plus(up_after, _times(-1, up), consumed)
            self._at_most(rise, _times(-self._up, pass_ms))
            self._at_most(_times(-1, rise))
            down_after = {self._variable(): 1.0}
            fall = _plus(down, _times(-1, down_after))
            self._at_most(fall, _times(-self._down, pass_ms))
            self._at_most(_times(-1, fall))
            if self._both is not None:
                self._at_most(rise, fall, _times(-self._both, pass_ms))
            need = _plus(self._kept_stock[index], self._backward_need(index, layer), up_after)
            self._fits(need)
            self._fits(need, down, {wait: -self._down})
            if self._inflight is not None:
                self._at_most(up_after, {ONE: -self._inflight})
            down, up = down_after, up_after
        self._fits({ONE: self._profile.after_working_bytes / _MB})
        if self._updates:
            after = {self._variable(1.0): -1.0}
            self._at_most(self._updates, _times(-1, hidden), after)
            self._at_most(self._commits, after)

    def _fits(self, *parts: Mapping[int, float]) -> None:
        self._at_most(*parts, self._resident, {ONE: -self._budget.device_bytes / _MB})

    def _hold(self, down: Terms, wait: int) -> None:
        """Hold what waits for its copy to the bound, by letting compute wait."""
        if self._inflight is not None:
            self._at_most(down, {wait: -self._down, ONE: -self._inflight})

    def _drain(self, down: Terms, pass_ms: Terms, joins: Terms) -> Terms:
        """Return the stock of bytes that wait for their copy after a forward pass."""
        after = {self._variable(): 1.0}
        self._at_most(joins, _times(-1, after))
        self._at_most(down, joins, _times(-1, after), _times(-self._down, pass_ms))
        return after

    def _stock_of(self, before: Terms, added: Terms) -> Terms:
        """Return a variable that is at least the sum."""
        after = {self._variable(): 1.0}
        self._at_most(before, added, _times(-1, after))
        return after

    # ---- the optimum --------------------------------------------------------------------------

    def solve(self, limit_s: float | None) -> Relaxation | None:
        """Build the programme and solve it."""
        self._choices()
        self._place_weights()
        self._link_choices()
        self._forward()
        self._backward()
        offloaded = _plus(*({variable: 1.0} for variable in self._o))
        offloaded = _plus(offloaded, *({each[1]: 1.0} for each in self._shared.values()))
        if self._budget.host_bytes is not None:
            self._at_most(offloaded, {ONE: -self._budget.host_bytes / _MB})
        optimum = minimize(self._costs, self._upper, self._rows, limit_s)
        return None if optimum is None else self._read(*optimum)

    def _read(self, cost: float, values: Sequence[float]) -> Relaxation:
        layers = self._profile.layers
        busy_s = self._profile.before_s + self._profile.loss_s + self._profile.after_s
        busy_s += sum(layer.forward_s + layer.backward_s for layer in layers)
        sizes = [memory.size_bytes / _MB for memory in self._uses.memories]
        ties = self._tie * sum(sizes)  # the most that the choice among several optima has cost
        offloaded: dict[int, float] = {}
        rebuilt = {piece: values[z] for piece, z in self._z.items()}
        for (piece, _), (_, variable) in self._shared.items():
            share = values[variable] / sizes[piece] if sizes[piece] else 0.0
            offloaded[piece] = offloaded.get(piece, 0.0) + share
        for (piece, _), z in self._z_shared.items():
            rebuilt[piece] = rebuilt.get(piece, 0.0) + values[z]
        return Relaxation(
            # A margin for the solver's tolerances keeps the bound a bound.
            bound_s=busy_s + max(0.0, (cost - ties) * (1 - 1e-6) - 1e-6) * _MS,
            recomputed=tuple(values[c] for c in self._c),
            offloaded_bytes=tuple(values[o] * _MB for o in self._o),
            offloaded=offloaded,
            rebuilt=rebuilt,
            resting_bytes=sum(values[h] * size_bytes for h, size_bytes in self._h),
        )
