"""A small offloader on two streams of its own, and the defects that others' issues describe.

It is right as it stands. Each flag takes out what one of the issues found missing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from soft_bench import on

Packed = tuple[Tensor, torch.Event, tuple[int, ...]]


class Offloader:
    """Copies every saved tensor down and up, beside compute.

    Args:
        waits_for_own_copy: a copy up waits for the copy down of its bytes; Megatron-LM #7398.
        keeps_strides: a tensor comes back in the layout that it had; ms-swift #10157.
        waits_outside: compute waits for a copy up, and not the copy stream for itself;
            torchtitan #2581.
        holds_source: a tensor lives until its copy down has ended; TRL #7195.
    """

    def __init__(
        self,
        *,
        waits_for_own_copy: bool = True,
        keeps_strides: bool = True,
        waits_outside: bool = True,
        holds_source: bool = True,
    ) -> None:
        self.down, self.up = torch.Stream(), torch.Stream()
        self.waits_for_own_copy = waits_for_own_copy
        self.keeps_strides = keeps_strides
        self.waits_outside = waits_outside
        self.holds_source = holds_source

    def pack(self, tensor: Tensor) -> Packed:
        compute = torch.accelerator.current_stream()
        self.down.wait_stream(compute)
        source = tensor.detach().contiguous() if self.keeps_strides else tensor.detach()
        self.down.wait_stream(compute)
        with on(self.down):
            host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            flat = (
                source if source.is_contiguous() else source.as_strided(source.shape, host.stride())
            )
            host.copy_(flat, non_blocking=True)
        copied = self.down.record_event()
        if self.holds_source:
            source.record_stream(self.down)
            tensor.record_stream(self.down)
        return host, copied, tensor.stride()

    def unpack(self, packed: Packed) -> Tensor:
        host, copied, stride = packed
        compute = torch.accelerator.current_stream()
        tensor = torch.empty(host.shape, dtype=host.dtype, device="softdevice")
        self.up.wait_stream(compute)
        if self.waits_for_own_copy:
            self.up.wait_event(copied)
        with on(self.up):
            tensor.copy_(host, non_blocking=True)
            # A copy stream that waits for itself waits for nothing.
            waiting = compute if self.waits_outside else self.up
            waiting.wait_stream(self.up)
        tensor.record_stream(self.up)
        if not self.keeps_strides:
            return tensor
        back = torch.empty_strided(host.shape, stride, dtype=host.dtype, device="softdevice")
        return back.copy_(tensor)


def make(**flags: bool) -> Callable[[nn.Module], AbstractContextManager[object]]:
    """Return an offloader for `ebbtide.verify`."""

    def of(_: nn.Module) -> AbstractContextManager[object]:
        offloader = Offloader(**flags)
        return torch.autograd.graph.saved_tensors_hooks(offloader.pack, offloader.unpack)

    return of
