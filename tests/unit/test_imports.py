"""`import ebbtide` stays light, and imports within the package point one way."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import torch

import ebbtide

PACKAGE = Path(ebbtide.__file__).parent

# Each room may import its own floor and the floors below it (design, section 3). "__init__" is what
# `import ebbtide` gives.
FLOORS = [
    {"version", "errors", "units", "documents", "policy"},
    {"devices", "schedule"},
    {"stores"},
    {"runtime"},
    {"weights"},
    {"observe", "planning"},
    {"handle"},
    {"api", "session"},
    {"interop"},
    {"tools", "compat"},
    {"__init__", "__main__"},
]


def may_import(part: str) -> set[str]:
    """The parts of the package that a part may import."""
    floor = next((number for number, parts in enumerate(FLOORS) if part in parts), None)
    assert floor is not None, f"src/ebbtide/{part} has no place in the order of imports yet"
    return set().union(*FLOORS[: floor + 1])


def imported_parts(source: str, parts: set[str]) -> Iterator[str]:
    """The parts that a file imports, wherever in the file; type checkers' imports count too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "imports within the package are written out: from ebbtide..."
            # `from ebbtide import x`: a part if there is one of that name, else a public name.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            package, part, *_ = [*name.split("."), "__init__"]
            if package == "ebbtide":
                yield part if part in parts else "__init__"


def wrong_imports(package: Path) -> list[str]:
    """The imports that point the wrong way, as ``file: part``."""
    files = {path.relative_to(package): path for path in package.rglob("*.py")}
    parts = {Path(file.parts[0]).stem for file in files}
    return [
        f"{file.as_posix()}: {part}"
        for file, path in sorted(files.items())
        for part in imported_parts(path.read_text(), parts)
        if part not in may_import(Path(file.parts[0]).stem)
    ]


def test_imports_within_the_package_point_one_way() -> None:
    assert wrong_imports(PACKAGE) == []


def find_circles(package: Path) -> list[str]:
    """The files that import each other, straight or through others; type checkers' imports too."""
    trees = {}
    for path in package.rglob("*.py"):
        name = ".".join(("ebbtide", *path.relative_to(package).with_suffix("").parts))
        trees[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    graph = {name: set(_imported_files(tree, trees.keys())) for name, tree in trees.items()}
    while free := [name for name, uses in graph.items() if not uses & graph.keys()]:
        for name in free:
            del graph[name]
    return sorted(graph)


def _imported_files(tree: ast.AST, files: Collection[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in files else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_two_files_import_each_other() -> None:
    assert find_circles(PACKAGE) == []


def test_a_circle_is_found(tmp_path: Path) -> None:
    circle = {
        "stores/one.py": "from ebbtide.stores.two import Two\n",
        "stores/two.py": "if TYPE_CHECKING:\n    from ebbtide.stores import one\n",
    }
    found = find_circles(fabricate(tmp_path, SOUND | circle))
    assert found == ["ebbtide.stores.one", "ebbtide.stores.two"]


def test_no_two_files_share_a_name() -> None:
    names = [path.name for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    assert len(names) == len(set(names))


def test_every_file_was_looked_at() -> None:
    """The stores import the devices, and so on: the test above did see imports."""
    text = (PACKAGE / "stores" / "pinned.py").read_text()
    assert {"devices", "stores", "errors"} <= set(
        imported_parts(text, {"devices", "stores", "errors"})
    )


# ---- What torch does not document --------------------------------------------------------------

INTERNALS = "runtime/torch_internals.py"

ELSEWHERE = {
    "runtime/compiled.py": {"torch._C._dynamo.eval_frame"},  # what it has there may be missing
    "devices/device.py": {"torch._C._autograd._profiler_enabled"},  # devices are below that file
    "devices/simulated.py": {"torch.UntypedStorage._new_with_weak_ptr"},  # likewise
    "stores/measured_memory.py": {  # and stores
        "torch._C._accelerator_setAllocatorSettings",
        "torch._C._accelerator_isAllocatorInitialized",
        "torch._C._accelerator_getDeviceStats",
    },
    "interop/pipelining.py": {"torch.distributed.pipelining.stage._PipelineStageBase"},  # heavy
    "tools/run.py": {"torch.jit._recursive"},  # it is replaced there while a script runs
}
"""Private names of torch that other files may use."""

ATTRIBUTES = {
    "_base": "what a tensor is a view of",
    "_version": "what autograd itself compares; documented in the notes on in-place operations",
    "_cdata": "tells storages apart without making a Python object for each",
    "_backward_hooks": "hooks move with a parameter that becomes another leaf",
    "_post_accumulate_grad_hooks": "likewise",
    "_parameters": "a module's own, in a loop, or while they are exchanged for a call",
    "_buffers": "likewise",
    "_modules": "likewise, and with those that are None",
    "_forward_hooks": "their functions are looked through, because they run with the forward",
    "_compiled_call_impl": "what `Module.compile` sets, and nothing else tells of",
}
"""Private attributes of tensors, storages and modules that are used, and why."""


@functools.lru_cache(maxsize=1)  # two questions about one file come in a row
def parse(source: str) -> ast.Module:
    return ast.parse(source)


def private_names(source: str) -> Iterator[str]:
    """Private names of torch that a file imports or reaches from what it imports of torch.

    Names below `torch.ops` are those of operators, and the `_foreach` functions are documented.
    """
    tree = parse(source)
    origins: dict[str, str] = {}  # of the names that the file imports from torch
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    origins[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    yield from filter(is_private, [alias.name])
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            for alias in node.names:
                origins[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield from filter(is_private, [f"{node.module}.{alias.name}"])
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            base, names = node.value, [node.attr]
            while isinstance(base, ast.Attribute):
                base, names = base.value, [base.attr, *names]
            if isinstance(base, ast.Name) and base.id in origins:
                name = ".".join([origins[base.id], *names])
                if is_private(name):
                    yield name


def is_private(name: str) -> bool:
    parts = name.split(".")
    if parts[1:2] == ["ops"] or any(part.startswith("_foreach_") for part in parts):
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


@functools.cache
def attributes_of_torch() -> frozenset[str]:
    kinds = torch.empty(0), torch.empty(0).untyped_storage(), torch.nn.Module()
    return frozenset(name for each in kinds for name in dir(each) if is_private(f"torch.{name}"))


def private_attributes(source: str) -> Iterator[str]:
    """Private attributes of torch's tensors, storages and modules that a file asks others for."""
    known = attributes_of_torch()
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in known:
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not of_self:
                yield node.attr


def test_private_torch_is_in_one_file() -> None:
    """So that a version that renames something costs a change in one place."""
    found: dict[str, set[str]] = {}
    attributes: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        file, source = path.relative_to(PACKAGE).as_posix(), path.read_text()
        if file != INTERNALS:
            names = set(private_names(source))
            # A name that is a part of a longer one is no other use.
            found[file] = {n for n in names if not any(o.startswith(f"{n}.") for o in names)}
            attributes.update(private_attributes(source))
    assert {file: names for file, names in found.items() if names} == ELSEWHERE
    listed = {name.rpartition(".")[2] for names in ELSEWHERE.values() for name in names}
    assert attributes - listed == ATTRIBUTES.keys()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from torch.utils._pytree import tree_leaves", "torch.utils._pytree.tree_leaves"),
        ("def f():\n    import torch._dynamo", "torch._dynamo"),
        (
            "import torch\ntorch._C._len_torch_dispatch_stack()",
            "torch._C._len_torch_dispatch_stack",
        ),
        ("from torch import nn\nnn.Module._call_impl", "torch.nn.Module._call_impl"),
        ("import torch\ntorch.ops.aten._unsafe_view, torch._foreach_add_, torch.Tensor", None),
    ],
)
def test_a_private_name_is_found(source: str, name: str | None) -> None:
    assert name in {*private_names(source), None}
    assert name is not None or not list(private_names(source))


def test_a_private_attribute_is_found() -> None:
    source = "def f(self, tensor, module):\n    return tensor._base, module._hook, self._version"
    assert list(private_attributes(source)) == ["_base"]


def fabricate(package: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


SOUND = {
    "__init__.py": "from ebbtide.api import offload\n",
    "errors.py": "import re\n",
    "policy.py": "from ebbtide.errors import PolicyError\n",
    "devices/cpu.py": "from ebbtide import errors\nimport ebbtide.devices.device\n",
    "devices/device.py": "import torch\n",
    "observe/trace.py": "",
    "stores/disk.py": "from ebbtide.devices.device import AbstractEvent\n",
    "runtime/transfers.py": "import ebbtide.stores.disk as disk\n",
    "runtime/layers.py": "",
    "api.py": "from ebbtide.runtime.engine import Engine\nimport ebbtide.runtime.transfers\n",
    "planning/search.py": "from ebbtide.policy import ActivationPolicy\n",
    "tools/demo.py": "import ebbtide.api\nfrom ebbtide import planning\n",
    "__main__.py": "import ebbtide\nfrom ebbtide import ActivationPolicy\n",
}


def test_a_sound_tree_has_no_wrong_import(tmp_path: Path) -> None:
    assert wrong_imports(fabricate(tmp_path, SOUND)) == []


@pytest.mark.parametrize(
    ("file", "statement", "part"),
    [
        ("errors.py", "import ebbtide", "__init__"),
        ("policy.py", "from ebbtide import offload", "__init__"),
        ("policy.py", "from ebbtide import devices", "devices"),
        ("devices/device.py", "from ebbtide.stores import disk", "stores"),
        ("stores/disk.py", "from ebbtide.runtime.transfers import Reloads", "runtime"),
        ("runtime/transfers.py", "def f():\n    import ebbtide.observe.trace", "observe"),
        ("runtime/transfers.py", "from ebbtide.planning import search", "planning"),
        ("runtime/layers.py", "if TYPE_CHECKING:\n    from ebbtide.api import offload", "api"),
        ("api.py", "import re, ebbtide.tools.main", "tools"),
        ("planning/search.py", "from ebbtide.api import offload", "api"),
    ],
)
def test_one_wrong_import_is_found(tmp_path: Path, file: str, statement: str, part: str) -> None:
    package = fabricate(tmp_path, SOUND | {file: statement})
    assert wrong_imports(package) == [f"{file}: {part}"]


def test_a_new_part_must_be_given_a_place(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"src/ebbtide/extra has no place"):
        wrong_imports(fabricate(tmp_path, SOUND | {"extra/file.py": "from ebbtide import errors"}))


IMPORT = """
import json, sys
import torch
before = set(sys.modules)
{statement}
print(json.dumps({{
    "packages": sorted({{name.partition(".")[0] for name in set(sys.modules) - before}}),
    "modules": sorted(sys.modules),
    "device": torch.cuda.is_initialized() or torch.xpu.is_initialized(),
}}))
"""
HEAVY = {
    *("matplotlib", "neuralop", "transformers", "lightning", "accelerate", "scipy", "typer"),
    *("rich", "jinja2", "torch.distributed.pipelining", "transformer_engine"),
}


def imported_by(statement: str) -> dict[str, object]:
    """What a fresh interpreter that has torch already imports further."""
    code = IMPORT.format(statement=statement)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def third_party(packages: list[str]) -> set[str]:
    return {name for name in packages if name not in sys.stdlib_module_names}


def test_import_ebbtide_is_light() -> None:
    """Of third parties it takes what torch itself has taken, and psutil."""
    imported = imported_by("import ebbtide, ebbtide.compat.transformer_engine")
    assert third_party(imported["packages"]) <= {"ebbtide", "psutil", "torch"}
    assert HEAVY.isdisjoint(imported["modules"])
    assert imported["device"] is False


@pytest.mark.slow
def test_a_heavy_import_is_seen() -> None:
    imported = imported_by("import ebbtide, scipy.fft")
    assert "scipy" in third_party(imported["packages"])
    assert not HEAVY.isdisjoint(imported["modules"])


MOST_LINES = 1000
REASON = "# Long: "  # why a file is longer, in one line of its own


def test_no_file_is_long_without_a_reason() -> None:
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    long = [
        f"{path.relative_to(PACKAGE)}: {len(text.splitlines())} lines"
        for path, text in texts.items()
        if len(text.splitlines()) > MOST_LINES and REASON not in text
    ]
    assert not long


TESTS = Path(__file__).parents[1]
MOST_DEEP_IMPORTS = 120  # lines
MOST_TEXTS = 120  # expectations of what a text says
# A user imports these by their address.
PUBLIC = ("ebbtide.compat.", "ebbtide.interop.")


def deep_imports(tree: ast.AST) -> Iterator[str]:
    """The files inside rooms that a file imports: tests speak to the interface of a room."""
    rooms = {f"ebbtide.{path.parent.name}" for path in PACKAGE.glob("*/__init__.py")}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in rooms:
            room = PACKAGE / node.module.partition(".")[2]
            interface = importlib.import_module(node.module).__dict__.get("__all__", ())
            others = {alias.name for alias in node.names} - set(interface)
            if any((room / f"{name}.py").exists() for name in others):
                yield node.module
        elif isinstance(node, ast.ImportFrom) and str(node.module).count(".") > 1:
            if str(node.module).startswith("ebbtide.") and not node.module.startswith(PUBLIC):
                yield node.module
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if not alias.name.startswith(PUBLIC)]
            yield from (name for name in names if name.startswith("ebbtide.") and "." in name[8:])


def expected_texts(tree: ast.AST) -> Iterator[str]:
    """The texts of errors, warnings and reports that a file compares with parts of them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("pytest."):
            yield from (ast.unparse(each.value) for each in node.keywords if each.arg == "match")
        elif isinstance(node, ast.Assert):
            text = ast.unparse(node.test)
            if " in str(" in text or text.endswith((" in output", ".output")):
                yield text


def test_tests_speak_to_interfaces_and_assert_facts() -> None:
    deep, texts = {}, {}
    for path in TESTS.rglob("*.py"):
        file, tree = path.relative_to(TESTS).as_posix(), ast.parse(path.read_text())
        deep[file], texts[file] = sorted(deep_imports(tree)), sorted(expected_texts(tree))
    assert sum(map(len, deep.values())) <= MOST_DEEP_IMPORTS, deep
    assert sum(map(len, texts.values())) <= MOST_TEXTS, texts


def test_a_deep_import_and_a_text_are_found() -> None:
    deep = "from ebbtide.stores import Slot, disk_file\nfrom ebbtide.runtime.record import State"
    assert list(deep_imports(ast.parse(deep))) == ["ebbtide.stores", "ebbtide.runtime.record"]
    assert not list(deep_imports(ast.parse("from ebbtide.stores import Slot\nimport ebbtide")))
    texts = "with pytest.raises(E, match='a'): pass\nassert 'b' in str(error.value)"
    assert len(list(expected_texts(ast.parse(texts)))) == 2
