"""The tests of a framework's ways of use need its package, so only `make clients` collects them.

`make clients-science` does so in an environment that has the packages of weather and physics.
"""

import os
from pathlib import Path

import pytest
import torch

from published import STARTUP
from run_program import declare_torchvision_operators

CHOSEN = os.environ.get("EBBTIDE_CLIENTS")

collect_ignore = {
    "all": [],
    "science": ["test_ways_language.py", "test_ways_science.py"],
}.get(
    str(CHOSEN),
    [
        "test_published_scripts.py",
        "test_ways_language.py",
        "test_ways_science.py",
        "test_ways_weather.py",
    ],
)

if CHOSEN in ("all", "science"):
    os.environ["HF_HUB_OFFLINE"] = "1"
    if torch.version.cuda is None:
        declare_torchvision_operators()
        # For the processes that tests start, `sitecustomize` does the same.
        inherited = [str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(inherited)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Other projects' frameworks take long to import, and longer to train with."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)
