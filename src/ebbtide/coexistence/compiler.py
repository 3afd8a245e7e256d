"""Keeps the hooks of layers outside of what `torch.compile` traces.

The compiler must not trace the hooks: they use locks, threads and weak references, so each would
break the graph. A hook that is traced does nothing (`is_traced`), and the layer of a compiled
module begins and ends outside of the compiled code instead. A module can be compiled in two ways,
before `ebbtide.offload` or after it:

- ``torch.compile(layer)`` returns another module that stands in the layer's place. The hooks are
  registered on that one.
- ``layer.compile()`` sets the attribute ``_compiled_call_impl`` of the layer, which is called in
  place of the layer's hooks and forward. `CompiledCall` is put around it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, Protocol, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

is_traced = torch.compiler.is_compiling
"""Whether the compiler traces this call. The compiler takes the answer for a constant."""

Register = Callable[[nn.Module], list[RemovableHandle]]
"""Registers a layer's two hooks on a module."""


class Replacement(Protocol):
    """A callable that stands in the place of a forward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def restore(self) -> None:
        """Give the module its own forward back."""


Replace = Callable[[nn.Module, Callable[..., Any]], Replacement]
"""Makes the replacement of a module's forward, given the module and its forward."""


def compiler_is_loaded() -> bool:
    """Whether anything can have been compiled. Importing the compiler takes a second."""
    return "torch._dynamo" in sys.modules


def skip_in_compiler(function: Callable[..., Any], *, with_callees: bool = True) -> None:
    """Tell the compiler to run a function as it is where a compiled module calls it.

    `torch.compiler.disable` does the same, and imports the compiler.

    Args:
        function: a function of this package.
        with_callees: whether the functions that it calls run as they are, too. If not, the compiler
            begins with these.
    """
    with contextlib.suppress(AttributeError, TypeError):  # then the compiler breaks the graph here
        frames: Any = torch._C._dynamo.eval_frame
        action = frames._FrameAction
        callees = action.SKIP if with_callees else action.DEFAULT
        strategy = frames._FrameExecStrategy(action.SKIP, callees)
        frames.set_code_exec_strategy(function.__code__, strategy)


@final
class CompiledCall:
    """The compiled call of a module that was compiled in place, as a layer.

    Args:
        compiled: the module's ``_compiled_call_impl``.
        begin: called before it with the positional arguments.
        end: called after it with the output; with None if it raised.
        run: called in the place of ``compiled`` where nothing is traced.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        begin: Callable[[Any], None],
        end: Callable[[Any], None],
        run: Callable[..., Any],
    ) -> None:
        self.compiled = compiled
        self._run = run
        self._begin = begin
        self._end = end

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_traced():
            return self.compiled(*args, **kwargs)
        output = None
        self._begin(args)
        try:
            output = self._run(*args, **kwargs)
        finally:
            self._end(output)
        return output


@final
class HookedLayer:
    """Where the hooks of one layer are now.

    Args:
        parent: the module that has the layer as a child; None for a model without a parent.
        key: the layer's name in its parent.
        module: the layer.
        register: registers the layer's hooks on a module.
        begin: begins the layer, for `CompiledCall`.
        end: ends it.
        replace: makes a replacement of the layer's forward; None if that stays as it is.
    """

    def __init__(
        self,
        parent: nn.Module | None,
        key: str,
        module: nn.Module,
        register: Register,
        begin: Callable[[Any], None],
        end: Callable[[Any], None],
        replace: Replace | None,
    ) -> None:
        self._replace = replace
        self._replaced: Replacement | None = None
        self._parent = parent
        self._key = key
        self._module = module
        self._register = register
        self._begin, self._end = begin, end
        self._hooked: nn.Module | None = None
        self._handles: list[RemovableHandle] = []
        self.follow()

    def follow(self) -> None:
        """Move the hooks to where the layer is called now."""
        module = self._module
        if self._parent is not None:
            child = self._parent._modules.get(self._key)
            if child is not module and getattr(child, "_orig_mod", None) is module:
                assert child is not None
                module = child
        call = module._compiled_call_impl
        if call is None:
            if self._hooked is not module:
                self.remove()
                self._hooked, self._handles = module, self._register(module)
                if self._replace is not None:
                    self._replaced = self._replace(module, module.forward)
                    module.__dict__["forward"] = self._replaced
        elif not isinstance(call, CompiledCall):
            self.remove()
            run = call if self._replace is None else self._replace(module, call)
            module._compiled_call_impl = CompiledCall(call, self._begin, self._end, run)
            self._hooked = None

    def remove(self) -> None:
        """Remove the hooks, and the replacement of the forward."""
        while self._handles:
            self._handles.pop().remove()
        if self._replaced is not None:
            self._replaced.restore()
            self._replaced = None
        call = self._module._compiled_call_impl
        if isinstance(call, CompiledCall):
            self._module._compiled_call_impl = call.compiled
        self._hooked = None
