"""Empty CUDA libraries, with which a CUDA build of torch can be imported where it has no GPU.

PyPI has only CUDA builds of torch for Linux. With the libraries they are linked to they take five
gigabytes, of which a CPU needs nothing. But the dynamic linker insists on finding every library and
every function. So this module compiles libraries that have all the functions and do nothing: each
returns 100, which is ``cudaErrorNoDevice``, and torch sees a machine without a GPU.
"""

import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

_VENDOR = ("libcu", "libnv", "libnccl")
_VENDOR_FUNCTION = re.compile(r"(p?nccl|cu[A-Za-z]*|nv[a-z]*)[A-Z_]")
_TOOLS = ("cc", "nm", "objdump")


def add_stubs(libraries: Path) -> list[str]:
    """Compile the libraries that torch's own libraries need and do not find.

    Args:
        libraries: the folder ``torch/lib`` of an installed torch. The stubs are put beside the
            others, which is one of the places where they look.

    Returns:
        The names of the stubs.

    Raises:
        RuntimeError: there is no compiler.
    """
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(f"a CUDA build of torch needs {', '.join(missing)} to run on a CPU")
    present = sorted(libraries.glob("*.so*"))
    versions = _needed_versions(present)
    functions = _undefined_functions(present)
    names = {path.name for path in present}
    made = sorted(name for name in versions if name not in names and name.startswith(_VENDOR))
    for name in made:
        symbols = {version: functions[version] for version in versions[name]}
        if name.startswith("libnccl"):  # functions of any library that has no symbol versions
            symbols[""] = functions[""]
        _compile(libraries / name, symbols)
    return made


def _needed_versions(libraries: list[Path]) -> dict[str, set[str]]:
    """For each library that others need: the versions of symbols that they ask it for."""
    versions: dict[str, set[str]] = defaultdict(set)
    for library in libraries:
        wanted = ""
        for line in _output("objdump", "-p", str(library)).splitlines():
            if found := re.match(r"\s+NEEDED\s+(\S+)", line):
                versions[found[1]] |= set()
            elif found := re.match(r"\s+required from (\S+):", line):
                wanted = found[1]
            elif wanted and (found := re.match(r"\s+0x\w+ 0x\w+ \d+ (\S+)", line)):
                versions[wanted].add(found[1])
            else:
                wanted = ""
    return versions


def _undefined_functions(libraries: list[Path]) -> dict[str, set[str]]:
    """The functions that the libraries expect elsewhere, by version; "" for those without one."""
    functions: dict[str, set[str]] = defaultdict(set)
    for library in libraries:
        for line in _output("nm", "-D", "--undefined-only", str(library)).splitlines():
            kind, name = line.split()[-2:]
            function, _, version = name.partition("@")
            if kind == "U" and (version or _VENDOR_FUNCTION.match(function)):
                functions[version.lstrip("@")].add(function)
    return functions


def _compile(target: Path, symbols: dict[str, set[str]]) -> None:
    lines = [
        "static int no_device(void) { return 100; }",
        'static const char *text(void) { return "no device"; }',
    ]
    for function in sorted(set().union(*symbols.values())):
        kind, same = "int", "no_device"
        if function.endswith(("String", "Name")):
            kind, same = "const char *", "text"
        lines.append(f'{kind} {function}(void) __attribute__((alias("{same}")));')
    script = [
        f"{version} {{ global: {' '.join(f'{function};' for function in sorted(names))} }};"
        for version, names in symbols.items()
        if version
    ]
    with tempfile.TemporaryDirectory() as folder:
        source, exports = Path(folder, "stub.c"), Path(folder, "stub.map")
        source.write_text("\n".join(lines) + "\n")
        exports.write_text("\n".join(script) + "\n")
        command = ["cc", "-shared", "-fPIC", "-w", str(source), "-o", str(target)]
        command.append(f"-Wl,-soname,{target.name}")
        if script:
            command.append(f"-Wl,--version-script={exports}")
        subprocess.run(command, check=True)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
