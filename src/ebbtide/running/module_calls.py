"""Tells of the outermost calls of modules that autograd records, before they begin.

[Note: why no module hooks] `torch.nn` has global forward pre-hooks. They come too late: a module
has already looked up its forward when they run, so what they attach is not used in that call. They
also make the call of every module inside slower, and `torch.compile` warns of them. So the call of
all modules, `nn.Module.__call__`, is replaced. Inside of an outermost call the replacement only
looks whether it is inside.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol, final

import torch
from torch import nn

from ebbtide.coexistence.compiler import skip_in_compiler

Call = Callable[..., Any]


class CallWatcher(Protocol):
    """Is told of outermost calls."""

    def begin_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[Exception], None] | None:
        """Called before a module is called, unless that happens inside of a watched call.

        Returns:
            What is told of the error if the call raises one, which also makes it a watched call;
            None if the calls inside of it are to be told of one by one.
        """


class _Thread(threading.local):
    """Whether the thread is inside of a watched call."""

    inside = False


@final
class ModuleCalls:
    """Tells of the outermost calls of modules while autograd records.

    See [Note: why no module hooks].

    Args:
        watcher: is told of them.
    """

    def __init__(self, watcher: CallWatcher) -> None:
        self._watcher = watcher
        self._before: Call | None = None
        self._replacement: Call | None = None

    def install(self) -> None:
        """Watch the calls of all modules, until `remove`."""
        self._before = nn.Module.__call__
        self._replacement = _watched(self._before, self._watcher)
        nn.Module.__call__ = self._replacement  # type: ignore[method-assign]

    def remove(self) -> None:
        """Watch no longer. If other code has replaced the call since then, nothing is told of."""
        if self._before is None or nn.Module.__call__ is not self._replacement:
            return
        nn.Module.__call__ = self._before  # type: ignore[method-assign]
        self._before = self._replacement = None


def _watched(call: Call, watcher: CallWatcher) -> Call:
    thread = _Thread()
    begin = watcher.begin_call
    is_traced, records = torch.compiler.is_compiling, torch.is_grad_enabled

    @functools.wraps(call)
    def call_module(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_traced() or thread.inside or not records():
            return call(self, *args, **kwargs)
        thread.inside = True  # what `begin` calls is not of the script
        try:
            note_error = begin(self, args, kwargs)
            if note_error is not None:
                try:
                    return call(self, *args, **kwargs)
                except Exception as error:
                    note_error(error)
                    raise
        finally:
            thread.inside = False
        return call(self, *args, **kwargs)

    # The compiler would trace from here, with the hooks of the module. It begins inside instead.
    skip_in_compiler(call_module, with_callees=False)
    return call_module
