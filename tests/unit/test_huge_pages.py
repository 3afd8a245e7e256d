"""`import ebbtide` has torch ask for huge pages, and leaves the environment as it was."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux")

LOOK = """
import os
from ebbtide.memory.huge_pages import describe_pages, has_huge_pages
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
def test_import_asks_for_them() -> None:
    has, variable, words = look("import torch, ebbtide", None)
    assert (has, variable) == ("True", "None")
    assert "in huge pages" in words


@LINUX
def test_a_users_choice_stays() -> None:
    has, variable, words = look("import torch, ebbtide", "0")
    assert (has, variable) == ("False", "0")
    assert "THP_MEM_ALLOC_ENABLE=0" in words


@LINUX
def test_a_late_import_says_that_it_was_late() -> None:
    has, variable, words = look("import torch; torch.ones(3); import ebbtide", None)
    assert (has, variable) == ("False", "None")
    assert "Import ebbtide before any tensor is made" in words


@LINUX
def test_a_default_device_does_not_matter() -> None:
    has, _, _ = look("import torch; torch.set_default_device('meta'); import ebbtide", None)
    assert has == "True"
