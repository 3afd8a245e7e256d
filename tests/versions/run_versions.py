"""Test the core against the oldest and the newest supported torch, and every supported Python.

python tests/versions/run_versions.py [--only oldest newest] [--quick] [--remove]
                                      [-- arguments for pytest]

What is supported is read from version.py and pyproject.toml. The lowest Python is combined with
the oldest torch, the highest with the newest, and those between with the torch in constraints.txt.
The Python and torch of `make test` are left out, because the whole suite runs there. Needs nothing
but the standard library, PyPI, and on Linux a C compiler (cuda_stubs.py says why). A torch built
for the CPU is used instead where PIP_INDEX_URL or PIP_FIND_LINKS offers one.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cuda_stubs import add_stubs

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-versions"
LEAST_FREE_BYTES = 4 * 2**30  # the wheel, and what it unpacks to
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
# Whatever touches torch in ways that a version can change, and takes a minute or two altogether.
CORE = (
    "tests/unit/test_imports.py",
    "tests/unit/test_offload_api.py",
    "tests/unit/test_saved_tensors.py",
    "tests/unit/test_layers.py",
    "tests/unit/test_compiled.py",
    "tests/unit/test_rebuild.py",
    "tests/unit/test_offload_session.py",
    "tests/unit/test_mapped_weights.py",
    "tests/unit/test_weight_offload.py",
    "tests/unit/test_pipelining.py",
    "tests/unit/test_schedule_pipeline.py",
    "tests/unit/test_examples.py::test_a_model_larger_than_memory_trains",
    "tests/parity/test_offload.py",
    "tests/simulation/test_simulation.py",
)
# The part of it that breaks first when torch changes, for CI.
QUICK = (
    "tests/unit/test_offload_api.py",
    "tests/unit/test_saved_tensors.py",
    "tests/unit/test_layers.py",
    "tests/unit/test_pipelining.py",
)


@dataclass(frozen=True)
class Row:
    """One combination to test.

    Attributes:
        name: ``"oldest"``, ``"newest"`` or ``"between"``.
        python: such as ``"3.12"``.
        torch: a requirement's version, such as ``"2.11.*"``.
    """

    name: str
    python: str
    torch: str

    def __str__(self) -> str:
        return f"Python {self.python}, torch {self.torch}"


def supported_torch() -> tuple[str, str]:
    """The oldest and the newest minor version that are tested; users may have a newer one."""
    text = (ROOT / "src" / "ebbtide" / "version.py").read_text()
    found = re.search(r'^TESTED_TORCH = \("(\S+)", "(\S+)"\)$', text, re.MULTILINE)
    assert found is not None, "version.py has TESTED_TORCH"
    return found[1], found[2]


def supported_pythons() -> list[str]:
    text = (ROOT / "pyproject.toml").read_text()
    return re.findall(r"Programming Language :: Python :: (3\.\d+)", text)


def pinned_torch() -> str:
    found = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def find_python(version: str) -> str | None:
    """The path of an interpreter, on PATH or among those that pyenv has built."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}")]
    candidates += [str(each / "bin/python") for each in sorted(pyenv.glob(f"{version}.*"))]
    test = f"import sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    for candidate in candidates:
        # A command that pyenv puts on PATH can exist and fail.
        if (
            candidate
            and not subprocess.run([candidate, "-c", test], capture_output=True).returncode
        ):
            return candidate
    return None


def rows(pythons: list[str]) -> Iterator[Row]:
    """What to test with the interpreters that were found, lowest version first."""
    oldest, newest = supported_torch()
    yield Row("oldest", pythons[0], f"{oldest}.*")
    tested = f"{sys.version_info[0]}.{sys.version_info[1]}"  # by `make test`
    for python in pythons[1:-1]:
        if python != tested:
            yield Row("between", python, pinned_torch())
    yield Row("newest", pythons[-1], f"{newest}.*")


def build(row: Row, interpreter: str) -> Path:
    """Install torch and what the tests need; return the environment's Python."""
    folder = ENVIRONMENTS / f"python{row.python}-torch{row.torch.rstrip('.*')}"
    python, done = folder / "bin/python", folder / "done"
    if done.exists():
        return python
    free_bytes = shutil.disk_usage(ROOT).free
    if free_bytes < LEAST_FREE_BYTES:
        raise RuntimeError(f"only {free_bytes >> 20} MiB are free on the disk, 4 GiB are needed")
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([interpreter, "-m", "venv", folder], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _quietly([*pip, "--no-deps", "--no-cache-dir", f"torch=={row.torch}"])
    _quietly([*pip, *_requirements_of_torch(python), *_requirements_of_ebbtide(), *TOOLS])
    if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode:
        (libraries,) = folder.glob("lib/python*/site-packages/torch/lib")
        made = add_stubs(libraries)
        print(f"{len(made)} CUDA libraries are stubs")
        subprocess.run([python, "-c", "import torch"], check=True)
    done.touch()
    return python


def _requirements_of_torch(python: Path) -> list[str]:
    """What torch needs on a CPU: everything but CUDA and Triton."""
    code = "from importlib.metadata import requires; print('\\n'.join(requires('torch')))"
    lines = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    return [
        line
        for line in lines.splitlines()
        if not re.match(r"cuda|nvidia|triton|pytorch-triton", line) and "extra ==" not in line
    ]


def _requirements_of_ebbtide() -> list[str]:
    found = re.search(r"^dependencies = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert found is not None
    return [each for each in re.findall(r'"([^"]+)"', found[1]) if not each.startswith("torch")]


def _quietly(command: list[str]) -> None:
    """Run pip. It complains about CUDA packages that are left out, so it is heard if it fails.

    Constraints in pip's configuration are left out, too: a machine may hold torch to a version.
    """
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PIP_CONSTRAINT": os.devnull},
    )
    if done.returncode:
        raise RuntimeError(f"pip failed:\n{done.stdout[-3000:]}")


def test_row(row: Row, arguments: Sequence[str]) -> str:
    """Build a row's environment and run pytest in it. Returns what to print."""
    interpreter = find_python(row.python)
    assert interpreter is not None
    begin_s = time.monotonic()
    try:
        python = build(row, interpreter)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        return f"FAILED to install: {error}"
    built_s = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "EBBTIDE_SIMULATION_SEEDS": "100"}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--numprocesses", "2", "--dist", "loadfile"]
    status = subprocess.run([*command, *arguments], cwd=ROOT, env=environment).returncode
    seconds = f"{built_s - begin_s:.0f} s to install, {time.monotonic() - built_s:.0f} s to test"
    return f"{'FAILED' if status else 'passed'} ({seconds})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=["oldest", "between", "newest"])
    parser.add_argument("--quick", action="store_true", help="run only a part of the core's tests")
    parser.add_argument("--remove", action="store_true", help="remove each environment after use")
    parser.add_argument("tests", nargs="*", help="arguments for pytest instead of the core's tests")
    arguments = parser.parse_args()
    found = [python for python in supported_pythons() if find_python(python)]
    if not found:
        raise SystemExit(f"no interpreter of {', '.join(supported_pythons())} was found")
    results = {}
    for row in rows(found):
        if arguments.only and row.name not in arguments.only:
            continue
        print(f"\n== {row} ==", flush=True)
        tests = arguments.tests or (QUICK if arguments.quick else CORE)
        results[row] = test_row(row, tests)
        if arguments.remove:
            shutil.rmtree(ENVIRONMENTS, ignore_errors=True)
    print()
    for row, result in results.items():
        print(f"{row}: {result}")
    for python in supported_pythons():
        if python not in found:
            print(f"Python {python}: not tested, because this machine does not have it")
    if any(not result.startswith("passed") for result in results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
