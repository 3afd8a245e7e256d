"""The tests of a framework's ways of use need its package, so only `make clients` collects them."""

import os

import torch

from run_program import declare_torchvision_operators

RUN_ALL = os.environ.get("EBBTIDE_CLIENTS") == "all"

collect_ignore = [] if RUN_ALL else ["test_ways_language.py", "test_ways_science.py"]

if RUN_ALL:
    os.environ["HF_HUB_OFFLINE"] = "1"
    if torch.version.cuda is None:
        declare_torchvision_operators()
