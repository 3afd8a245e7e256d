"""Turns names of ebbtide into links to the reference.

Pages and docstrings name things as users write them (`handle.stats`, `ActivationPolicy(...)`), and
signatures as the source defines them (``ebbtide.handle.OffloadHandle``). Names of other packages
stay plain. A name of ebbtide that a signature needs and the reference lacks is a warning.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

_CODE = re.compile(r"(?:(ebbtide|handle|session)\.)?(\w[\w.]*)(?:\(.*\))?", re.DOTALL)
_OWNERS = {
    "ebbtide": "ebbtide.",
    "handle": "ebbtide.OffloadHandle.",
    "session": "ebbtide.OffloadSession.",
}


def name_in_code(code: str, names: Collection[str]) -> str | None:
    """Return the name of the reference that inline code of a page refers to; None: none.

    Args:
        code: the code, such as ``handle.stats.stall_s`` or ``ebbtide.offload(model)``.
        names: all names of the reference.
    """
    found = _CODE.fullmatch(code)
    if found is None or not (found[1] or code[0].isupper()):
        return None
    name = _OWNERS[found[1] or "ebbtide"] + found[2]
    while name not in names and name.count(".") > 1:  # an attribute leads to its owner
        name = name.rpartition(".")[0]
    is_owner = f"{name}." in _OWNERS.values() and found[1] != "ebbtide"
    return name if name in names and not is_owner else None


def name_of_target(target: str, names: Collection[str], owner: str) -> str | None:
    """Return the one name of the reference that a name in a docstring or a signature means.

    Args:
        target: the name, such as ``max_inflight_bytes`` or ``ebbtide.handle.OffloadHandle``.
        names: all names of the reference.
        owner: the class or module of the docstring.
    """
    last = target.rpartition(".")[2] if target.startswith("ebbtide.") else target
    found = [name for name in names if name == target or name.endswith(f".{last}")]
    own = f"{owner}.{target}"
    if own in found:
        return own
    return found[0] if len(found) == 1 else None


def _resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.TextElement
) -> nodes.Element | None:
    """Resolve a name that Sphinx has not found."""
    if node.get("refdomain") != "py":
        return None
    target = str(node["reftarget"])
    in_backticks = node["reftype"] == "obj"  # they may hold any code
    if not in_backticks and not target.startswith("ebbtide."):
        return text  # a type of another package
    owner = f"{node.get('py:module')}.{node.get('py:class')}"
    name = name_of_target(target, env.domains["py"].objects, owner)
    if name is None:
        return text if in_backticks else None
    return _link(app, str(node["refdoc"]), name, text)


def _link_code(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Let inline code that names something of ebbtide lead to the reference."""
    names = app.env.domains["py"].objects
    for code in list(doctree.findall(lambda node: node.tagname == "literal")):
        around = {code.parent.tagname, code.parent.parent.tagname if code.parent.parent else ""}
        if around & {"reference", "title", "pending_xref"} or "xref" in code["classes"]:
            continue
        name = name_in_code(code.astext(), names)
        if name is not None and names[name].docname != page:
            code.replace_self(_link(app, page, name, code.deepcopy()))


def _link(app: Sphinx, page: str, name: str, text: nodes.TextElement) -> nodes.reference:
    from sphinx.util.nodes import make_refnode

    entry = app.env.domains["py"].objects[name]
    return make_refnode(app.builder, page, entry.docname, entry.node_id, text, name)


def _write_signature(
    app: Sphinx,  # noqa: ARG001
    what: str,
    name: str,  # noqa: ARG001
    documented: Any,
    options: Any,  # noqa: ARG001
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """Write the arguments of a class whose base is of a framework that is not installed here.

    autodoc reads them from the stand-in of the base, which takes anything.
    """
    from sphinx.util.inspect import stringify_signature

    if what != "class" or signature != "(*args, **kwargs)":
        return signature, returns
    of_init = inspect.signature(documented.__init__)
    arguments = list(of_init.parameters.values())[1:]
    own = of_init.replace(parameters=arguments, return_annotation=inspect.Signature.empty)
    return stringify_signature(own, show_annotation=False), returns


def setup(app: Sphinx) -> dict[str, Any]:
    from sphinx.domains.python import PyObject

    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"  # as the docstrings call them
    app.connect("missing-reference", _resolve)
    app.connect("doctree-resolved", _link_code)
    app.connect("autodoc-process-signature", _write_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
