"""What `ebbtide plan` does: one study, and the files that were asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from ebbtide.errors import PolicyError
from ebbtide.planning.planned_step import PlannedStep
from ebbtide.policy import parse_number
from ebbtide.tools.models import ModelOptions, read_budget_bytes, read_hardware, read_model
from ebbtide.tools.plan_tables import (
    RULES,
    Findings,
    Granularities,
    Outcome,
    Study,
    count_choices,
    find_limits,
    find_rows,
    origin,
)

FORMAT: Final = "ebbtide-plan-study"
VERSION: Final = 1

Say = Callable[[str], None]


def run_plan(
    model: str,
    options: ModelOptions,
    hardware_name: str,
    budget: str,
    *,
    layers: Sequence[str] = (),
    optimizer_states: int = 2,
    weights: bool = False,
    limits: bool = True,
    save: Path | None = None,
    say: Say = lambda _: None,
) -> Findings:
    """Study a training step, and write the plan if that was asked for.

    Args:
        model: name of the model, as it was typed.
        options: what was said about it.
        hardware_name: the machine, as it was typed.
        budget: the budget of device memory, as it was typed.
        layers: patterns of the modules to plan for.
        optimizer_states: tensors that the optimizer keeps for each weight.
        weights: whether weights may rest on the host.
        limits: whether the largest sizes that fit are looked for.
        save: file for the plan; None: none.
        say: is told what is being looked for, and "" when nothing is any more.

    Raises:
        PolicyError: something that was asked for is wrong.
        ImportError: a package is missing.
        OSError: the file cannot be written.
    """
    if save is not None and not save.absolute().parent.is_dir():
        raise PolicyError(f"--save {save}: there is no directory {save.absolute().parent}")
    hardware = read_hardware(hardware_name)
    budget_bytes = read_budget_bytes(budget, hardware)
    states = parse_number("--optimizer-states", optimizer_states)
    say("reading the model")
    family = read_model(model, options)
    study = Study(family, hardware, layers, states, weights=weights)
    studies = Granularities(study)
    largest = find_limits(studies, budget_bytes, say) if limits else []
    blocks_bytes = None
    for finer in studies:
        if finer is not study:
            blocks_bytes = blocks_bytes or study.smallest_bytes()
            study = finer
        if budget_bytes >= study.smallest_bytes():
            break
        say("the smallest budget of smaller layers")
    rows = find_rows(study, budget_bytes, say, blocks_bytes)
    chosen = next(row.outcome for row in rows if row.budget_bytes == budget_bytes)
    say("")
    found = Findings(study, budget_bytes, rows, chosen, largest, blocks_bytes)
    if chosen is not None and save is not None:
        PlannedStep(
            plan=chosen.plan, profile=study.profile, hardware=hardware, budget_bytes=budget_bytes
        ).save(save)
    return found


def as_document(found: Findings) -> str:
    """Return all findings as JSON."""
    study = found.study
    family, hardware = study.family, study.hardware
    content = {
        "format": FORMAT,
        "version": VERSION,
        "what_this_is": origin(hardware),
        "model": family.title,
        "size": {family.length_name or "length": family.size.length, "batch": family.size.batch},
        "hardware": hardware.name,
        "sources": {each.figure: [each.kind.value, each.text] for each in hardware.sources},
        "budget_bytes": found.budget_bytes,
        "smallest_budget_bytes": study.smallest_bytes(),
        "layers": [layer.name for layer in study.profile.layers],
        "modules": study.names,
        "budgets": [
            {"budget_bytes": row.budget_bytes, **_outcome_entry(study, row.outcome)}
            for row in found.rows
        ],
        "rules": {
            name: _outcome_entry(study, study.rule(name, found.budget_bytes)) for name in RULES
        },
        "plan": None if found.chosen is None else json.loads(found.chosen.plan.to_json()),
        "prediction": None if found.chosen is None else found.chosen.prediction._asdict(),
        "limits": [limit._asdict() for limit in found.limits],
    }
    return json.dumps(content, indent=1, allow_nan=False)


def _outcome_entry(study: Study, outcome: Outcome | None) -> dict[str, Any]:
    if outcome is None:
        return {"fits": False}
    figures = outcome.prediction._asdict()
    del figures["peak_by_position"]
    return {
        "fits": True,
        **figures,
        **count_choices(study, outcome.plan),
        "gap": outcome.plan.gap,
        "weights_on_host": outcome.plan.has_weights_on_host,
    }
