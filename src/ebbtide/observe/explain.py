"""Says in words why memory is as high as it is in a step, and what to change."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

from torch import nn

from ebbtide.observe.inspection import InspectedStorage, Inspection, inspect_engine
from ebbtide.observe.memory import BACKWARD, IDLE, LOSS, OPTIMIZER, MemorySample, StepMemory
from ebbtide.observe.recording import trace_of
from ebbtide.planning.planned_step import PlannedStep
from ebbtide.policy import ActivationPolicy
from ebbtide.runtime.engine import Engine
from ebbtide.runtime.events import Owner
from ebbtide.runtime.layers import is_one_region
from ebbtide.runtime.stats import StepStats, fates
from ebbtide.stores.measured_memory import LEAST_BYTES, memory_of
from ebbtide.units import count, format_size, text_block
from ebbtide.weights.overlap import OverlapStats


@final
@dataclass(frozen=True)
class Finding:
    """A reason why memory is as high as it is.

    Attributes:
        cause: short name of the reason, the same in all versions, such as ``"small tensors"``.
        sentence: what was found, in a sentence.
        evidence: the figures that it was found by.
        setting: what to change; empty if there is nothing to change.
        size_bytes: bytes of the peak that it accounts for.
    """

    cause: str
    sentence: str
    evidence: str
    setting: str
    size_bytes: int = 0


# ---- The figures of a step that its explanation rests on ----

ACTIVATIONS: Final = frozenset(
    {Owner.KEPT, Owner.LEAVING, Owner.REFERENCED}
    | {Owner.RELOADED, Owner.REBUILT, Owner.RECOMPUTED}
)
"""Owners of bytes that an offloader could have somewhere else."""


@final
@dataclass(frozen=True)
class Evidence:
    """What is known of the last finished step, and of the offload.

    Attributes:
        stats: its statistics.
        num_steps: number of finished steps.
        inspection: what became of each storage.
        memory: memory by owner; None if the step was not recorded.
        policy: what was to be offloaded.
        min_bytes: the smallest storage that leaves.
        bound_bytes: bound on the bytes in flight, each way.
        follows_schedule: whether a schedule says what leaves.
        wanted_again: number of storages that a second backward needs.
        compiled: names of compiled modules that contain layers.
        total_bytes: all memory of the device; 0 if nobody knows, or if the host computes.
        offloads_weights: whether weights rest elsewhere.
        plan_keeps_all: whether there is a plan, and it keeps everything.
        plan_peak_bytes: the peak that the plan predicts, if there is one.
        overlaps: what each optimizer that steps inside backward has done so far.
    """

    stats: StepStats
    num_steps: int
    inspection: Inspection
    memory: StepMemory | None
    policy: ActivationPolicy
    min_bytes: int
    bound_bytes: int = 0
    follows_schedule: bool = False
    wanted_again: int = 0
    compiled: tuple[str, ...] = ()
    total_bytes: int = 0
    offloads_weights: bool = False
    plan_keeps_all: bool = False
    plan_peak_bytes: int | None = None
    overlaps: tuple[OverlapStats, ...] = ()

    @property
    def peak(self) -> MemorySample | None:
        """The phase in which memory was highest."""
        return None if self.memory is None else self.memory.samples[self.memory.peak]

    @property
    def own_bytes(self) -> int:
        """The peak without what was there before the step and is none of training's business."""
        peak = self.peak
        return 0 if peak is None else peak.peak_bytes - peak.idle_bytes

    @property
    def phase(self) -> str:
        """The phase in which memory was highest; empty if nobody knows."""
        return "" if self.peak is None else self.peak.phase

    @property
    def kept(self) -> list[InspectedStorage]:
        """The storages that stay on the device by decision."""
        return [each for each in self.inspection.storages if each.decision == "keep"]

    def at_peak(self, *owners: Owner) -> int:
        """Return the bytes of some owners at the peak; 0 where it was not recorded."""
        return 0 if self.peak is None else total(self.peak, owners)

    def largest_in(self, phase: str) -> InspectedStorage | None:
        """Return the largest storage that a backward reads; None for any other phase."""
        read = (each for each in self.inspection.storages if _backward_of(each) == phase)
        return max(read, key=lambda each: each.size_bytes, default=None)

    def share(self, size_bytes: int) -> float:
        """Return the share of the peak that bytes are; 0 where it was not recorded."""
        return size_bytes / self.own_bytes if self.own_bytes > 0 else 0.0

    @property
    def small_bytes(self) -> int:
        """Bytes of saved tensors that stay because they are small."""
        return max(0, self.stats.kept_bytes - sum(each.size_bytes for each in self.kept))


def _backward_of(storage: InspectedStorage) -> str:
    """Return the name of the phase in which backward reads what a layer saved."""
    if storage.layer is None:
        return BACKWARD
    name = f"B{storage.layer}"
    return f"{name}.m{storage.microbatch}" if storage.microbatch else name


def total(sample: MemorySample, owners: Iterable[Owner]) -> int:
    """Return the bytes of some owners in a phase."""
    return sum(sample.owned.get(owner, 0) for owner in owners)


def find_limit(evidence: Evidence) -> tuple[int, str] | None:
    """Return the smallest peak that moving activations could reach, and the phase that has it.

    In no phase can memory be lower than all that is not activations. In a layer's backward the
    largest storage that this layer saved must be there, too. Where memory that was freed counts,
    it could have been returned.

    Returns:
        Bytes and the name of the phase; None if the step was not recorded.
    """
    if evidence.memory is None:
        return None
    found = []
    for sample in evidence.memory.samples:
        activation_bytes = total(sample, ACTIVATIONS)
        largest = evidence.largest_in(sample.phase)
        needed_bytes = min(activation_bytes, 0 if largest is None else largest.size_bytes)
        movable_bytes = activation_bytes - needed_bytes
        if evidence.memory.counts_freed:
            movable_bytes += sample.owned.get(Owner.PASSED, 0)
        found.append((sample.peak_bytes - movable_bytes, sample.phase))
    return max(found)


# ---- The reasons why memory is as high as it is. Each looks for its own evidence ----

_SHARE: Final = 0.1  # of the peak: less than this does not explain it
_RELOADED: Final = 0.25  # of the peak: what came back explains it
_SMALL: Final = 0.2  # of what was saved: so much in small tensors is worth offloading
_MOST: Final = 0.4  # of the peak: more than this dominates it
_HIDDEN: Final = 0.5  # of an optimizer's step inside backward: less than this saves no time
_LISTED: Final = 3


def no_step(evidence: Evidence) -> Iterator[Finding]:
    """No training step has ended yet."""
    saved_tensors = evidence.inspection.in_flight.saved_tensors
    if saved_tensors:
        yield Finding(
            "step not over",
            "A forward has run and its backward has not, so there is no finished step to explain.",
            f"autograd holds {count(saved_tensors, 'saved tensor')}",
            "call explain() after backward; if backward has run, delete the loss and all else that "
            "refers to the graph",
        )
    else:
        yield Finding(
            "model not called",
            "The model that was offloaded has not been called with grad mode on.",
            "no forward of it has begun that autograd records",
            "offload the module whose forward your training loop calls, after all code that "
            "replaces the forward; evaluation under no_grad keeps no activations",
        )


def nothing_saved(evidence: Evidence) -> Iterator[Finding]:
    """Autograd saved nothing that could leave."""
    stats = evidence.stats
    if stats.num_saved and stats.parameter_bytes == stats.saved_bytes:
        yield Finding(
            "only parameters",
            "All that autograd saved are parameters, buffers, or casts of them.",
            f"{format_size(stats.parameter_bytes)} of parameters were saved and nothing else",
            "weights=ebbtide.WeightPolicy() moves weights",
        )


def compiled_as_one(evidence: Evidence) -> Iterator[Finding]:
    """The layers are inside one compiled region."""
    if evidence.compiled:
        yield Finding(
            "compiled as one region",
            "The model is compiled as a whole, so ebbtide cannot tell one layer from another.",
            f"compiled: {', '.join(evidence.compiled[:_LISTED])}; no layer was seen to begin",
            "compile the layers one by one: for layer in model.layers: layer.compile()",
        )


def small_tensors(evidence: Evidence) -> Iterator[Finding]:
    """Saved tensors are below `min_bytes`."""
    small_bytes, unique_bytes = evidence.small_bytes, evidence.stats.unique_bytes
    whole_bytes = evidence.own_bytes or unique_bytes
    if small_bytes > _SHARE * whole_bytes and small_bytes > _SMALL * unique_bytes:
        yield Finding(
            "small tensors",
            f"Much of what autograd saves is in tensors smaller than "
            f"{format_size(evidence.min_bytes)}, which stay.",
            f"{format_size(small_bytes)} of {format_size(unique_bytes)} that was saved",
            "activations=ebbtide.ActivationPolicy(min_bytes=...) with a smaller size, or a larger "
            "batch",
            small_bytes,
        )


def kept_by_choice(evidence: Evidence) -> Iterator[Finding]:
    """The policy, a schedule or a plan keeps layers on the device."""
    kept = evidence.kept
    size_bytes = sum(each.size_bytes for each in kept)
    whole_bytes = evidence.own_bytes or evidence.stats.unique_bytes
    if evidence.wanted_again or size_bytes <= _SHARE * whole_bytes or evidence.plan_keeps_all:
        return
    layers = sorted({each.layer for each in kept if each.layer is not None})
    policy = evidence.policy
    if evidence.plan_peak_bytes is not None:
        setting = "a smaller budget: the plan keeps what fits"
    elif evidence.follows_schedule:
        setting = "offload these layers in the schedule, too"
    elif policy.counts_layers:
        setting = "raise num_layers or lower keep_last in ActivationPolicy"
    else:
        setting = "give layers= the modules that save them, or remove marks (mark_not_offload)"
    where = f"layers {_ranges(layers)}" if layers else "code outside layers"
    yield Finding(
        "kept by choice",
        f"The activations of {where} stay on the device because they were chosen to.",
        f"{format_size(size_bytes)} in {count(len(kept), 'storage')}",
        setting,
        size_bytes,
    )


def double_backward(evidence: Evidence) -> Iterator[Finding]:
    """A backward with ``create_graph=True`` needs activations twice."""
    if evidence.wanted_again:
        yield Finding(
            "double backward",
            "A backward with create_graph=True makes a graph that holds what it has read, so that "
            "stays on the device until the second backward.",
            f"{count(evidence.wanted_again, 'storage')} of each step",
            "if no second derivative is needed, drop create_graph=True",
            max(1, evidence.at_peak(Owner.KEPT)),
        )


def still_in_use(evidence: Evidence) -> Iterator[Finding]:
    """Activations that were offloaded stay: variables refer to them, or the model needs them."""
    size_bytes = evidence.at_peak(Owner.REFERENCED)
    if evidence.share(size_bytes) > _SHARE:
        yield Finding(
            "still in use",
            "Activations that were offloaded are still in memory, because variables of your "
            "program refer to them, or the model or the loss reads them again later, as skip "
            "connections do.",
            f"{format_size(size_bytes)} at the peak",
            "drop such variables before backward, keep only what you need of them (.item(), "
            ".cpu()), or delete the hooks that collect them; gc.get_referrers(tensor) tells who "
            "refers to a tensor",
            size_bytes,
        )


_Part = tuple[str, str, str, tuple[Owner, ...], float, Callable[[Evidence], bool]]
"""A finding about what owners have at the peak: its cause, its sentence, which may name the {phase}
of the peak, what to change, which may name the {bound} on bytes in flight, the owners, the share of
the peak that they must have, and whether it applies."""

_LOWER: Final = "lower ActivationPolicy(max_inflight_bytes=...) from {bound}"

_PARTS: Final[tuple[_Part, ...]] = (
    (
        "late copies",
        "Copies are slower than compute here, so activations were still on the device.",
        f'{_LOWER}, which makes compute wait, or recompute: ActivationPolicy(mode="recompute")',
        (Owner.LEAVING,),
        0.2,
        lambda evidence: not evidence.follows_schedule,
    ),
    (
        "released late",
        "The schedule releases activations after the peak.",
        "move the release of these layers to an earlier pass",
        (Owner.LEAVING,),
        0.2,
        lambda evidence: evidence.follows_schedule,
    ),
    (
        "optimizer step",
        "Memory is highest while the optimizer steps, not while the model runs.",
        "give the optimizer foreach=False or fused=True, which need fewer temporaries, or let "
        "weights and state rest elsewhere: weights=ebbtide.WeightPolicy()",
        tuple(owner for owner in Owner if owner not in IDLE),
        0.0,
        lambda evidence: evidence.phase == OPTIMIZER,
    ),
    (
        "loss",
        "Memory is highest while the loss is computed from the model's outputs.",
        "compute the loss in parts of the batch or sequence, or inside the model",
        (Owner.OUTPUTS, Owner.RUNNING),
        _SHARE,
        lambda evidence: evidence.phase == LOSS,
    ),
    (
        "one operation",
        "Most of the peak is what the operations of {phase} work on at once. No offloader can move "
        "that.",
        "a smaller batch, or an operation that works in parts",
        (Owner.RUNNING,),
        _MOST,
        lambda evidence: evidence.phase not in (OPTIMIZER, LOSS),
    ),
    (
        "weights and state",
        "Weights, gradients and optimizer state are a large part of the peak, and activations are "
        "not.",
        "weights=ebbtide.WeightPolicy()",
        (Owner.PARAMETERS, Owner.GRADIENTS, Owner.OPTIMIZER, Owner.WEIGHTS),
        _MOST,
        lambda evidence: evidence.phase != OPTIMIZER and not evidence.offloads_weights,
    ),
    (
        "allocator",
        "Memory that was freed is not returned to the system, or layers pass much to each "
        "other, as skip connections do.",
        "look at handle.notes, which says how freed memory is returned here",
        (Owner.PASSED,),
        _MOST,
        lambda evidence: (
            evidence.memory is not None
            and evidence.memory.counts_freed
            and evidence.at_peak(Owner.PASSED) > 4 * LEAST_BYTES
        ),
    ),
)


def parts_of_peak(evidence: Evidence) -> Iterator[Finding]:
    """Owners have a large part of the peak."""
    for cause, sentence, setting, owners, least, applies in _PARTS:
        size_bytes = evidence.at_peak(*owners)
        if applies(evidence) and evidence.share(size_bytes) > least:
            whole = format_size(evidence.own_bytes)
            sizes = sorted(((evidence.at_peak(owner), owner) for owner in owners), key=_size)
            owned = [f"{format_size(size)} {owner.value}" for size, owner in sizes if size]
            yield Finding(
                cause,
                sentence.format(phase=_phase(evidence)),
                f"{', '.join(owned[:_LISTED])}, of the step's {whole}",
                _setting_of(setting, evidence),
                size_bytes,
            )


def _size(part: tuple[int, Owner]) -> int:
    return -part[0]


def _setting_of(setting: str, evidence: Evidence) -> str:
    """Return a setting with the bound on bytes in flight, which a plan says where there is one."""
    if "{bound}" in setting and evidence.plan_peak_bytes is not None:
        return "a smaller budget: the plan has in flight what fits"
    return setting.format(bound=format_size(evidence.bound_bytes))


def reloaded_at_peak(evidence: Evidence) -> Iterator[Finding]:
    """Activations that came back are a large part of the peak: before their use, or as a whole."""
    reloaded_bytes = evidence.at_peak(Owner.RELOADED)
    largest = evidence.largest_in(evidence.phase)
    needed_bytes = min(reloaded_bytes, 0 if largest is None else largest.size_bytes)
    if evidence.share(reloaded_bytes - needed_bytes) > _RELOADED:
        yield Finding(
            "reloaded early",
            "Activations that were brought back ahead of their use are a large part of the peak.",
            f"{format_size(reloaded_bytes - needed_bytes)} beside what {evidence.phase} reads at "
            f"once, of the step's {format_size(evidence.own_bytes)}",
            _setting_of(_LOWER, evidence),
            reloaded_bytes - needed_bytes,
        )
    if largest is not None and evidence.share(needed_bytes) > _RELOADED:
        yield Finding(
            "one tensor",
            f"A tensor that {_phase(evidence)} reads is a large part of the peak by itself, and it "
            f"must be there as a whole.",
            f"{largest.describe()}, of the step's {format_size(evidence.own_bytes)}",
            "a smaller batch, or an operation that works in parts",
            needed_bytes,
        )


def kept_by_allocator(evidence: Evidence) -> Iterator[Finding]:
    """The allocator keeps blocks that were freed."""
    memory = evidence.memory
    if memory is None or memory.counts_freed:
        return
    size_bytes = memory.reserved_peak_bytes - memory.peak_bytes
    if size_bytes > 2 * _SHARE * memory.peak_bytes:
        yield Finding(
            "allocator",
            "torch's allocator keeps blocks that were freed, and other programs see them as used.",
            f"{format_size(memory.reserved_peak_bytes)} were reserved for a peak of "
            f"{format_size(memory.peak_bytes)}",
            "PYTORCH_ALLOC_CONF=expandable_segments:True",
            size_bytes,
        )


def graph_held(evidence: Evidence) -> Iterator[Finding]:
    """A graph is alive although its backward has run."""
    now = evidence.inspection.in_flight
    size_bytes = now.kept_bytes + now.reload_bytes + now.offload_bytes
    if now.saved_tensors and not now.forwards:
        yield Finding(
            "graph held",
            "The program holds a graph from an earlier forward, and with it what it saved.",
            f"{count(now.saved_tensors, 'saved tensor')}, {format_size(size_bytes)} on the device, "
            f"{format_size(now.stored_bytes)} in the store",
            "del loss after backward, and collect loss.item() or loss.detach() instead of loss",
            max(1, size_bytes),
        )


def it_fits(evidence: Evidence) -> Iterator[Finding]:
    """Nothing has to leave."""
    memory = evidence.memory
    if evidence.plan_keeps_all:
        yield Finding(
            "it fits",
            "The whole step fits into the budget, so everything stays.",
            f"the plan predicts {format_size(evidence.plan_peak_bytes or 0)}",
            "nothing; a smaller budget would make something leave",
        )
        return
    if memory is not None and memory.reserved_peak_bytes < evidence.total_bytes / 4:
        yield Finding(
            "it fits",
            "The step takes a small part of the device, and would do so without offload.",
            f"{format_size(memory.reserved_peak_bytes)} of {format_size(evidence.total_bytes)}",
            "nothing; offloading costs time that this model need not spend",
        )


def step_in_backward(evidence: Evidence) -> Iterator[Finding]:
    """An optimizer that steps inside backward saves no time."""
    for stats in evidence.overlaps:
        if not stats.steps_ahead:
            yield Finding(
                "stepped twice",
                "Most of what the optimizer stepped inside backward had to be stepped again, so "
                "nothing is stepped ahead now.",
                f"{describe(stats)[:-1]}; gradients were clipped in {stats.num_clipped} of "
                f"{count(stats.num_steps, 'step')}",
                "raise max_norm if clipping bites in most steps, change gradients, weights and "
                "options after the step and not before it, or leave handle.overlap out",
            )
        elif stats.num_steps > 1 and not stats.shadow_bytes:
            yield Finding(
                "nothing stepped ahead",
                "No parameter has a shadow that it could be stepped in, so that all of them step "
                "when the program says so.",
                describe(stats)[:-1],
                "give handle.overlap a shadow_budget; on a CPU, where the step needs the cores of "
                "backward, weights have shadows without one only if they rest in files",
            )
        elif stats.worker_s and stats.hidden_share < _HIDDEN:
            yield Finding(
                "step not hidden",
                "Most of the optimizer's step inside backward is waited for, because backward is "
                "too short, or needs the same cores.",
                describe(stats)[:-1],
                "a larger batch makes backward longer; a fused optimizer (fused=True) steps faster",
            )


def describe(stats: OverlapStats) -> str:
    """Say in a sentence what an optimizer that steps inside backward has done so far."""
    return (
        f"The optimizer stepped inside backward in {stats.num_overlapped} of "
        f"{count(stats.num_steps, 'step')}: {stats.hidden_share:.0%} of {stats.worker_s:.3f} s ran "
        f"beside backward, and {count(stats.num_redone, 'step')} had something done twice."
    )


_FIRST: Final = (nothing_saved, compiled_as_one, double_backward)
_BY_SIZE: Final = (
    *(graph_held, still_in_use, small_tensors, kept_by_choice),
    *(parts_of_peak, reloaded_at_peak, kept_by_allocator),
)


def _phase(evidence: Evidence) -> str:
    """Return the phase of the peak with the name of its module."""
    phase = evidence.phase
    number = phase[1:].partition(".")[0]
    for each in evidence.inspection.storages:
        if phase[0] in "FB" and str(each.layer) == number and each.name:
            return f"{phase} ({each.name})"
    return phase


def _ranges(numbers: list[int]) -> str:
    """Write sorted numbers briefly, such as ``"0 to 5 and 7"``."""
    texts = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        low, *rest = [number for _, number in run]
        texts.append(f"{low} to {rest[-1]}" if rest else str(low))
    more = ["others"] if len(texts) > _LISTED else []
    return " and ".join(texts[:_LISTED] + more)


# ---- What a step's memory consists of, in words ----

_WIDTH = 80
_NEAR = 1.15  # a peak below this many times the limit is as low as offloading can make it


@final
@dataclass(frozen=True)
class Explanation:
    """Why memory is as high as it is; it prints as text of 80 columns.

    Attributes:
        verdict: the answer in a sentence or two.
        findings: what was found, the most important first; empty if there is nothing to change.
        memory: what memory held, by owner; None if the step was not recorded (``trace=True``).
        limit_bytes: the smallest peak that moving activations could reach; None if the step was not
            recorded.
        limit_why: why it cannot be lower.
    """

    verdict: str
    findings: tuple[Finding, ...]
    memory: StepMemory | None
    limit_bytes: int | None
    limit_why: str

    def _repr_html_(self) -> str:
        return text_block(str(self))

    def __str__(self) -> str:
        paragraphs = [_wrap(self.verdict)]
        for number, finding in enumerate(self.findings, 1):
            lines = _wrap(f"{number}. {finding.sentence}", then=3)
            lines += _wrap(f"Evidence: {finding.evidence}.", first=3, then=6)
            lines += (
                _wrap(f"Change: {finding.setting}.", first=3, then=6) if finding.setting else []
            )
            paragraphs.append(lines)
        if self.memory is not None:
            first, *rows = str(self.memory).splitlines()
            paragraphs.append([*_wrap(f"{first[0].upper()}{first[1:]}:"), *rows])
        paragraphs.append(_wrap(self.limit_why))
        return "\n\n".join("\n".join(lines) for lines in paragraphs if lines)


def _wrap(text: str, *, first: int = 0, then: int = 0) -> list[str]:
    """Break text into lines of 80 columns, the first one and the others indented."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=" " * first,
        subsequent_indent=" " * then,
        break_on_hyphens=False,
    )


def explain(evidence: Evidence) -> Explanation:
    """Explain a step.

    Args:
        evidence: what is known of it.
    """
    if evidence.num_steps:
        parts = [finding for cause in _BY_SIZE for finding in cause(evidence)]
        parts.sort(key=lambda finding: -finding.size_bytes)
        fits = [*it_fits(evidence)]
        rest = [*fits, *parts] if evidence.plan_keeps_all else [*parts, *fits]
        findings = (*(finding for cause in _FIRST for finding in cause(evidence)), *rest)
    else:
        findings = tuple(no_step(evidence))
    limit = find_limit(evidence)
    return Explanation(
        verdict=_verdict(evidence, findings, limit),
        findings=(*findings, *step_in_backward(evidence)),
        memory=evidence.memory,
        limit_bytes=None if limit is None else limit[0],
        limit_why="" if limit is None else _why(evidence, *limit),
    )


def _verdict(
    evidence: Evidence, findings: tuple[Finding, ...], limit: tuple[int, str] | None
) -> str:
    if not evidence.num_steps:
        return findings[0].sentence
    stats = evidence.stats
    moved = ", ".join(words for kind, words in fates(stats).items() if kind != "keep")
    saved = (
        f"Of {format_size(stats.unique_bytes)} of activations, {moved or 'nothing'} left memory."
    )
    if evidence.memory is None:
        return f"{saved} Record a step with trace=True to see what the peak consists of."
    peak = evidence.memory
    where = f"The peak is {peak.describe_peak()}."
    if findings:
        return f"{where} {saved}"
    if limit is not None and peak.peak_bytes <= _NEAR * limit[0]:
        return f"{where} {saved} It is as low as offloading can make it."
    return f"{where} {saved} No single cause stands out, so there is no setting to change."


def _why(evidence: Evidence, limit_bytes: int, phase: str) -> str:
    assert evidence.memory is not None
    above = evidence.memory.peak_bytes - limit_bytes
    return (
        f"No offloader of activations can get below {format_size(limit_bytes)}: that much is in "
        f"memory in {phase} without any activation that could be elsewhere. This step is "
        f"{format_size(max(0, above))} above it."
    )


# ---- Collects the evidence for an explanation from an offload ----


def collect_evidence(
    engine: Engine,
    layers: Sequence[str],
    planned: PlannedStep | None,
    overlaps: Sequence[OverlapStats] = (),
) -> Evidence:
    """Collect what is known of the last finished step.

    Args:
        engine: the parts of the offload.
        layers: names of the layers.
        planned: the plan that is followed, if there is one.
        overlaps: what each optimizer that steps inside backward has done.
    """
    stats = engine.stats
    memory = trace_of(engine).memory if engine.is_traced else None
    counts = engine.transfers.device.has_memory and engine.torch_device.type != "cpu"
    moved = stats.offloaded_bytes + stats.rebuilt_bytes + stats.recomputed_bytes
    return Evidence(
        stats=stats,
        num_steps=engine.num_steps,
        inspection=inspect_engine(engine),
        memory=memory,
        policy=engine.policy,
        min_bytes=engine.placement.min_bytes,
        bound_bytes=engine.transfers.offloads.bound_bytes,
        follows_schedule=engine.schedule is not None,
        wanted_again=len(engine.activations.wanted_again),
        compiled=tuple(_compiled_around(engine.modules, layers)),
        total_bytes=memory_of(engine.torch_device).total_bytes if counts else 0,
        offloads_weights=engine.weights is not None,
        plan_keeps_all=planned is not None and not moved,
        plan_peak_bytes=None if planned is None else planned.plan.peak_bytes,
        overlaps=tuple(overlaps),
    )


def _compiled_around(modules: Sequence[nn.Module], layers: Sequence[str]) -> Iterator[str]:
    """Yield the names of compiled modules that contain layers, and are none themselves."""
    for model in modules:
        for name, module in model.named_modules():
            inside = [layer for layer in layers if layer.startswith(f"{name}." if name else "")]
            if is_one_region(module) and any(layer != name for layer in inside):
                yield name or "the model"
