"""What `ebbtide plan` does: one study, its report, and the files that were asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ebbtide.errors import PolicyError
from ebbtide.observe.plots import (
    check_suffix,
    draw_lanes,
    new_figure,
    save_figure,
    stack_areas,
)
from ebbtide.planning.planned_step import PlannedStep
from ebbtide.planning.prediction import MemoryParts, StepRecord, StepTiming
from ebbtide.policy import parse_number
from ebbtide.runtime.events import TraceEvent
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
from ebbtide.units import format_seconds, format_size

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
    files: Mapping[str, Path | None] | None = None,
    say: Say = lambda _: None,
) -> Findings:
    """Study a training step, and write the files that were asked for.

    Args:
        model: name of the model, as it was typed.
        options: what was said about it.
        hardware_name: the machine, as it was typed.
        budget: the budget of device memory, as it was typed.
        layers: patterns of the modules to plan for.
        optimizer_states: tensors that the optimizer keeps for each weight.
        weights: whether weights may rest on the host.
        limits: whether the largest sizes that fit are looked for.
        files: files for the picture and for the plan, by the options ``--picture`` and ``--save``.
        say: is told what is being looked for, and "" when nothing is any more.

    Raises:
        PolicyError: something that was asked for is wrong.
        ImportError: a package is missing.
        OSError: a file cannot be written.
    """
    paths = {name: path for name, path in (files or {}).items() if path is not None}
    hardware = read_hardware(hardware_name)
    budget_bytes = read_budget_bytes(budget, hardware)
    states = parse_number("--optimizer-states", optimizer_states)
    _check_files(paths)
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
    if chosen is not None and "--save" in paths:
        PlannedStep(
            plan=chosen.plan, profile=study.profile, hardware=hardware, budget_bytes=budget_bytes
        ).save(paths["--save"])
    if chosen is not None and "--picture" in paths:
        draw_plan(found, paths["--picture"])
    return found


def _check_files(paths: Mapping[str, Path]) -> None:
    """Check that files can be written, before the study that they are about.

    Raises:
        PolicyError: a file has the wrong suffix, or its directory does not exist.
        ImportError: matplotlib is not installed.
    """
    if "--picture" in paths:
        check_suffix(paths["--picture"])
        new_figure(1.0)  # says what to install if matplotlib is missing
    for name, path in paths.items():
        if not path.absolute().parent.is_dir():
            raise PolicyError(f"{name} {path}: there is no directory {path.absolute().parent}")


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


# ---- The picture of a planned step: memory over the step by what it is, and the lanes ----

# From the palette of Okabe and Ito; the lanes below have the same colour for the same thing.
_LAYERS: Final = (
    ("weights, gradients, optimizer", "#7F7F7F"),
    ("fixed", "#BDBDBD"),
    ("saved, stays", "#0072B2"),
    ("saved, leaving", "#E69F00"),
    ("saved, back again", "#009E73"),
    ("working memory of the pass", "#CFE8F7"),
)
_INK: Final = "#222222"
_GIB: Final = 2**30
_HEIGHT_INCHES: Final = 7.2


def draw_plan(found: Findings, path: Path) -> None:
    """Write the picture of the plan within the budget.

    Args:
        found: the findings, with a plan.
        path: path of the file; its suffix selects the format.

    Raises:
        OSError: the file cannot be written.
    """
    assert found.chosen is not None
    study = found.study
    record = StepTiming(study.profile, study.hardware).record(found.chosen.plan)
    events = sorted(record.events(), key=lambda event: (event.begin_s, event.end_s))
    end_s, step_s = record.passes[-1].end_s, found.chosen.prediction.step_s
    if step_s > end_s:
        events.append(TraceEvent("update", "compute", end_s, step_s))
    figure = new_figure(_HEIGHT_INCHES)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[5, 2])
    _draw_memory(above, found, record)
    draw_lanes(figure, below, events)
    below.set_title("", loc="left")
    save_figure(figure, path)


def _draw_memory(axes: Any, found: Findings, record: StepRecord) -> None:
    assert found.chosen is not None
    edges_s = [*(each.begin_s for each in record.passes), record.passes[-1].end_s]
    stacks = [_stack(each.memory) for each in record.passes]
    layers = [
        (name, [stack[number] / _GIB for stack in stacks], {"color": colour})
        for number, (name, colour) in enumerate(_LAYERS)
    ]
    upper = stack_areas(axes, edges_s, layers)
    axes.step(edges_s, upper, where="post", color=_INK, linewidth=0.8)
    budget = found.budget_bytes / _GIB
    axes.axhline(budget, color="#D55E00", linewidth=1.2, linestyle="--")
    axes.set_ylim(0, max(budget, max(upper)) * 1.18)
    axes.annotate(
        f"budget {format_size(found.budget_bytes)}",
        (1, budget),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=9,
        color="#D55E00",
    )
    family, prediction = found.study.family, found.chosen.prediction
    size = family.describe(family.size)
    axes.set_title(
        f"{family.title}{size and ', '}{size}, on {found.study.hardware.name}\n"
        f"predicted, not measured: step {format_seconds(prediction.step_s)}, peak "
        f"{format_size(prediction.peak_bytes)}",
        loc="left",
        fontsize=11,
    )
    axes.set_ylabel("device memory (GiB)", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="both", labelsize=9)
    axes.tick_params(axis="x", labelbottom=False)
    axes.legend(loc="upper left", fontsize=8.5, ncols=3, frameon=False)


def _stack(memory: MemoryParts) -> tuple[int, ...]:
    moving = memory.leaving_bytes + memory.returning_bytes
    return (
        memory.parameters_bytes,
        memory.fixed_bytes,
        memory.saved_bytes - moving,
        memory.leaving_bytes,
        memory.returning_bytes,
        memory.working_bytes,
    )
