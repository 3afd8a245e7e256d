"""What `ebbtide plan` does: one study, its report, and the files that were asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from ebbtide.errors import PolicyError
from ebbtide.planning.planned_step import PlannedStep
from ebbtide.planning.prediction import Prediction
from ebbtide.policy import parse_number
from ebbtide.tools.models import ModelOptions, read_budget_bytes, read_hardware, read_model
from ebbtide.tools.plan_tables import (
    Findings,
    Granularities,
    Outcome,
    Study,
    build_report,
    count_choices,
    find_limits,
    find_rows,
    origin,
)

FORMAT: Final = "ebbtide-plan-study"
VERSION: Final = 1

Say = Callable[[str], None]


class Request(NamedTuple):
    """What a user asked for; texts are as they were typed.

    Attributes:
        model: name of the model.
        options: what was said about it.
        hardware: the machine.
        budget: the budget of device memory.
        layers: patterns of the modules to plan for.
        optimizer_states: tensors that the optimizer keeps for each weight.
        limits: whether the largest sizes that fit are looked for.
        weights: whether weights may rest on the host.
    """

    model: str
    options: ModelOptions
    hardware: str
    budget: str
    layers: tuple[str, ...] = ()
    optimizer_states: int = 2
    limits: bool = True
    weights: bool = False


class Outputs(NamedTuple):
    """Where the findings go.

    Attributes:
        echo: prints a text.
        picture: file for the picture.
        save: file for the plan.
        as_json: whether JSON is printed instead of the report.
    """

    echo: Callable[[str], Any]
    picture: Path | None = None
    save: Path | None = None
    as_json: bool = False


def run_plan(request: Request, outputs: Outputs, say: Say = lambda _: None) -> bool:
    """Study a training step, print, and write files.

    Args:
        request: what to study.
        outputs: where the findings go.
        say: is told what is being looked for, and "" when nothing is any more.

    Returns:
        Whether a plan was found within the budget.

    Raises:
        PolicyError: something that was asked for is wrong.
        ImportError: a package is missing.
        OSError: a file cannot be written.
    """
    hardware = read_hardware(request.hardware)
    budget_bytes = read_budget_bytes(request.budget, hardware)
    states = parse_number("--optimizer-states", request.optimizer_states)
    _check_files(outputs)
    say("reading the model")
    family = read_model(request.model, request.options)
    study = Study(family, hardware, request.layers, states, weights=request.weights)
    studies = Granularities(study)
    limits = find_limits(studies, budget_bytes, say) if request.limits else []
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
    found = Findings(
        study=study,
        budget_bytes=budget_bytes,
        rows=rows,
        chosen=chosen,
        limits=limits,
        blocks_bytes=blocks_bytes,
    )
    say("")
    _write(found, outputs)
    return chosen is not None


def _check_files(outputs: Outputs) -> None:
    """Check that files can be written, before the study that they are about.

    Raises:
        PolicyError: a file has the wrong suffix, or its directory does not exist.
        ImportError: matplotlib is not installed.
    """
    if outputs.picture is not None:
        from ebbtide.observe.plots import SUFFIXES

        if outputs.picture.suffix.lower() not in SUFFIXES:
            raise PolicyError(
                f"--picture must end in {', '.join(SUFFIXES)}, got {str(outputs.picture)!r}"
            )
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            message = 'a picture needs matplotlib: pip install "ebbtide[plots]"'
            raise ImportError(message) from error
    for name, path in (("--picture", outputs.picture), ("--save", outputs.save)):
        if path is not None and not path.absolute().parent.is_dir():
            raise PolicyError(f"{name} {path}: there is no directory {path.absolute().parent}")


def _write(found: Findings, outputs: Outputs) -> None:
    outputs.echo(as_document(found) if outputs.as_json else build_report(found))
    if found.chosen is None:
        return
    notes = []
    if outputs.save is not None:
        planned = PlannedStep(
            plan=found.chosen.plan,
            profile=found.study.profile,
            hardware=found.study.hardware,
            budget_bytes=found.budget_bytes,
        )
        planned.save(outputs.save)
        notes.append(f"Plan: {outputs.save}")
    if outputs.picture is not None:
        from ebbtide.tools.plan_picture import draw_plan

        draw_plan(found, outputs.picture)
        notes.append(f"Picture: {outputs.picture}")
    if notes and not outputs.as_json:
        outputs.echo("\n" + "\n".join(notes))


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
            name: _outcome_entry(study, outcome)
            for name, outcome in study.rules(found.budget_bytes)
        },
        "plan": None if found.chosen is None else json.loads(found.chosen.plan.to_json()),
        "prediction": None if found.chosen is None else found.chosen.prediction._asdict(),
        "limits": [limit._asdict() for limit in found.limits],
    }
    return json.dumps(content, indent=1, allow_nan=False)


def _outcome_entry(study: Study, outcome: Outcome | None) -> dict[str, Any]:
    if outcome is None:
        return {"fits": False}
    return {
        "fits": True,
        **_figures(outcome.prediction),
        **count_choices(study, outcome.plan)._asdict(),
        "gap": outcome.plan.gap,
        "weights_on_host": outcome.plan.has_weights_on_host,
    }


def _figures(prediction: Prediction) -> dict[str, Any]:
    figures = prediction._asdict()
    figures.pop("peak_by_position")
    return figures
