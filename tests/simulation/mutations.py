"""Every wait and every hold of the engine, and the same code without it.

Each mutation takes one away, by an edit of the source text that must match exactly once. The text
of `hazard` is what docs/internals/races.md says of it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One guard removed.

    Args:
        name: of the guard.
        file: below src/ebbtide.
        old: the code with the guard.
        new: the same without it.
        hazard: what the guard prevents.
        check: of the programs that are to see it: `check` of harness, or of schedule_programs.
    """

    name: str
    file: str
    old: str
    new: str
    hazard: str
    check: str = "harness.check"


MUTATIONS = (
    Mutation(
        name="the copy down waits for the kernels that write its source",
        file="stores/pinned.py",
        old="self._device.copy_down(memory, source, ready, *self._reads)",
        new="self._device.copy_down(memory, source, *self._reads)",
        hazard="The copy reads memory that queued kernels have not written yet.",
    ),
    Mutation(
        name="the source is held until its copy down is complete",
        file="runtime/offloads.py",
        old="        self.queue.append(record)\n",
        new="        self.queue.append(record)\n        record.release_source()\n",
        hazard="The source's memory is handed out again and overwritten while the copy reads it.",
    ),
    Mutation(
        name="compute waits for the oldest copy down before its source is released early",
        file="runtime/offloads.py",
        old="            self._account.wait(oldest, oldest.slot.offloaded, oldest.home)\n",
        new="",
        hazard="Past the bound on bytes in flight, kernels queued next reuse memory that the copy "
        "still reads.",
    ),
    Mutation(
        name="a source is released only when its copy down has been seen complete",
        file="runtime/offloads.py",
        old="        while self.queue and self._is_complete(self.queue[0]):\n",
        new="        while self.queue:\n",
        hazard="The same, at any moment at which the engine tidies up.",
    ),
    Mutation(
        name="compute waits for the copy down of what a schedule releases",
        file="runtime/offloads.py",
        old="            self._account.wait(record, record.slot.offloaded, record.home)\n",
        new="",
        hazard="Kernels queued after the anchor reuse memory that the copy still reads.",
        check="schedule_programs.check_schedule",
    ),
    Mutation(
        name="a source that a schedule held is held on when its graph dies",
        file="runtime/offloads.py",
        old="                self.enqueue(record)\n",
        new="                record.release_source()\n",
        hazard="The graph is dropped while the copy is on its way down: the memory is handed out "
        "again and overwritten while the copy reads it.",
        check="schedule_programs.check_schedule",
    ),
    Mutation(
        name="the copy up waits for the kernels queued before its buffer was allocated",
        file="stores/pinned.py",
        old="slot.memory(), allocated, slot.offloaded)",
        new="slot.memory(), slot.offloaded)",
        hazard="The allocator hands out memory that queued kernels still read; the copy overwrites "
        "it under them.",
    ),
    Mutation(
        name="the copy up waits for the copy down of the same bytes",
        file="stores/pinned.py",
        old="slot.memory(), allocated, slot.offloaded)",
        new="slot.memory(), allocated)",
        hazard="The two copy streams are ordered by nothing else when forward and backward compute "
        "on different streams: host memory is read before it is written.",
    ),
    Mutation(
        name="compute waits for the copy up",
        file="runtime/session.py",
        old="            self._account.wait(record, event, self.device.compute_stream(), "
        "is_reload=True)\n",
        new="            pass\n",
        hazard="Backward kernels read a buffer that the copy has not filled.",
    ),
    Mutation(
        name="a buffer that nobody waited for is held until its copy up is complete",
        file="runtime/reloads.py",
        old="        if not record.awaited:\n",
        new="        if False:\n",
        hazard="A graph dies while its bytes are on their way up: the buffer is freed, handed out "
        "again, and the copy writes over its new contents.",
    ),
    Mutation(
        name="held buffers are let go only when their copy up has been seen complete",
        file="runtime/reloads.py",
        old="self.abandoned = [held for held in self.abandoned if not held[1].query()]",
        new="self.abandoned = []",
        hazard="The same.",
    ),
    Mutation(
        name="a copy down waits for the copies up that read its host memory before",
        file="stores/pinned.py",
        old="ready, *self._reads)",
        new="ready)",
        hazard="The next offload overwrites bytes that are on their way up: a dropped slot is "
        "reused at once.",
    ),
    Mutation(
        name="such a copy up is forgotten only when it has been seen complete",
        file="stores/pinned.py",
        old="self._reads = [read for read in self._reads if not read.query()]",
        new="self._reads = []",
        hazard="The same.",
    ),
    Mutation(
        name="the store waits for its copies before it cuts its slabs to size",
        file="stores/pinned.py",
        old="        device.finish_copies()\n",
        new="",
        hazard="A copy that nobody wants any more goes on in memory that was given back.",
    ),
    Mutation(
        name="the store waits for its copies before it gives host memory back",
        file="stores/pinned.py",
        old="        self._device.finish_copies()\n",
        new="",
        hazard="After `detach`, copies under way hold device and host memory that nobody ever lets "
        "go of.",
    ),
    Mutation(
        name="a record is shared only at the same version",
        file="runtime/session.py",
        old="type(record) is StorageRecord and record.version == version and",
        new="type(record) is StorageRecord and",
        hazard="A tensor saved again after a legal in-place change gets its old bytes in backward.",
    ),
    Mutation(
        name="a record pins the identity of its source",
        file="runtime/records.py",
        old="self.identity = StorageWeakRef(storage)  # type: ignore[no-untyped-call]",
        new="self.identity = None",
        hazard="A freed storage's address comes back at once, for another tensor: it would find "
        "the record of the first and get its bytes.",
    ),
    Mutation(
        name="in-place changes are seen after the bytes have left",
        file="runtime/saved.py",
        old="return self._probe._version != self._version",
        new="return False",
        hazard="Hooks switch autograd's own check off: a modified saved tensor gives wrong "
        "gradients without a word.",
    ),
    Mutation(
        name="a chunk is written to disk only after its copy down",
        file="stores/staged.py",
        old="            copied.synchronize()  # or the chunk's old bytes would be written\n",
        new="",
        hazard="The file gets the bytes that were in the chunk before.",
    ),
    Mutation(
        name="a chunk is used again only after it has been written to disk",
        file="stores/staged.py",
        old="                chunk.written.synchronize()  # the worker reads it until then\n",
        new="                pass\n",
        hazard="The next piece overwrites a chunk that is still to be written.",
    ),
    Mutation(
        name="a chunk whose write failed is not used again",
        file="stores/staged.py",
        old="if piece is None or not piece.unwritten:",
        new="if True:",
        hazard="The only copy of the bytes is overwritten; backward reads what the file has there.",
    ),
    Mutation(
        name="a copy down into a chunk waits for the copies up from it",
        file="stores/staged.py",
        old="self._device.copy_down(memory, part, ready, *chunk.reads)",
        new="self._device.copy_down(memory, part, ready)",
        hazard="A reload that takes the short way, from the chunk, gets bytes of another piece.",
    ),
    Mutation(
        name="the copies down in pieces wait for the kernels that write their source",
        file="stores/staged.py",
        old="self._device.copy_down(memory, part, ready, *chunk.reads)",
        new="self._device.copy_down(memory, part, *chunk.reads)",
        hazard="The copy reads memory that queued kernels have not written yet.",
    ),
    Mutation(
        name="a copy up from a chunk waits for the copy down to it",
        file="stores/staged.py",
        old="copy_up(part, memory, allocated, slot.offloaded)",
        new="copy_up(part, memory, allocated)",
        hazard="The two copy streams are ordered by nothing else: the chunk is read before it is "
        "written.",
    ),
    Mutation(
        name="a copy up from a chunk waits for the kernels queued before its buffer was allocated",
        file="stores/staged.py",
        old="copy_up(part, memory, allocated, slot.offloaded)",
        new="copy_up(part, memory, slot.offloaded)",
        hazard="The copy overwrites memory that queued kernels still read.",
    ),
    Mutation(
        name="so does one whose bytes were read from disk",
        file="stores/staged.py",
        old="device.copy_up(part, chunk.memory[:size_bytes], allocated)",
        new="device.copy_up(part, chunk.memory[:size_bytes])",
        hazard="The same.",
    ),
    Mutation(
        name="bytes are read from disk into a chunk only after the copy up of the piece before",
        file="stores/staged.py",
        old="            read.synchronize()  # the copy up of another piece reads the chunk\n",
        new="            pass\n",
        hazard="The piece before gets the bytes of this one.",
    ),
    Mutation(
        name="backward waits until a worker has read the bytes and queued their copy",
        file="stores/staged.py",
        old="        self.reading.synchronize()\n        return self.copies[-1]",
        new="        return self.copies[-1] if self.copies else self.reading",
        hazard="Backward goes on before the copy is on its stream: it waits for nothing.",
    ),
    Mutation(
        name="a reload from disk is over only when its copies are",
        file="stores/staged.py",
        old="return self.reading.query() and all(copy.query() for copy in self.copies)",
        new="return self.reading.query()",
        hazard="A buffer that nobody wants any more is freed while a copy still writes to it.",
    ),
    Mutation(
        name="a buffer is held while copies of a failed reload are under way",
        file="runtime/session.py",
        old="                self._reloads.abandoned.append((flat, event))  # a copy may run\n",
        new="                pass\n",
        hazard="Part of the bytes could be read and are on their way into the buffer when backward "
        "raises and frees it.",
    ),
    Mutation(
        name="writes to disk end before the chunks are given back",
        file="stores/staged.py",
        old="        self._writer.close()\n",
        new="",
        hazard="The worker goes on to read host memory that is no longer ours.",
    ),
    Mutation(
        name="reads from disk end before the chunks are given back",
        file="stores/staged.py",
        old="        self._reader.close()\n",
        new="",
        hazard="The worker goes on to fill host memory that is no longer ours.",
    ),
    Mutation(
        name="copies end before the chunks are given back",
        file="stores/staged.py",
        old="        # A copy must not outlive the memory it reads or writes.\n"
        "        self._device.finish_copies()\n",
        new="",
        hazard="The same, for the device.",
    ),
    Mutation(
        name="a rebuild record pins the identity of the storage it stands for",
        file="runtime/rebuilt.py",
        old="self.identity = StorageWeakRef(storage)  # type: ignore[no-untyped-call]",
        new="self.identity = None",
        hazard="A freed GELU output's address comes back at once, for another tensor: it would be "
        "taken for the first.",
    ),
    Mutation(
        name="what was changed in place is not rebuilt",
        file="hooks/rebuild.py",
        old="if node is None or output._version:",
        new="if node is None:",
        hazard="The operation gives the values from before the change.",
    ),
    Mutation(
        name="the copy up of weights waits for the kernels queued before its buffer was allocated",
        file="runtime/weights.py",
        old="self.device.copy_up(group.buffer, source, allocated)",
        new="self.device.copy_up(group.buffer, source)",
        hazard="The allocator hands out memory that queued kernels still read; the copy overwrites "
        "it under them.",
        check="weight_programs.check_weights",
    ),
    Mutation(
        name="compute waits for the copy up of weights",
        file="runtime/weights.py",
        old="        # Kernels queued from now on read the values.\n"
        "        self.device.compute_stream().wait(group.loaded)\n",
        new="",
        hazard="A layer computes with a buffer that the copy has not filled.",
        check="weight_programs.check_weights",
    ),
    Mutation(
        name="weights that nobody waited for are held until their copy up is complete",
        file="runtime/weights.py",
        old="        if not group.awaited:\n",
        new="        if False:\n",
        hazard="A layer that was brought ahead is left out: its buffer is freed, handed out again, "
        "and the copy writes over its new contents.",
        check="weight_programs.check_weights",
    ),
    Mutation(
        name="such weights are let go only when their copy up has been seen complete",
        file="runtime/weights.py",
        old="self._abandoned = [held for held in self._abandoned if not held[1].query()]",
        new="self._abandoned = []",
        hazard="The same.",
        check="weight_programs.check_weights",
    ),
    Mutation(
        name="weights come anew for every forward",
        file="runtime/weights.py",
        old="            self._release(group)  # an optimizer may have been at work since\n",
        new="            pass\n",
        hazard="A layer computes with the values of before the optimizer's step.",
        check="weight_programs.check_weights",
    ),
    Mutation(
        name="the copies of weights end before their host memory is given back",
        file="runtime/weights.py",
        old="        self.settle()\n        if not self._saved:\n",
        new="        if not self._saved:\n",
        hazard="After `detach`, a copy under way reads host memory that is no longer ours.",
        check="weight_programs.check_weights",
    ),
    Mutation(
        name="the copy down of a gradient waits for the kernels that make it",
        file="runtime/gradients.py",
        old="self._device.copy_down(target, source, home.record())",
        new="self._device.copy_down(target, source)",
        hazard="The copy reads memory that queued kernels have not written yet.",
        check="weight_programs.check_weights",
    ),
    Mutation(
        name="a gradient is held until its copy down is complete",
        file="runtime/gradients.py",
        old="        self._under_way.append(_Departure(source, target, copied, home))\n"
        "        self._under_way_bytes += source.numel()\n",
        new="",
        hazard="Its memory is handed out again and overwritten while the copy reads it.",
        check="weight_programs.check_weights",
    ),
    Mutation(
        name="a gradient is let go only when its copy down has been seen complete",
        file="runtime/gradients.py",
        old="            if not oldest.copied.query():\n",
        new="            if False:\n",
        hazard="The same.",
        check="weight_programs.check_weights",
    ),
    Mutation(
        name="past the bound compute waits for a gradient's copy down before its memory is let go",
        file="runtime/gradients.py",
        old="                oldest.home.wait(oldest.copied)\n",
        new="                pass\n",
        hazard="Kernels queued next reuse memory that the copy still reads.",
        check="weight_programs.check_weights",
    ),
    Mutation(
        name="the host waits for a gradient before anybody adds to it",
        file="runtime/gradients.py",
        old="        for event in events:\n            event.synchronize()\n",
        new="",
        hazard="The optimizer steps with a gradient that is not there yet.",
        check="weight_programs.check_weights",
    ),
    Mutation(
        name="a gradient's host memory is used again only when nobody holds the gradient",
        file="runtime/groups.py",
        old="            if given is None or given.expired():  # type: ignore[no-untyped-call]\n",
        new="            if True:\n",
        hazard="What has accumulated so far, or a gradient that the user keeps, is overwritten by "
        "the next one.",
        check="weight_programs.check_weights",
    ),
    Mutation(
        name="a weight that the model itself holds is followed, and keeps its memory",
        file="runtime/resting.py",
        old="if _count(f) > _ALONE + (f.stand_in is self.kept)]",
        new="if False]",
        hazard="A forward takes a weight out of a layer, the layer works and ends, and the forward "
        "goes on with memory that was taken away.",
        check="weight_programs.check_weights",
    ),
    Mutation(
        name="what the model holds of a weight is what its layer sees",
        file="runtime/weights.py",
        old="                    followed.stand_in.refer_to(member.view_of(buffer))\n",
        new="                    pass\n",
        hazard="A forward holds a weight while its layer goes and comes back, and changes it: the "
        "layer, in another buffer, works with the values from before.",
        check="weight_programs.check_weights",
    ),
    Mutation(
        name="what was changed through `data` counts",
        file="runtime/resting.py",
        old=" or self.stand_in.exposed",
        new="",
        hazard="No version counter tells of such a change: it is lost when the buffer goes.",
        check="weight_programs.check_weights",
    ),
    Mutation(
        name="a buffer is taken over only when nobody looks at it",
        file="runtime/weights.py",
        old=" and _count_users(group.buffer) == self._alone:",
        new=":",
        hazard="A forward, or a node of backward, still has the weights of before: those of "
        "another layer are copied over them.",
        check="weight_programs.check_weights",
    ),
    Mutation(
        name="a buffer is taken over only if one stream used it",
        file="runtime/weights.py",
        old="        elif not group.roamed and",
        new="        elif",
        hazard="The copy waits for the stream on which the buffer was allocated; kernels of "
        "another one, such as a backward on a stream of its own, still read it.",
        check="weight_programs.check_weights",
    ),
)
