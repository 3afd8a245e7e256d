"""Huge pages are the user's choice; with them, an offload has the C library reuse blocks."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

from ebbtide.stores.measured_memory import VARIABLE, decides_when_to_return

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux")

LOOK = """
import os
from ebbtide.stores.measured_memory import describe_pages, has_huge_pages
print(has_huge_pages(), os.environ.get("THP_MEM_ALLOC_ENABLE"), describe_pages(), sep="|")
"""


def look(before: str, value: str | None) -> list[str]:
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": value or ""}
    if value is None:
        del environment["THP_MEM_ALLOC_ENABLE"]
    command = [sys.executable, "-c", before + LOOK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip().split("|")


@LINUX
def test_import_leaves_the_allocator_alone() -> None:
    has, variable, words = look("import torch, ebbtide", None)
    assert (has, variable) == ("False", "None")
    assert "With THP_MEM_ALLOC_ENABLE=1 set before Python starts" in words


@LINUX
def test_a_users_choice_is_told() -> None:
    has, variable, words = look("import torch, ebbtide", "1")
    assert (has, variable) == ("True", "1")
    assert "in huge pages" in words


@LINUX
def test_a_choice_that_came_too_late_is_told() -> None:
    late = "import os, torch; torch.ones(3); os.environ['THP_MEM_ALLOC_ENABLE'] = '1'"
    has, _, words = look(late, None)
    assert has == "False"
    assert "was set after torch had allocated memory" in words


FAULTS = """
import resource, torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(6)]
model = nn.Sequential(*layers)
images = torch.randn(8, 16, 96, 96)
def faults():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt
def step():
    model(images).square().mean().backward()
    model.zero_grad()
for _ in range(3):
    step()
before = faults()
for _ in range(5):
    step()
print((faults() - before) // 5)
"""


def count_faults(before: str, variables: dict[str, str]) -> int:
    """Page faults in a plain step of a small convolutional net, whose tensors have 4.5 MiB each."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [sys.executable, "-c", before + FAULTS]
    done = subprocess.run(
        command, env=environment | variables, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


OFFLOAD = """
import torch, ebbtide
from torch import nn
handle = ebbtide.offload(nn.Linear(2, 2))
"""


@LINUX
@pytest.mark.skipif(not decides_when_to_return(), reason="another allocator, or the user decides")
def test_with_huge_pages_an_offload_has_blocks_reused() -> None:
    """With huge pages alone there are 35,000 faults, with small pages 7,000, and so about 400."""
    assert count_faults(OFFLOAD, {VARIABLE: "1"}) < 2000


@LINUX
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({VARIABLE: "1"}, 3),
        ({VARIABLE: "1", "MALLOC_TRIM_THRESHOLD_": "100000"}, 0),
        ({}, 0),
    ],
)
def test_only_what_nobody_has_set_is_set(variables: dict[str, str], expected: int) -> None:
    code = """
import ebbtide.stores.measured_memory as pages
pages.decides_when_to_return()
called = []
class Library:
    def __getattr__(self, name):
        called.append(name)
        return lambda *_: 1
pages.ctypes = type("C", (), {"CDLL": lambda _: Library()})
pages.reuse_blocks()
print(called)
"""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count("mallopt") == expected


BLOCKS = """
import psutil, torch
from ebbtide.stores.measured_memory import return_freed_memory
from ebbtide.stores.measured_memory import large_blocks, reuse_blocks
reuse_blocks()
process, found = psutil.Process(), []
def resident():
    return process.memory_info().rss / 2**20
def grown_and_left():
    before = resident()
    tensors = [torch.ones(8 * 2**18) for _ in range(6)]
    grown = resident() - before
    del tensors
    return round(grown), round(resident() - before)
torch.ones(8 * 2**18)
holes = [torch.empty(8 * 2**18) for _ in range(64)]  # what was freed before is reused first
for mapped in (True, True, False):
    large_blocks.map(mapped)
    return_freed_memory()  # the heap has no end any more that blocks could come from,
    small = [bytes(1000) for _ in range(3000)]  # and grows by what small blocks need
    found.append(grown_and_left())
print(found)
"""


@LINUX
@pytest.mark.skipif(not decides_when_to_return(), reason="another allocator, or the user decides")
@pytest.mark.parametrize("variables", [{}, {VARIABLE: "1"}], ids=["small pages", "huge pages"])
def test_blocks_of_their_own_are_returned_when_they_are_freed(variables: dict[str, str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [sys.executable, "-c", BLOCKS]
    done = subprocess.run(
        command, env=environment | variables, capture_output=True, text=True, check=True
    )
    *mapped, (_, left_of_reused) = ast.literal_eval(done.stdout)
    for grown, left in mapped:
        assert grown > 40 and left < 8
    assert left_of_reused > 32


@LINUX
@pytest.mark.skipif(not decides_when_to_return(), reason="another allocator, or the user decides")
def test_the_heap_grows_by_much_again_once_blocks_are_reused() -> None:
    code = """
import ebbtide.stores.measured_memory as pages
pages.decides_when_to_return(), pages.has_huge_pages()
called = []
library = type("L", (), {"mallopt": lambda _, setting, value: called.append((setting, value))})()
pages.ctypes = type("C", (), {"CDLL": lambda _: library})
for mapped in (True, False):
    pages.large_blocks.map(mapped)
print(called)
"""
    environment = os.environ | {VARIABLE: "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    mib = 2**20
    threshold, top_pad = -3, -2  # the numbers of mallopt(3)
    mapped = [(threshold, mib), (top_pad, mib // 8)]
    assert ast.literal_eval(done.stdout) == [*mapped, (threshold, 32 * mib), (top_pad, 64 * mib)]


@LINUX
def test_blocks_are_left_alone_where_the_user_decides() -> None:
    code = """
from ebbtide.stores.measured_memory import large_blocks
large_blocks.map(True)
print(large_blocks.are_mapped)
"""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
