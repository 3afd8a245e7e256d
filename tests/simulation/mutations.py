"""How each guard of the engine is taken away, and which random programs are to notice.

A guard is found by its tag in the source, see `guards`. What it does and prevents is said there.
"""

from dataclasses import dataclass

from guards import Edit, always, drop, instead, never, put, remove, then

ACTIVATIONS = "harness.check"
SCHEDULES = "schedule_programs.check_schedule"
WEIGHTS = "weight_programs.check_weights"
STATEMENTS = "weight_statements.check_statements"
OVERLAP = "overlap_programs.check_overlap"
LATE_READS = "soft_guards.check_late_reads"
TWO_GRADIENTS = "soft_guards.check_two_gradients"
SOFT_ONLY = (LATE_READS, TWO_GRADIENTS)
"""Programs that need late kernels on streams of their own, or two devices of autograd's."""


@dataclass(frozen=True)
class Mutation:
    """One guard removed.

    Args:
        guard: its name.
        edit: what becomes of the tagged statement.
        check: of the programs that are to notice.
    """

    guard: str
    edit: Edit
    check: str = ACTIVATIONS

    @property
    def name(self) -> str:
        """Of the test."""
        kinds = {
            SCHEDULES: " of schedules",
            WEIGHTS: " of weights",
            STATEMENTS: " of statements",
            OVERLAP: " of steps ahead",
            LATE_READS: " of late reads",
            TWO_GRADIENTS: " of two gradients",
        }
        return f"{self.guard}{kinds.get(self.check, '')}"


_NO_BUFFERS = put("[held for held in self.abandoned if not held[1].query()]", "[]")
_UNLOCKED = """\
moved = gradient.to(parameter.device)
parameter.grad = moved if parameter.grad is None else parameter.grad + moved"""
_HELD_TOO = "gone = [each for each in group.members if each in self._given]"
_NOT_COMPLETE = put("self.queue and self.queue[0].is_copied()", "self.queue")
_SAME_OPTIONS = put("_is_as_marked(groups[member.group], each.options)", "True")

MUTATIONS = (
    # ---- the way down -------------------------------------------------------------------------
    Mutation("copy-down-after-kernels", drop("ready")),
    Mutation("source-until-copied", then("record.source = None")),
    Mutation("bound-after-copy", remove),
    Mutation("retire-when-complete", _NOT_COMPLETE),
    Mutation("release-after-copy", remove, SCHEDULES),
    Mutation("retained-until-copied", instead("record.release_source()"), SCHEDULES),
    Mutation("copy-down-after-readers", drop("*self._reads")),
    Mutation("readers-until-complete", instead("self._reads = []")),
    # ---- the way up ---------------------------------------------------------------------------
    Mutation("copy-up-after-kernels", drop("free")),
    Mutation("copy-up-after-copy-down", drop("slot.offloaded")),
    Mutation("compute-waits-for-reload", remove),
    Mutation("abandoned-until-copied", never),
    Mutation("abandoned-when-complete", _NO_BUFFERS),
    Mutation("failed-reload", remove),
    # ---- host memory --------------------------------------------------------------------------
    Mutation("resize-after-copies", remove),
    Mutation("close-after-copies", remove),
    # ---- identity and versions ----------------------------------------------------------------
    Mutation("same-version", put("record.version == version", "True")),
    Mutation("saved-identity", remove),
    Mutation("in-place-changes", instead("return False")),
    Mutation("unchanged-output", put("output._version", "False")),
    Mutation("rebuilt-elsewhere", remove),
    Mutation("written-before-copy", never),
    Mutation("inputs-of-one-forward", never),
    Mutation("one-version", instead("tensor = values.detach()")),
    # ---- disk ---------------------------------------------------------------------------------
    Mutation("write-after-copy", remove),
    Mutation("chunk-after-write", remove),
    Mutation("chunk-of-failed-write", always),
    Mutation("chunk-after-readers", drop("*chunk.reads")),
    Mutation("chunk-after-kernels", drop("ready")),
    Mutation("chunk-up-after-copy-down", drop("slot.offloaded")),
    Mutation("chunk-up-after-kernels", drop("allocated")),
    Mutation("read-up-after-kernels", drop("allocated")),
    Mutation("read-after-copy-up", remove),
    Mutation("backward-after-read", instead("if not self.copies:\n    return self.reading")),
    Mutation("arrival-with-copies", instead("return self.reading.query()")),
    Mutation("close-after-writes", remove),
    Mutation("close-after-reads", remove),
    Mutation("chunks-after-copies", remove),
    # ---- weights at rest ----------------------------------------------------------------------
    Mutation("weights-after-kernels", drop("free"), WEIGHTS),
    Mutation("compute-waits-for-weights", remove, WEIGHTS),
    Mutation("abandoned-until-copied", never, WEIGHTS),
    Mutation("abandoned-when-complete", _NO_BUFFERS, WEIGHTS),
    Mutation("weights-anew", remove, WEIGHTS),
    Mutation("weights-read-before-return", remove, WEIGHTS),
    Mutation("gradient-after-kernels", drop("ready"), WEIGHTS),
    Mutation("gradient-until-copied", remove, WEIGHTS),
    Mutation("retire-when-complete", _NOT_COMPLETE, WEIGHTS),
    Mutation("bound-after-copy", remove, WEIGHTS),
    Mutation("gradient-before-accumulation", remove, WEIGHTS),
    Mutation("gradient-memory-reuse", always, WEIGHTS),
    Mutation("held-weights-are-tracked", instead(_HELD_TOO), WEIGHTS),
    Mutation("data-changes-count", instead("return torch.Tensor.data.__get__(self)"), WEIGHTS),
    Mutation("leaf-of-live-graphs", instead("parameter.data = values"), WEIGHTS),
    Mutation("views-count", never, WEIGHTS),
    Mutation("buffer-without-readers", instead("unread = True"), WEIGHTS),
    Mutation("buffer-of-one-stream", instead("ordered = True"), WEIGHTS),
    # ---- anything between two statements -------------------------------------------------------
    Mutation("weights-of-recomputation", never, STATEMENTS),
    Mutation("copies-outlive-engine", remove, STATEMENTS),
    Mutation("values-where-they-are", never, STATEMENTS),
    Mutation("memory-of-others", instead("members = [m for _, m in elsewhere]"), STATEMENTS),
    # ---- the optimizer's step in backward ------------------------------------------------------
    Mutation("ahead-of-changes", instead("return gradient is not None"), OVERLAP),
    Mutation("ahead-of-options", _SAME_OPTIONS, OVERLAP),
    Mutation("unclipped-only", instead("bites = False"), OVERLAP),
    # ---- what needs late kernels ---------------------------------------------------------------
    Mutation("close-after-streams", instead("self._device.finish_copies()"), LATE_READS),
    Mutation("gradient-under-lock", instead(_UNLOCKED), TWO_GRADIENTS),
)
