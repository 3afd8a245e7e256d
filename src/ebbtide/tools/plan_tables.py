"""What `ebbtide plan` studies: a training step, and what plans for it cost."""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final, final

from rich.console import RenderableType

from ebbtide.devices.hardware import Hardware
from ebbtide.errors import BudgetError, PolicyError
from ebbtide.planning.contest import inflight_choices, rule_plans
from ebbtide.planning.plan import LayerMode, LayerPlan, Plan
from ebbtide.planning.planned_step import PlannedStep
from ebbtide.planning.prediction import CautiousTiming, PlanBudget, Prediction
from ebbtide.planning.profile import LayerProfile
from ebbtide.planning.relaxation import everywhere, nowhere
from ebbtide.planning.search import find_frugal, search
from ebbtide.policy import parse_number
from ebbtide.runtime.handles import Decision
from ebbtide.runtime.layers import covering_layers, match_layers
from ebbtide.tools.fake_profile import profile_with_fake_tensors
from ebbtide.tools.layout import columns, indented, labelled, render
from ebbtide.tools.models import Task, read_budget_bytes, read_hardware, read_model
from ebbtide.units import format_seconds, format_size

RULES: Final = (
    "keep all",
    "rebuild alone",
    "offload all",
    "offload all, rebuild",
    "recompute all",
    "recompute + offload all",
)
"""The plans that are compared with the one that is found; nothing is rebuilt in a profile."""


@final
class Study:
    """One training step on one machine.

    Args:
        task: the training step.
        hardware: the machine.
        patterns: the layers, such as ``"blocks.*"``; none: the model's blocks and what is beside
            them.
        optimizer_states: tensors of the weights' size that the optimizer keeps.
        weights: whether weights, gradients and the optimizer's state may rest on the host, if that
            is faster or nothing else fits. Rules for all layers keep them on the device.
        budget_bytes: the budget of device memory that was asked for; None: all that there is.
        say: is told what is being looked for.

    Attributes:
        task: as given.
        hardware: as given.
        weights: as given.
        budget_bytes: the budget of device memory.
        names: names of the modules that are layers.
        profile: the step, profiled.

    Raises:
        PolicyError: the model cannot be trained with fake tensors, or has no such layers.
    """

    def __init__(
        self,
        task: Task,
        hardware: Hardware,
        patterns: Sequence[str] = (),
        optimizer_states: int = 2,
        *,
        weights: bool = False,
        budget_bytes: int | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.task, self.hardware, self.weights = task, hardware, weights
        self.budget_bytes = hardware.device_memory_bytes if budget_bytes is None else budget_bytes
        self._say = say
        model = task.model
        found = match_layers(model, list(patterns)).names if patterns else covering_layers(model)
        self.names = list(found)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of models
            self.profile = profile_with_fake_tensors(
                model,
                task.batch,
                hardware,
                layers=self.names,
                loss=task.loss,
                optimizer_states=optimizer_states,
            )
        # On an accelerator, the host sees copies complete late.
        self._timing = CautiousTiming(self.profile, hardware, 1.0)

    def budget(self, device_bytes: int) -> PlanBudget:
        """Return a budget of device memory, with what the machine's host can page-lock."""
        hardware = self.hardware
        if hardware.computes_on_host:
            return PlanBudget(device_bytes=device_bytes)
        host_bytes = min(hardware.host_memory_bytes, hardware.pinned_limit_bytes)
        return PlanBudget(device_bytes=device_bytes, host_bytes=host_bytes)

    def predict(self, plan: Plan) -> Prediction:
        """Predict what a step under a plan costs."""
        return self._timing.predict(plan)

    def find(self, device_bytes: int) -> Plan:
        """Find the fastest plan within a budget of device memory.

        Raises:
            BudgetError: no plan was found within the budget.
        """
        budget = self.budget(device_bytes)
        return search(self.profile, self.hardware, budget, self._timing, weights=self.weights)

    @functools.cached_property
    def smallest_bytes(self) -> int:
        """The smallest budget of device memory that a plan was found for."""
        profile, host_bytes = self.profile, self.budget(0).host_bytes
        resting = [nowhere(profile), *([everywhere(profile)] if self.weights else [])]
        plans = (
            find_frugal(profile, self.hardware, self._timing, each, host_bytes) for each in resting
        )
        return min(each.peak_bytes or 0 for each in plans)

    def rule(self, name: str, device_bytes: int) -> Plan:
        """Return a plan that treats all layers alike.

        It has the number of bytes in flight with which it is fastest within the budget, or, if it
        does not fit, smallest.

        Args:
            name: one of `RULES`.
            device_bytes: the budget of device memory.
        """
        budget = self.budget(device_bytes)
        plan = dict(rule_plans(self.profile))[name]
        choices = inflight_choices(self.profile) if "offload" in name else (0,)
        plans = (dataclasses.replace(plan, max_inflight_bytes=choice) for choice in choices)

        def cost(plan: Plan) -> tuple[int, float]:
            prediction = self.predict(plan)
            return budget.excess_bytes(prediction), prediction.step_s

        return min(plans, key=cost)

    @functools.cached_property
    def rows(self) -> dict[int, Plan | None]:
        """A plan for each of several budgets, the largest first; None: nothing fits.

        The budget that was asked for is among them. The largest budget lets everything be kept, the
        smallest is the smallest that fits. Those in between are evenly spaced. Budgets that the
        device does not have are left out.
        """
        device_bytes = self.hardware.device_memory_bytes
        most = self.predict(self.rule("keep all", device_bytes)).peak_bytes
        least = self.smallest_bytes
        top = max(min(most, device_bytes), least)
        count = _ROWS if len(self.profile.layers) < _LONG else _ROWS_IF_LONG
        spaced = [top - (top - least) * n // (count - 1) for n in range(count)]
        budgets = {_rounded_up(each) for each in spaced if each <= device_bytes or each == least}
        rows: dict[int, Plan | None] = {}
        best: Plan | None = None
        for each in sorted(budgets | {self.budget_bytes}):
            self._say(f"the fastest step within {each / 2**30:.2f} GiB")
            try:
                plan = self.find(each)
            except BudgetError:
                rows[each] = None
                continue
            if best is not None and self.predict(best).step_s < self.predict(plan).step_s:
                # The search has missed the plan for a smaller budget, which is faster.
                plan = dataclasses.replace(best, bound_s=plan.bound_s)
            rows[each] = best = plan
        return dict(reversed(rows.items()))

    @property
    def chosen(self) -> Plan | None:
        """The plan within the budget; None: nothing fits."""
        return self.rows[self.budget_bytes]


_ROWS: Final = 5  # of several budgets
_ROWS_IF_LONG: Final = 4  # for steps of many layers, whose search takes seconds
_LONG: Final = 24
_MIB: Final = 2**20


def _rounded_up(size_bytes: int) -> int:
    """Round up to a hundredth of a GiB or to a MiB, so that what is printed is what was used."""
    grain = 2**30 // 100 + 1 if size_bytes >= 2**30 else _MIB
    return -(-size_bytes // grain) * grain


# ---- What a plan does ----


def layer_sizes(layer: LayerProfile, chosen: LayerPlan) -> Counter[Decision]:
    """Return the bytes that a layer is the first to save, by what becomes of them.

    Of a recomputed layer, that is its input.
    """
    sizes: Counter[Decision] = Counter()
    if chosen.mode is not LayerMode.AS_IS:
        leaves = chosen.mode is LayerMode.RECOMPUTE_OFFLOAD
        sizes[Decision.OFFLOAD if leaves else Decision.KEEP] = layer.input_bytes
        return sizes
    for storage, decision in zip(layer.storages, chosen.decisions, strict=True):
        if storage.same_as is None:
            stays = decision is Decision.OFFLOAD and not storage.may_leave
            sizes[Decision.KEEP if stays else decision] += storage.size_bytes
    return sizes


def count_choices(study: Study, plan: Plan) -> dict[str, int]:
    """Count what a plan does.

    Returns:
        ``recomputed``: layers that run their forward again, of all ``layers``; ``offloaded_bytes``:
        what is offloaded, inputs of recomputed layers included; ``rebuilt_bytes``: what is computed
        again from other saved tensors.
    """
    sizes = sum(map(layer_sizes, study.profile.layers, plan.layers), Counter[Decision]())
    return {
        "recomputed": sum(chosen.mode is not LayerMode.AS_IS for chosen in plan.layers),
        "layers": sum(not layer.between for layer in study.profile.layers),
        "offloaded_bytes": sizes[Decision.OFFLOAD],
        "rebuilt_bytes": sizes[Decision.REBUILD],
    }


# ---- What `ebbtide plan` prints ----

_NAME_WIDTH: Final = 16


def build_report(study: Study) -> str:
    """Return the report, in lines of 80 columns or less."""
    parts: list[RenderableType] = [study.task.title, labelled(_facts(study), 8), ""]
    parts += [*_budgets(study), "", *_plan(study), "", *_rules(study)]
    return render(*parts, "", origin(study.hardware))


def _facts(study: Study) -> Iterator[tuple[str, str]]:
    profile = study.profile
    saved = sum(
        each.size_bytes for layer in profile.layers for each in layer.storages if not each.same_as
    )
    parameters = sum(layer.parameter_bytes for layer in profile.layers)
    yield "machine", study.hardware.name
    yield "budget", f"{format_size(study.budget_bytes)} of device memory"
    yield "layers", _join_names([each.name for each in profile.layers if not each.between])
    yield "saved", f"{format_size(saved)} by all layers, each storage once"
    owned = f"{format_size(parameters)} of the layers' weights, gradients, optimizer"
    yield "fixed", f"{owned}; {format_size(profile.fixed_bytes)} else"


def _join_names(names: Sequence[str]) -> str:
    """Name layers in order; equal ones once."""
    members: dict[str, list[str]] = {}
    for name in names:
        members.setdefault(_stem(name), []).append(name)
    return ", ".join(
        each[0] if len(each) == 1 else f"{len(each)} x {stem}" for stem, each in members.items()
    )


def _stem(name: str) -> str:
    head, _, tail = name.rpartition(".")
    return head if tail.isdigit() else name


def _budgets(study: Study) -> Iterator[RenderableType]:
    base_s = study.predict(study.rule("keep all", study.budget_bytes)).step_s
    rows: list[Sequence[str]] = []
    for budget_bytes, plan in study.rows.items():
        begin = (">" if budget_bytes == study.budget_bytes else "", format_size(budget_bytes))
        if plan is None:
            rows.append((*begin, "no plan"))
            continue
        prediction, counts = study.predict(plan), count_choices(study, plan)
        recomputed = f"{counts['recomputed']} of {counts['layers']}"
        sizes = (_size_or_dash(counts[key]) for key in ("rebuilt_bytes", "offloaded_bytes"))
        again = recomputed if counts["recomputed"] else "-"
        weights = "w" if plan.has_weights_on_host else ""
        costs = _costs(prediction, f"{prediction.step_s / base_s:.3f}")
        rows.append((*begin, *costs, again, *sizes, weights))
    heads = ("budget", "peak", "step", "x keep", "waiting", "recomputed", "rebuilt", "leaves")
    yield "The fastest step within a budget (predicted)"
    yield columns(("", *heads, ""), rows, widths=(1, 10, 10, 8, 6, 7, 10, 9, 9), indent=0)
    if any(row[-1] == "w" for row in rows):
        yield "  w: weights, gradients, optimizer state of some or all layers rest on the host"


def _costs(prediction: Prediction, ratio: str) -> Sequence[str]:
    """Return the peak, the step, how it compares, and the share of it that waits for copies."""
    waiting = f"{prediction.exposed_copy_s / prediction.step_s:.1%}"
    return (
        format_size(prediction.peak_bytes), format_seconds(prediction.step_s), ratio, waiting,
    )  # fmt: skip


def _plan(study: Study) -> Iterator[RenderableType]:
    plan = study.chosen
    if plan is None:
        smallest = format_size(study.smallest_bytes)
        yield f"No plan fits into {format_size(study.budget_bytes)}."
        yield f"The smallest budget that a plan was found for is {smallest}."
        if not study.weights:
            yield "With --weights, weights and the optimizer's state may rest on the host, too."
        yield "Smaller layers may need less: name parts of blocks, as --plan-layers 'blocks.*.*'."
        return
    gap = f", at most {plan.gap:.1%} above the optimum" if (plan.gap or 0) >= 5e-4 else ""
    step = format_seconds(study.predict(plan).step_s)
    yield f"The plan within {format_size(study.budget_bytes)}: step {step}{gap}"
    pairs = list(zip(study.profile.layers, plan.layers, strict=True))
    heads = ("layers", "module", "how", "stays", "rebuilt", "leaves")
    yield columns(heads, _runs(pairs), left=3, widths=(9, _NAME_WIDTH, 17, 9, 9, 9))
    yield indented(_describe_copies(study, plan))


Pair = tuple[LayerProfile, LayerPlan]


def _runs(pairs: Sequence[Pair]) -> Iterator[Sequence[str]]:
    """Yield a row for each run of equal layers that are treated alike."""
    first = 0
    for _, group in groupby(pairs, key=lambda pair: (_stem(pair[0].name), pair[1].mode)):
        run = list(group)
        last = first + len(run) - 1
        numbers = str(first) if first == last else f"{first} to {last}"
        name = run[0][0].name if first == last else f"{len(run)} x {_stem(run[0][0].name)}"
        sizes = sum((layer_sizes(*pair) for pair in run), Counter[Decision]())
        done = (Decision.KEEP, Decision.REBUILD, Decision.OFFLOAD)
        cells = (_size_or_dash(sizes[each]) for each in done)
        yield numbers, _shortened(name), run[0][1].mode.value, *cells
        first = last + 1


def _describe_copies(study: Study, plan: Plan) -> str:
    """Say what rests where, and whether compute waits for it."""
    hardware, profile, prediction = study.hardware, study.profile, study.predict(plan)
    if not prediction.host_peak_bytes:
        fits = "Everything fits as it is: there" if plan.changes_nothing else "There"
        return f"{fits} is nothing to move."
    where = "in files" if hardware.computes_on_host else "on the host"
    rest = f"{format_size(prediction.host_peak_bytes)} rest {where}"
    if plan.has_weights_on_host:
        owners = profile.weight_owners()
        pairs = zip(profile.layers, plan.layers, strict=True)
        resting = [each for each, chosen in pairs if chosen.weights_on_host]
        names = {layer.name for layer in resting} & owners.keys()
        parameter_bytes = sum(layer.parameter_bytes for layer in resting)
        rest += (
            f", of which {format_size(parameter_bytes)} are weights, gradients and optimizer state "
            f"of {len(names)} of {len(owners)} modules. The optimizer's step on the host takes "
            f"{format_seconds(prediction.exposed_update_s)} more, or less with handle.overlap"
        )
    waited_s = prediction.exposed_copy_s
    waits = f"waits {format_seconds(waited_s)}" if waited_s else "never waits"
    return f"{rest}. Compute {waits} for copies."


def _size_or_dash(size_bytes: int) -> str:
    return format_size(size_bytes) if size_bytes else "-"


def _shortened(name: str) -> str:
    return name if len(name) <= _NAME_WIDTH else f"...{name[3 - _NAME_WIDTH :]}"


def _rules(study: Study) -> Iterator[RenderableType]:
    predicted = {name: study.predict(study.rule(name, study.budget_bytes)) for name in RULES}
    chosen = None if study.chosen is None else study.predict(study.chosen)
    if chosen is not None:
        predicted["the plan"] = chosen
    budget = study.budget(study.budget_bytes)
    rows = []
    for name, prediction in predicted.items():
        ratio = f"{prediction.step_s / chosen.step_s:.2f}" if chosen else "-"
        fits = "no" if budget.excess_bytes(prediction) else "yes"
        rows.append((name, *_costs(prediction, ratio), fits))
    heads = ("", "peak", "step", "x the plan", "waiting", "fits")
    yield "Beside one rule for all layers (predicted)"
    yield columns(heads, rows, gap=2, widths=(25, 10, 8, 10, 8))


def origin(hardware: Hardware) -> str:
    """Return what the figures of a machine's steps are worth, in sentences."""
    if hardware.is_measured:
        return (
            f"Every figure here is predicted from what `ebbtide doctor` measured on "
            f"{hardware.name}. No step has been measured."
        )
    return (
        f"Every figure here is predicted, from the preset {hardware.name!r}: data sheets, "
        f"published measurements and estimates. This project has measured nothing on that "
        f"hardware. Workspaces of kernels, fragments of the allocator and the time to launch "
        f"kernels are not in the figures."
    )


# ---- One study as `ebbtide plan` asks for it, and the files that it writes ----

FORMAT: Final = "ebbtide-plan-study"
VERSION: Final = 3


def run_plan(
    model: str,
    options: Mapping[str, int | str | None],
    hardware_name: str,
    budget: str,
    *,
    layers: Sequence[str] = (),
    optimizer_states: int = 2,
    weights: bool = False,
    save: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Study:
    """Study a training step, and write the plan if that was asked for.

    Args:
        model: name of the model, as it was typed.
        options: what was said about it, see `read_model`.
        hardware_name: the machine, as it was typed.
        budget: the budget of device memory, as it was typed.
        layers: patterns of the modules to plan for.
        optimizer_states: tensors that the optimizer keeps for each weight.
        weights: whether weights may rest on the host.
        save: file for the plan; None: none.
        say: is told what is being looked for.

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
    study = Study(
        read_model(model, **options), hardware, layers, states, weights=weights,
        budget_bytes=budget_bytes, say=say,
    )  # fmt: skip
    if study.chosen is not None and save is not None:
        PlannedStep(
            plan=study.chosen,
            profile=study.profile,
            hardware=hardware,
            budget_bytes=budget_bytes,
        ).save(save)
    return study


def as_document(study: Study) -> str:
    """Return all that a study has found as JSON."""
    hardware, chosen = study.hardware, study.chosen
    content = {
        "format": FORMAT,
        "version": VERSION,
        "what_this_is": origin(hardware),
        "model": study.task.title,
        "size": study.task.options,
        "hardware": hardware.name,
        "sources": dict(hardware.sources),
        "budget_bytes": study.budget_bytes,
        "smallest_budget_bytes": study.smallest_bytes,
        "layers": [layer.name for layer in study.profile.layers],
        "modules": study.names,
        "budgets": [
            {"budget_bytes": row_bytes, **_entry(study, plan)}
            for row_bytes, plan in study.rows.items()
        ],
        "rules": {name: _entry(study, study.rule(name, study.budget_bytes)) for name in RULES},
        "plan": None if chosen is None else dataclasses.asdict(chosen),
        "prediction": None if chosen is None else study.predict(chosen)._asdict(),
    }
    return json.dumps(content, indent=1, allow_nan=False, default=lambda each: each.value)


def _entry(study: Study, plan: Plan | None) -> dict[str, Any]:
    if plan is None:
        return {"fits": False}
    figures = study.predict(plan)._asdict()
    del figures["peak_by_position"]
    return {
        "fits": True,
        **figures,
        **count_choices(study, plan),
        "gap": plan.gap,
        "weights_on_host": plan.has_weights_on_host,
    }
