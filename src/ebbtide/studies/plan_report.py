"""What `ebbtide plan` prints, in 80 columns."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple, final

from ebbtide.planning.hardware import Hardware, Kind
from ebbtide.planning.plan import Decision, LayerMode, LayerPlan
from ebbtide.planning.step_profile import LayerProfile
from ebbtide.studies.budget_table import BudgetRow, count_choices
from ebbtide.studies.size_limits import Limit
from ebbtide.studies.study import Outcome, Study
from ebbtide.units import format_size

_WIDTH: Final = 80
_NAME_WIDTH: Final = 16


@final
@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that a study has found.

    Args:
        study: the study.
        budget_bytes: the budget of device memory.
        rows: plans at several budgets.
        chosen: the plan within the budget; None: nothing fits.
        limits: the largest sizes; empty: not looked for.
        blocks_bytes: the smallest budget of the model's blocks, if these are smaller layers.
    """

    study: Study
    budget_bytes: int
    rows: Sequence[BudgetRow]
    chosen: Outcome | None
    limits: Sequence[Limit]
    blocks_bytes: int | None = None


def build_report(found: Findings) -> str:
    """Return the report, in lines of 80 columns or less."""
    lines = [
        *_heading(found),
        "",
        *_budget_lines(found),
        "",
        *_plan_lines(found),
        "",
        *_rule_lines(found),
    ]
    if found.limits:
        lines += ["", *_limit_lines(found)]
    return "\n".join([*lines, "", *_footnote(found.study.hardware)])


def format_seconds(seconds: float) -> str:
    """Format a duration with three digits, such as ``"143 ms"``."""
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1e3, "ms")
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"


# ---- the parts ----------------------------------------------------------------------------------


def _heading(found: Findings) -> Iterator[str]:
    study, family = found.study, found.study.family
    profile = study.profile
    yield family.title
    size = family.describe(family.size)
    saved = sum(
        each.size_bytes for layer in profile.layers for each in layer.storages if not each.same_as
    )
    parameters = sum(layer.parameter_bytes for layer in profile.layers)
    facts = [
        ("step", size or "as the function makes it"),
        ("machine", study.hardware.name),
        ("budget", f"{format_size(found.budget_bytes)} of device memory"),
        ("layers", _join_names([each.name for each in profile.layers if not each.between])),
        ("saved", f"{format_size(saved)} by all layers, each storage once"),
        (
            "fixed",
            f"{format_size(parameters)} of the layers' weights, gradients, optimizer; "
            f"{format_size(profile.fixed_bytes)} else",
        ),
    ]
    if found.blocks_bytes is not None:
        blocks = f"whole blocks need {format_size(found.blocks_bytes)}, so their parts are planned"
        facts.append(("note", blocks))
    for name, text in facts:
        yield from textwrap.wrap(
            f"  {name:<8} {text}", _WIDTH, subsequent_indent=" " * 11, drop_whitespace=True
        )


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


def _budget_lines(found: Findings) -> Iterator[str]:
    yield "The fastest step within a budget (predicted)"
    yield (
        f"  {'budget':>10} {'peak':>10} {'step':>8} {'x keep':>6} {'waiting':>7} "
        f"{'recomputed':>10} {'rebuilt':>9} {'leaves':>9}"
    )
    base_s = found.study.rule("keep all", found.budget_bytes).prediction.step_s
    rest = False
    for row in found.rows:
        mark = ">" if row.budget_bytes == found.budget_bytes else " "
        budget = f"{mark} {format_size(row.budget_bytes):>10}"
        if row.outcome is None:
            yield f"{budget} nothing fits"
            continue
        prediction = row.outcome.prediction
        counts = count_choices(found.study, row.outcome.plan)
        again = f"{counts.recomputed} of {counts.layers}" if counts.recomputed else "-"
        weights = " w" if row.outcome.plan.has_weights_on_host else ""
        rest = rest or bool(weights)
        yield (
            f"{budget} {format_size(prediction.peak_bytes):>10} "
            f"{format_seconds(prediction.step_s):>8} {prediction.step_s / base_s:>6.3f} "
            f"{prediction.exposed_copy_s / prediction.step_s:>7.1%} {again:>10} "
            f"{_size_or_dash(counts.rebuilt_bytes):>9} {_size_or_dash(counts.offloaded_bytes):>9}"
            f"{weights}"
        )
    if rest:
        yield "  w: weights, gradients, optimizer state of some or all layers rest on the host"


def _plan_lines(found: Findings) -> Iterator[str]:
    if found.chosen is None:
        smallest = format_size(found.study.smallest_bytes())
        yield f"No plan fits into {format_size(found.budget_bytes)}."
        yield f"The smallest budget that a plan was found for is {smallest}."
        if not found.study.weights:
            yield "With --weights, weights and the optimizer's state may rest on the host, too."
        return
    plan, prediction = found.chosen
    gap = f", at most {plan.gap:.1%} above the optimum" if (plan.gap or 0) >= 5e-4 else ""
    yield (
        f"The plan within {format_size(found.budget_bytes)}: step "
        f"{format_seconds(prediction.step_s)}{gap}"
    )
    yield (
        f"  {'layers':<9} {'module':<{_NAME_WIDTH}} {'how':<19} {'stays':>9} {'rebuilt':>9} "
        f"{'leaves':>9}"
    ).rstrip()
    pairs = list(zip(found.study.profile.layers, plan.layers, strict=True))
    first = 0
    for _, group in groupby(pairs, key=lambda pair: (_stem(pair[0].name), pair[1].mode)):
        run = list(group)
        last = first + len(run) - 1
        numbers = str(first) if first == last else f"{first} to {last}"
        name = run[0][0].name if first == last else f"{len(run)} x {_stem(run[0][0].name)}"
        stays, rebuilt, leaves = (sum(each) for each in zip(*map(_sizes, run), strict=True))
        yield (
            f"  {numbers:<9} {_shortened(name):<{_NAME_WIDTH}} {run[0][1].mode.value:<19} "
            f"{_size_or_dash(stays):>9} {_size_or_dash(rebuilt):>9} {_size_or_dash(leaves):>9}"
        )
        first = last + 1
    sizes = [_sizes(pair) for pair in pairs]
    weights = plan.has_weights_on_host
    if not weights and all(chosen.mode is LayerMode.AS_IS for _, chosen in pairs):
        if not any(each.rebuilt or each.leaves for each in sizes):
            yield "  Everything fits as it is: there is nothing to move."
            return
        if not any(each.leaves for each in sizes):
            yield "  There is nothing to move."
            return
    where = "in files" if found.study.hardware.computes_on_host else "on the host"
    rest = f"{format_size(prediction.host_peak_bytes)} rest {where}"
    if weights:
        owners = found.study.profile.weight_owners()
        resting = [each for each, chosen in pairs if chosen.weights_on_host]
        names = {layer.name for layer in resting} & owners.keys()
        parameter_bytes = sum(layer.parameter_bytes for layer in resting)
        update_s = sum(layer.host_update_s for layer in resting)
        what = f"{format_size(parameter_bytes)} of weights, gradients and optimizer state"
        alone = parameter_bytes == prediction.host_peak_bytes
        rest = f"{what} rest {where}" if alone else f"{rest}, with {what}"
        if len(names) < len(owners):
            rest += f", those of {len(names)} of {len(owners)} modules, spread evenly"
        rest += (
            f". At most two layers' weights are on the device at once, and the optimizer's step on "
            f"the host takes {format_seconds(update_s)} more"
        )
    waits = "never waits"
    if prediction.exposed_copy_s:
        waits = f"waits {format_seconds(prediction.exposed_copy_s)}"
    moving = f"up to {format_size(plan.max_inflight_bytes)} at once each way"
    if plan.windows:
        moving = f"as each pass has room for them, {format_size(plan.max_inflight_bytes)} at most"
    elif not plan.max_inflight_bytes:
        moving = "one at a time"
    yield from _wrap(f"{rest}. Copies move {moving}; compute {waits} for them.")


class _Sizes(NamedTuple):
    """Bytes that a layer is the first to save, by what becomes of them."""

    stays: int
    rebuilt: int
    leaves: int


def _sizes(pair: tuple[LayerProfile, LayerPlan]) -> _Sizes:
    layer, chosen = pair
    if chosen.mode is not LayerMode.AS_IS:
        leaves = chosen.mode is LayerMode.RECOMPUTE_OFFLOAD
        return _Sizes(0, 0, layer.input_bytes) if leaves else _Sizes(layer.input_bytes, 0, 0)
    sizes: Counter[Decision] = Counter()
    for storage, decision in zip(layer.storages, chosen.decisions, strict=True):
        if storage.same_as is None:
            stays = decision is Decision.OFFLOAD and not storage.may_leave
            sizes[Decision.KEEP if stays else decision] += storage.size_bytes
    return _Sizes(sizes[Decision.KEEP], sizes[Decision.REBUILD], sizes[Decision.OFFLOAD])


def _size_or_dash(size_bytes: int) -> str:
    return format_size(size_bytes) if size_bytes else "-"


def _shortened(name: str) -> str:
    return name if len(name) <= _NAME_WIDTH else f"...{name[3 - _NAME_WIDTH :]}"


def _rule_lines(found: Findings) -> Iterator[str]:
    yield "Beside one rule for all layers (predicted)"
    yield f"  {'':<26} {'peak':>10}  {'step':>8}  {'x the plan':>10}  {'waiting':>8}  fits"
    outcomes = list(found.study.rules(found.budget_bytes))
    if found.chosen is not None:
        outcomes.append(("the plan", found.chosen))
    budget = found.study.budget(found.budget_bytes)
    for name, (_, prediction) in outcomes:
        ratio = "-"
        if found.chosen is not None:
            ratio = f"{prediction.step_s / found.chosen.prediction.step_s:.2f}"
        fits = "no" if budget.excess_bytes(prediction) else "yes"
        yield (
            f"  {name:<26} {format_size(prediction.peak_bytes):>10}  "
            f"{format_seconds(prediction.step_s):>8}  {ratio:>10}  "
            f"{prediction.exposed_copy_s / prediction.step_s:>8.1%}  {fits}"
        )


def _limit_lines(found: Findings) -> Iterator[str]:
    family = found.study.family
    yield (
        f"The largest that fits into {format_size(found.budget_bytes)}, all else as above "
        f"(predicted)"
    )
    lengths = family.size.length is not None
    batches = family.size.batch is not None
    head = [f"{'':<14}"]
    if lengths:
        head.append(f"{family.length_name:<18} {'step':>8}")
    if batches:
        head.append(f"    {'batch':>8}  {'step':>8}")
    yield "  " + "  ".join(head).rstrip()
    for limit in found.limits:
        cells = [f"{limit.method:<14}"]
        if lengths:
            length = "none" if limit.length is None else family.describe_length(limit.length)
            cells.append(f"{length:<18} {_seconds_or_dash(limit.length_step_s):>8}")
        if batches:
            batch = "none" if limit.batch is None else str(limit.batch)
            cells.append(f"    {batch:>8}  {_seconds_or_dash(limit.batch_step_s):>8}")
        yield "  " + "  ".join(cells).rstrip()


def _seconds_or_dash(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _footnote(hardware: Hardware) -> Iterator[str]:
    yield from _wrap(origin(hardware), indent="")


def origin(hardware: Hardware) -> str:
    """Return what the figures of a machine's steps are worth, in sentences."""
    measured = any(source.kind is Kind.MEASURED for source in hardware.sources)
    if measured:
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


def _wrap(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)
