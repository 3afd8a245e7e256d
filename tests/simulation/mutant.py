"""Tries one mutated copy of the package, in a process that knew torch but not the package."""

import importlib
import sys
import traceback
import warnings
from contextlib import redirect_stderr, redirect_stdout

CAUGHT, MISSED, BROKEN = 1, 0, 3


def try_mutant(source: str, check: str, seeds: int, output: str) -> None:
    """Exit with what came of it.

    Args:
        source: the folder of the mutated package.
        check: the function that runs a seed, as ``module.name``.
        seeds: how many to try.
        output: a file for what is printed.
    """
    sys.path.insert(0, source)
    warnings.simplefilter("ignore")
    with open(output, "w") as file, redirect_stdout(file), redirect_stderr(file):
        try:
            code = _try(source, check, seeds)
        except BaseException:
            traceback.print_exc()
            code = BROKEN
    sys.exit(code)


def _try(source: str, check: str, seeds: int) -> int:
    import torch

    import ebbtide

    torch.set_num_threads(1)
    assert ebbtide.__file__.startswith(source), "the mutated copy must be what runs"
    module, _, name = check.partition(".")
    run = getattr(importlib.import_module(module), name)
    for seed in range(seeds):
        try:
            run(seed)
        except AssertionError as error:
            print("caught:", error)
            return CAUGHT
    return MISSED
