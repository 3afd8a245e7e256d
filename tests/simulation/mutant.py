"""Tries one mutated copy of the package, in a process that knew torch but not the package."""

import faulthandler
import importlib
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout

CAUGHT = "caught: "
"""Begins what a run prints that noticed the mutation."""


def try_mutant(source: str, check: str, seeds: Sequence[int], output: str, limit_s: float) -> None:
    """Try seeds until one notices the mutation, and write what came of it.

    Args:
        source: the folder of the mutated package.
        check: the function that runs a seed, as ``module.name``.
        seeds: those to try.
        output: a file for what is printed.
        limit_s: after it the process is stuck: it prints where, and ends.
    """
    sys.path.insert(0, source)
    warnings.simplefilter("ignore")
    with open(output, "w") as file, redirect_stdout(file), redirect_stderr(file):
        faulthandler.dump_traceback_later(limit_s, exit=True, file=file)
        try:
            _try(source, check, seeds)
        except BaseException:
            traceback.print_exc()
        faulthandler.cancel_dump_traceback_later()


def _try(source: str, check: str, seeds: Sequence[int]) -> None:
    import torch

    import ebbtide

    torch.set_num_threads(1)
    assert ebbtide.__file__.startswith(source), "the mutated copy must be what runs"
    module, _, name = check.partition(".")
    run = getattr(importlib.import_module(module), name)
    for seed in seeds:
        try:
            run(seed)
        except AssertionError as error:
            print(f"{CAUGHT}{error}")
            return
    print(f"not caught by {len(seeds)} seeds")
