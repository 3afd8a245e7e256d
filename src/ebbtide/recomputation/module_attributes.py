"""The attributes of a module that are neither parameters, buffers, submodules nor hooks."""

from __future__ import annotations

import copy
from typing import Any, Final, final

from torch import nn


@final
class ModuleAttributes:
    """The attributes of one module, which may be put back as they are now.

    Lists, sets and dicts among them get the content back that they have now, if a forward has added
    to it or taken from it. What other objects are changed to is not known.

    Args:
        module: the module.
    """

    _others: Final = frozenset(vars(nn.Module())) - {"training"} | {"forward"}

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values = self._now()
        self._contents = {
            name: copy.copy(value)
            for name, value in self._values.items()
            if type(value) in (list, set, dict)
        }

    def _now(self) -> dict[str, Any]:
        return {
            name: value for name, value in vars(self._module).items() if name not in self._others
        }

    def put_back(self) -> None:
        attributes = vars(self._module)
        for name in self._now().keys() - self._values.keys():
            del attributes[name]
        attributes.update(self._values)
        for name, content in self._contents.items():
            value = self._values[name]
            if len(value) == len(content):
                continue  # offloaded weights may have been exchanged in it, as in an LSTM's list
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)
