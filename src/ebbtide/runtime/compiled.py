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
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ebbtide.errors import PolicyError
from ebbtide.runtime.torch_internals import find_called, is_exported

is_traced = torch.compiler.is_compiling
"""Whether the compiler traces this call. The compiler takes the answer for a constant."""


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
    _skip(function.__code__, with_callees=with_callees)


def skip_package_in_compiler() -> None:
    """Tell the compiler to run every function of this package as it is, where torch calls it.

    In a training step that is compiled as a whole, the compiler also compiles what backward and the
    optimizer call. To be called when the compiler is loaded. It says nothing of functions that the
    compiler traces as parts of others.
    """
    _skip_functions(len(sys.modules))


@functools.lru_cache(maxsize=1)
def _skip_functions(_: int) -> None:
    """Skip the functions of this package, if more of it is loaded by now."""
    package = __name__.partition(".")[0]
    modules = {name for name in list(sys.modules) if name.partition(".")[0] == package}
    if modules <= _SKIPPED_MODULES:
        return
    _SKIPPED_MODULES.update(modules)
    for each in gc.get_objects():
        if type(each) is types.FunctionType and each.__module__ in modules:
            _skip(each.__code__)


_SKIPPED_MODULES: Final[set[str]] = set()
_SKIPPED: Final[dict[int, types.CodeType]] = {}  # by identity: others may be equal


def _skip(code: types.CodeType, *, with_callees: bool = False) -> None:
    """Tell the compiler to skip a function, unless it was told before, and those made in it."""
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    if id(code) not in _SKIPPED:
        with contextlib.suppress(AttributeError, TypeError):  # then the compiler breaks graphs here
            frames: Any = torch._C._dynamo.eval_frame
            action = frames._FrameAction
            callees = action.SKIP if with_callees else action.DEFAULT
            strategy = frames._FrameExecStrategy(action.SKIP, callees)
            frames.set_code_exec_strategy(code, strategy)
            _SKIPPED[id(code)] = code
    for each in inner:
        _skip(each)


Around = tuple[Callable[[Any], None], Callable[[Any], None]]
"""What is called before a module's call, with its arguments, and after it, with its output."""


@final
class CompiledCall:
    """The compiled call of a module that was compiled in place, with what hooks would do around it.

    Args:
        compiled: the module's ``_compiled_call_impl``.

    Attributes:
        compiled: as given.
        around: called around it, outermost first: before it with its positional and its keyword
            arguments, after it with a tuple of the output, which is None if the call raised.
    """

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled
        self.around: list[Around] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_traced():
            return self.compiled(*args, **kwargs)
        output = None

        def finish(end: Callable[[Any], None]) -> None:
            end((output,))

        with contextlib.ExitStack() as stack:
            for begin, end in list(self.around):
                begin((args, kwargs))
                stack.callback(finish, end)
            output = self.compiled(*args, **kwargs)
        return output


@final
class HookedLayer:
    """Where the hooks of one layer are now.

    Args:
        parent: the module that has the layer as a child; None for a model without a parent.
        key: the layer's name in its parent.
        module: the layer.
        begin: begins the layer; called before other hooks, and with what torch gives a hook.
        end: ends it; called after its forward, however that ends.
        inside: what is called within all other hooks, right before the forward and right after it;
            None: nothing is.
        owner: is kept alive by the layer's hooks; None: nothing is.
    """

    def __init__(
        self,
        parent: nn.Module | None,
        key: str,
        module: nn.Module,
        begin: Callable[[Any], None],
        end: Callable[[Any], None],
        *,
        inside: Around | None = None,
        owner: object = None,
    ) -> None:
        self._find_owner = (lambda: None) if owner is None else weakref.ref(owner)
        self._call: CompiledCall | None = None
        # See [Note: what a model owns].
        self._parent = None if parent is None else weakref.ref(parent)
        self._key = key
        self._known = weakref.ref(module)
        self._around = begin, end
        self._inside = inside
        self._hooked: weakref.ref[nn.Module] | None = None
        self._handles: list[RemovableHandle] = []
        self.follow()

    def follow(self) -> None:
        """Move the hooks to where the layer is called now."""
        module = self._known()
        if module is None:
            return
        parent = None if self._parent is None else self._parent()
        if parent is not None:
            child = parent._modules.get(self._key)
            if child is not module and getattr(child, "_orig_mod", None) is module:
                assert child is not None
                module = child
        call = module._compiled_call_impl
        if call is None:
            if self._hooked is None or self._hooked() is not module:
                self.remove()
                self._hooked = weakref.ref(module)
                self._handles = register_hooks(*self._around, module, owner=self._find_owner())
                if self._inside is not None:
                    self._handles += register_hooks(*self._inside, module, inside=True)
        elif self._call is None or self._call is not call:
            self.remove()
            if not isinstance(call, CompiledCall):
                call = CompiledCall(call)
            call.around.insert(0, self._around)
            if self._inside is not None:
                call.around.append(self._inside)
            self._call = module._compiled_call_impl = call

    @property
    def is_compiled(self) -> bool:
        """Whether the layer's call, or its forward, is compiled."""
        module = None if self._hooked is None else self._hooked()
        return self._call is not None or hasattr(
            getattr(module, "forward", None), "_torchdynamo_orig_callable"
        )

    def remove(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()
        self._hooked = None
        call, self._call = self._call, None
        if call is None:
            return
        call.around.remove(self._around)
        if self._inside is not None:
            call.around.remove(self._inside)
        module = self._known()
        if not call.around and module is not None and module._compiled_call_impl is call:
            module._compiled_call_impl = call.compiled


@final
class ModuleHook:
    """A forward hook of one module that does nothing on copies of the module.

    `copy.deepcopy` and pickle copy a module's hooks with the module. A copy must behave like a
    plain model, so a copied hook is replaced by `inert_hook`.

    Args:
        module: the module.
        action: called with what torch gives the hook after the module, as a tuple. What it returns
            torch is given.
        owner: is kept alive.
    """

    def __init__(
        self, module: nn.Module, action: Callable[[Any], Any], owner: object = None
    ) -> None:
        self._module = weakref.ref(module)
        self._action = action
        self._owner = owner

    def __call__(self, module: nn.Module, *values: Any) -> Any:
        if is_exported() or is_traced():
            return None
        return self._action(values) if self._module() is module else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return inert_hook

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # A function of Python's own that does nothing: the file can be read without ebbtide.
        return getattr, (contextlib.nullcontext(), "__exit__")


def inert_hook(*_: Any) -> None:
    """Do nothing; stands in for a `ModuleHook` on a copy of the model."""


def register_hooks(
    begin: Callable[[Any], object],
    end: Callable[[Any], object],
    module: nn.Module,
    *,
    inside: bool = False,
    owner: object = None,
) -> list[RemovableHandle]:
    """Register hooks of a module that are called before its forward and after it.

    Args:
        begin: called with the arguments of the forward.
        end: called with its arguments and its result, even if it raises an error.
        module: the module.
        inside: whether they are called within the module's other hooks, or around these.
        owner: is kept alive by the hooks.
    """
    before, after = ModuleHook(module, begin, owner), ModuleHook(module, end)
    return [
        module.register_forward_pre_hook(before, prepend=not inside, with_kwargs=True),
        module.register_forward_hook(after, prepend=inside, always_call=True),
    ]


# ---- What an object needs that stands in the place of a module's forward ----
#
# [Note: what a model owns] A model that is dropped must be freed at once, with its parameters,
# the threads, the files and the memory of its offload, although nobody has called `detach`: the
# garbage collector may not come for a long time. So references point one way. A model owns its
# hooks and the forward that stands in the place of its own; these own the engine, and the engine
# the rest. None of them refers to the model, or to a module of it, but weakly. Autograd's graphs
# own what they need of the engine, and the user's handle owns the engine and no hook.


class ForwardReplacement:
    """What is called in the place of a forward, whose name, documentation and attributes it has.

    A copy of this object (`copy.deepcopy` of the model, an EMA, a pickle) is the plain forward of
    the copied module. A module that has this very object, as a copy of its attributes has it, calls
    a plain forward of its own.

    Args:
        forward: the forward that is replaced.
        keeps: whether the module is kept alive if the forward is that of one.

    Attributes:
        kept: what keeps that module alive; None if nothing here does.
    """

    def __init__(self, forward: Callable[..., Any], *, keeps: bool = False) -> None:
        self.kept = forward if keeps else None
        # As `functools.update_wrapper`, which would refer to the forward.
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(forward, name):
                setattr(self, name, getattr(forward, name))
        vars(self).update(getattr(forward, "__dict__", {}))
        vars(self).pop("__wrapped__", None)
        owner = getattr(forward, "__self__", None)
        is_method = isinstance(forward, types.MethodType) and isinstance(owner, nn.Module)
        self._bound_to = weakref.ref(owner) if is_method else None
        self._function: Any = getattr(forward, "__func__", forward) if is_method else forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.find_forward_of_copy() or self._forward)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # which its class has not
            return self._forward
        raise AttributeError(name)

    @property
    def _owner(self) -> Any:
        """What the forward is bound to; this object if it is not bound, or that is gone."""
        if self._bound_to is None:
            return getattr(self._function, "__self__", self)
        owner = self._bound_to()
        return self if owner is None else owner

    @property
    def _forward(self) -> Callable[..., Any]:
        """The forward that is replaced.

        Raises:
            PolicyError: its module is gone.
        """
        if self._bound_to is None:
            return self._function  # type: ignore[no-any-return]
        owner = self._bound_to()
        if owner is None:
            raise PolicyError(
                "the model of this offloaded forward is gone: keep a reference to the model, and "
                "not only to its forward"
            )
        if is_traced():  # the compiler can trace no making of a method
            return functools.partial(self._function, owner)
        return types.MethodType(self._function, owner)

    def find_forward_of_copy(self) -> Callable[..., Any] | None:
        """Return the forward to call instead, if a copy of the module calls this object.

        `copy.copy`, `DataParallel`, and the clones of higher and learn2learn have the attributes of
        the module, this object among them, and modules or weights of their own. To be called by
        `__call__`.
        """
        if is_traced():
            return None
        module, owner = find_called(1), self._owner
        if module is None or module is owner or not isinstance(module, type(owner)):
            return None
        if vars(module).get("forward") is not self:
            return None  # other code calls this for a module of its own
        function = self._function
        while isinstance(function, ForwardReplacement):
            function = function._function
        if function is type(owner).forward:
            function = type(module).forward  # the copy may have another class
        return types.MethodType(function, module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        copied = memo.get(id(self._owner))
        if isinstance(copied, nn.Module):
            # Not that of its class: other code may have bound a function of its own to the module.
            return ForwardReplacement(types.MethodType(self._function, copied), keeps=True)
        return self._forward

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        owner = self._owner
        if isinstance(owner, nn.Module):
            return getattr, (owner, "forward")  # its class's own, which needs no ebbtide to read
        return itself, (self._forward,)


skip_in_compiler(vars(ForwardReplacement)["_forward"].fget)
skip_in_compiler(vars(ForwardReplacement)["_owner"].fget)
skip_in_compiler(ForwardReplacement.find_forward_of_copy)


def itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward; what a pickled replacement of it becomes."""
    return forward
