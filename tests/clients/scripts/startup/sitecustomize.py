"""Lets an unedited script import torchvision where its compiled operators cannot be loaded."""

import sys
from pathlib import Path

import torch

if torch.version.cuda is None:
    sys.path.append(str(Path(__file__).parents[2]))
    from run_program import declare_torchvision_operators

    sys.path.pop()
    declare_torchvision_operators()
