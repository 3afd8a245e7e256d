"""Minimizes linear costs under linear rows, with SciPy's HiGHS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ebbtide.planning.solver_output import without_stray_lines

_MOST_NODES: Final = 40  # of the solver's search for whole numbers, so that it takes no longer
_WHOLE_GAP: Final = 3e-4  # at which that search ends

Terms = dict[int, float]
"""Coefficients by the number of a variable."""

ONE: Final = -1
"""The "variable" of the constant term."""


def load_solver() -> None:
    """Load the solver's libraries, so that no later search takes memory that stays taken."""
    for whole in ([], [0]):
        minimize([1.0], [1.0], [{0: -1.0, ONE: 0.5}], whole)


def minimize(
    costs: Sequence[float],
    upper: Sequence[float],
    rows: Sequence[Terms],
    whole: Sequence[int],
    limit_s: float | None = None,
) -> tuple[float, list[float]] | None:
    """Minimize costs, with each row at most 0.

    Args:
        costs: the cost of each variable.
        upper: the largest value of each variable; the smallest is 0.
        rows: the rows.
        whole: the variables that must be whole numbers.
        limit_s: how long this may take; None: as long as it takes.

    Returns:
        A lower bound of the costs, and the best values found; None if the rows contradict each
        other.

    Raises:
        TimeoutError: it would take longer.
    """
    # Imported here: `import ebbtide` must stay light.
    import numpy as np
    from scipy.optimize import linprog, milp
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
    limits_of_time = {} if limit_s is None else {"time_limit": max(limit_s, 1e-3)}
    if whole:
        integrality = np.zeros(len(costs))
        integrality[list(whole)] = 1
        with without_stray_lines():
            result: Any = milp(
                np.array(costs),
                integrality=integrality,
                bounds=(0, np.array(upper)),
                constraints=(matrix, -np.inf, limits),
                options={"node_limit": _MOST_NODES, "mip_rel_gap": _WHOLE_GAP, **limits_of_time},
            )
        if result.status in (0, 1) and result.x is not None:
            return float(result.mip_dual_bound), [float(value) for value in result.x]
        if result.status == 2:
            return None  # otherwise the limit came before a solution; fractions will do
    bounds = np.column_stack([np.zeros(len(upper)), np.array(upper)])
    result = linprog(
        np.array(costs),
        A_ub=matrix,
        b_ub=limits,
        bounds=bounds,
        method="highs",
        options=limits_of_time,
    )
    if result.status == 2:
        return None
    if result.status == 1 and limit_s is not None:
        raise TimeoutError("the linear programme takes longer than it may")
    if result.status != 0:
        raise RuntimeError(f"the linear programme was not solved: {result.message}")
    return float(result.fun), [float(value) for value in result.x]
