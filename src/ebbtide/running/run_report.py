"""What `ebbtide run` prints at the end, and writes as JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Final, final

from ebbtide.errors import BudgetError
from ebbtide.interface.display import count, few
from ebbtide.planning.plan import Decision, LayerMode
from ebbtide.running.found_model import FoundModel
from ebbtide.running.run_options import RunOptions
from ebbtide.transfers.stats import StepStats
from ebbtide.units import format_size

FORMAT: Final = "ebbtide-run"
VERSION: Final = 1

_WIDTH: Final = 80
_LABEL: Final = 11  # columns of the words at the left


@final
class RunReport:
    """Reports on all models that a script trained.

    Args:
        models: the models.
        options: how they were offloaded.
        passing: why calls of other modules were passed over, by class.
        is_dry: whether they were only planned.
        peak_bytes: the peak of memory since the first model was found; None if none was.
        budget_bytes: the budget, in bytes; None without one.
        hints: what may explain that no model was found.
    """

    def __init__(
        self,
        models: Sequence[FoundModel],
        options: RunOptions,
        *,
        passing: dict[str, str],
        is_dry: bool,
        peak_bytes: int | None,
        budget_bytes: int | None,
        hints: Sequence[str] = (),
    ) -> None:
        self._models = models
        self._options = options
        self._passing = passing
        self._is_dry = is_dry
        self._peak_bytes = peak_bytes
        self._budget_bytes = budget_bytes
        self._hints = hints

    def document(self) -> dict[str, Any]:
        """Return all figures for JSON: bytes, and seconds."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "dry": self._is_dry,
            "budget_bytes": self._budget_bytes,
            "peak_bytes": self._peak_bytes,
            "models": [_model_entry(model) for model in self._models],
            "passed_over": self._passing,
        }

    def troubles(self) -> list[str]:
        """Return what must not be overlooked, each in a sentence."""
        found = [
            f"{model.name} was left alone: {model.left_alone}"
            for model in self._models
            if model.left_alone is not None and not model.num_steps
        ]
        found += [_in_options(model.budget_error) for model in self._models if model.budget_error]
        return found

    def text(self) -> str:
        """Return the report, 80 columns wide. After `--dry`, models have been described before."""
        return "\n".join(self._lines())

    def describe(self, model: FoundModel) -> str:
        """Return what there is to say of one model."""
        return "\n".join(self._describe(model))

    def _lines(self) -> Iterator[str]:
        number = count(len(self._models), "model")
        if not self._models:
            yield "ebbtide run: nothing trained: no model was found"
            for name, reason in self._passing.items():
                yield from _wrap("", f"{name} was passed over: {reason}")
            for hint in self._hints:
                yield from _wrap("", hint)
            return
        if self._is_dry:
            yield f"ebbtide run: {number} found, and nothing was offloaded (--dry)"
            return
        yield f"ebbtide run: {number} trained"
        yield from _wrap("memory", self._describe_memory())
        for model in self._models:
            yield from self._describe(model)

    def _describe_memory(self) -> str:
        peak = "unknown" if self._peak_bytes is None else format_size(self._peak_bytes)
        if self._budget_bytes is None:
            return f"peak {peak}, no budget"
        words = f"peak {peak}, budget {format_size(self._budget_bytes)}"
        over_bytes = (self._peak_bytes or 0) - self._budget_bytes
        return words + (f": OVER by {format_size(over_bytes)}" if over_bytes > 0 else "")

    def _describe(self, model: FoundModel) -> Iterator[str]:
        kinds = " and ".join(model.dtypes)
        yield from _wrap(
            model.name, f"{_short(model.num_parameters)} parameters, {kinds} on {model.device}"
        )
        if model.left_alone is not None:
            yield from _wrap("left alone", model.left_alone)
        if model.layers:
            number = count(len(model.layers), "module")
            yield from _wrap("layers", f"{number}: {few(model.layers)}")
        if model.dry is not None:
            yield from self._describe_dry(model)
        elif model.num_steps:
            yield from self._describe_steps(model)
        elif model.left_alone is None and not self._is_dry:
            yield from _wrap("steps", "none was finished")
        if model.budget_error is not None:
            yield from _wrap("error", _in_options(model.budget_error))
        for note in model.notes:
            yield from _wrap("note", note)

    def _describe_dry(self, model: FoundModel) -> Iterator[str]:
        assert model.dry is not None
        yield from _wrap("saved", f"{format_size(model.dry.saved_bytes)} in a step")
        if model.dry.planned is None:
            yield from _wrap("policy", self._options.describe())
            return
        yield from _wrap("plan", describe_plan(model))
        # The state of the plan, which was never followed, is not worth a line.
        yield from textwrap.indent(str(model.dry.planned), " " * 4).splitlines()[1:]

    def _describe_steps(self, model: FoundModel) -> Iterator[str]:
        plan = model.plan
        if plan is not None:
            yield from _wrap("plan", describe_plan(model))
            if plan.measured is not None:
                size, seconds = format_size(plan.measured.peak_bytes), plan.measured.step_s
                yield from _wrap("measured", f"peak {size}, step {seconds:.3g} s with this plan")
        elif self._options.is_planned:
            none = "none until other models have theirs" if model.waits_for_turn else "none"
            yield from _wrap("plan", f"{none}; all that can leave does")
        else:
            yield from _wrap("policy", self._options.describe())
        last = model.last_step
        assert last is not None, "a step was finished"
        yield from _wrap("last step", _describe_step(last))
        reason = _why_nothing_left(model, last)
        if reason is not None:
            yield from _wrap("why", reason)
        yield from _wrap("steps", f"{model.num_steps:,}")


def _in_options(error: BudgetError) -> str:
    """Say what to change in the words of the command line."""
    return str(error).replace("weights=ebbtide.WeightPolicy()", "--weights")


def describe_plan(model: FoundModel) -> str:
    """Say in a line what a plan does."""
    plan = model.plan if model.dry is None else model.dry.planned
    assert plan is not None, "there is a plan"
    layers = [
        chosen
        for layer, chosen in zip(plan.profile.layers, plan.plan.layers, strict=True)
        if not layer.between
    ]
    again = sum(chosen.mode is not LayerMode.AS_IS for chosen in layers)
    leaving = sum(
        chosen.mode is LayerMode.AS_IS and Decision.OFFLOAD in chosen.decisions for chosen in layers
    )
    kept = len(layers) - again - leaving
    parts = [(leaving, "offload"), (again, "run again"), (kept, "stay")]
    done = ", ".join(f"{number} {what}" for number, what in parts if number)
    state = "settled" if plan.settled else "not settled"
    if model.dry is not None:
        state = "estimated"
    return f"of {count(len(layers), 'layer')} {done}; {state}"


def _describe_step(step: StepStats) -> str:
    moved = [
        (step.offloaded_bytes, "offloaded"),
        (step.kept_bytes, "kept"),
        (step.rebuilt_bytes, "rebuilt"),
        (step.recomputed_bytes, "recomputed"),
        (step.weight_reload_bytes, "of weights moved"),
    ]
    done = ", ".join(f"{format_size(size)} {what}" for size, what in moved if size)
    waited = f"waited {step.stall_s:.3f} s for copies"
    return f"{done or 'nothing was saved'}; {waited}"


def _why_nothing_left(model: FoundModel, step: StepStats) -> str | None:
    """Say why nothing was offloaded; None if something was."""
    if step.offloaded_bytes or step.rebuilt_bytes or step.recomputed_bytes:
        return None
    if step.weight_reload_bytes:
        return None
    if not step.num_saved:
        return "autograd saved nothing that ebbtide could see"
    if model.plan is not None:
        return "nothing left, because there is room for all of it"
    return (
        "nothing left: what is saved is below --min-bytes, a parameter, or needed for a second "
        "backward"
    )


def _model_entry(model: FoundModel) -> dict[str, Any]:
    plan = model.plan if model.dry is None else model.dry.planned
    last = model.last_step
    measured = None if plan is None or plan.measured is None else plan.measured._asdict()
    return {
        "model": model.name,
        "parameters": model.num_parameters,
        "dtypes": model.dtypes,
        "device": str(model.device),
        "layers": list(model.layers),
        "steps": model.num_steps,
        "left_alone": model.left_alone,
        "budget_error": None if model.budget_error is None else str(model.budget_error),
        "notes": model.notes,
        "saved_bytes": None if model.dry is None else model.dry.saved_bytes,
        "plan": None
        if plan is None
        else {
            "settled": plan.settled,
            "predicted_peak_bytes": plan.plan.peak_bytes,
            "predicted_step_s": plan.plan.step_s,
            "measured": measured,
            "table": str(plan),
        },
        "last_step": None if last is None else dataclasses.asdict(last),
    }


def _wrap(label: str, words: str) -> Iterator[str]:
    """Lay out a label and what it labels, which is wrapped beside it."""
    space = " " * (_LABEL + 4)
    fits = len(label) <= _LABEL
    begin = f"    {label:<{_LABEL}}" if fits else f"    {label}  "
    if label and label[0].isupper():
        begin = f"  {label}: "
    lines = textwrap.wrap(words, _WIDTH, initial_indent=begin, subsequent_indent=space)
    yield from (line.rstrip() for line in lines)


def _short(number: int) -> str:
    for size, unit in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
