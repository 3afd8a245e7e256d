"""Verifies a training script as it is: each of its runs is a process of its own.

A run begins with the same random numbers, and ends after a few steps of the script's optimizers.
What they step with, and what they leave, is written to a file that the parent process compares.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, final

import torch
from torch import nn
from torch.optim import optimizer as optimizers

from ebbtide.devices.provoked import Provocation
from ebbtide.errors import EbbtideError, PolicyError
from ebbtide.runtime.engine import Engine, devices_made_by
from ebbtide.tools.found_models import RunOptions
from ebbtide.tools.run import MainScript, RunRequest, RunSession
from ebbtide.verifying import (
    ProvokedDevices,
    Values,
    VerifiedSteps,
    choose_order,
    copy_of,
    deterministic_kernels,
    layers_of,
    random_states,
    seed_all,
)


@final
@dataclass(frozen=True, kw_only=True)
class ScriptRun:
    """One run of a script.

    Attributes:
        script: its file, or the name of a module.
        arguments: what follows it on the command line.
        is_module: whether it is a module.
        steps: the run ends after so many steps of optimizers.
        options: how models are offloaded; None: not at all.
        seed: of the provocation; None: nothing is provoked.
        deterministic: whether torch takes deterministic kernels.
    """

    script: str
    arguments: tuple[str, ...]
    is_module: bool
    steps: int
    options: RunOptions | None = None
    seed: int | None = None
    deterministic: bool = False


@final
@dataclass
class ScriptOutcome:
    """What a run of a script wrote for its parent."""

    values: Values = field(default_factory=dict)
    layers: dict[str, str] = field(default_factory=dict)
    operators: list[str] = field(default_factory=list)
    what: str = ""
    order: str = ""
    moved_bytes: int = 0
    refusal: str = ""


class ScriptFailedError(EbbtideError, RuntimeError):
    """A run of the script ended before its optimizers had taken their steps."""


@final
class VerifiedScript:
    """A script as the subject of a verification; see `ebbtide.verifying.Subject`.

    Args:
        run: the plain run.
        options: how models are offloaded in the others.
    """

    kinds = "gradients, parameters, buffers, random states"
    offloader = "ebbtide"
    can_repeat = False

    def __init__(self, run: ScriptRun, options: RunOptions) -> None:
        self.steps = run.steps
        self.layers: dict[str, str] = {}
        self.operators: list[str] = []
        self._plain = run
        self._options = options
        self._what = ""

    def describe(self) -> str:
        return f"{self._plain.script}: {self._what}"

    def can_go_on(self) -> bool:
        return True

    def run_plainly(self, *, deterministic: bool) -> Values:
        found = _run_in_child(replace(self._plain, deterministic=deterministic))
        self.layers, self.operators, self._what = found.layers, found.operators, found.what
        return found.values

    def run_offloaded(
        self, provocation: Provocation | None, *, deterministic: bool
    ) -> VerifiedSteps:
        seed = None if provocation is None else provocation.seed
        run = replace(self._plain, options=self._options, seed=seed, deterministic=deterministic)
        found = _run_in_child(run)
        return VerifiedSteps(found.values, found.order, found.moved_bytes)


def _run_in_child(run: ScriptRun) -> ScriptOutcome:
    """Run a script in a process of its own.

    Raises:
        PolicyError: it cannot be verified.
        ScriptFailedError: it ended early.
    """
    with tempfile.TemporaryDirectory(prefix="ebbtide-verify-") as directory:
        request, outcome = Path(directory) / "request", Path(directory) / "outcome"
        request.write_bytes(pickle.dumps(run))
        # Not with -m: the script becomes __main__, and classes of that module cannot be written.
        code = f"from {__name__} import main; main({str(request)!r}, {str(outcome)!r})"
        command = [sys.executable, "-c", code]
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if not outcome.exists():
            last = (ended.stderr.strip().splitlines() or ["it printed no error"])[-1]
            ending = f"exit code {ended.returncode}"
            if ended.returncode < 0:
                ending = f"signal {-ended.returncode}"
            raise ScriptFailedError(
                f"{run.script} took fewer than {run.steps} steps of an optimizer ({ending}): {last}"
            )
        found: ScriptOutcome = torch.load(outcome, weights_only=False)
        if found.refusal:
            raise PolicyError(found.refusal)
        return found


# ---- The child ----


class _EnoughError(BaseException):
    """The optimizers have taken their steps. No `except Exception` of a script catches it."""


@final
class _Recorder:
    """Copies what the optimizers of a script step with, and ends it after some steps."""

    def __init__(self, steps: int) -> None:
        self.values: Values = {}
        self.layers: dict[str, str] = {}
        self.device = torch.device("cpu")
        self.what = ""
        self._steps = steps
        self._step = 0
        self._names: dict[int, str] = {}

    def install(self) -> None:
        optimizers.register_optimizer_step_pre_hook(self._before)
        optimizers.register_optimizer_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._step += 1
        if not self._names:
            self._find_names()
        for number, parameter in reversed(list(enumerate(_parameters_of(optimizer)))):
            name = self._names.get(id(parameter), f"parameter {number} of an optimizer")
            self.values[f"step {self._step}: gradient of {name}"] = copy_of(parameter.grad)

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._step < self._steps:
            return
        for number, parameter in enumerate(_parameters_of(optimizer)):
            name = self._names.get(id(parameter), f"parameter {number} of an optimizer")
            self.values[f"last step: {name}"] = copy_of(parameter)
            self.device = parameter.device
        for model in _models():
            for name, buffer in model.named_buffers():
                self.values[f"last step: {name}"] = copy_of(buffer)
        self.values.update(random_states(self.device))
        raise _EnoughError

    def _find_names(self) -> None:
        models = _models()
        for model in models:
            for name, parameter in model.named_parameters():
                self._names.setdefault(id(parameter), name)
        self.layers = layers_of(models)
        number = sum(p.numel() for model in models[:1] for p in model.parameters())
        device = next((p.device.type for model in models for p in model.parameters()), "cpu")
        kinds = ", ".join(type(model).__name__ for model in models[:2])
        self.what = f"{kinds or 'no module'} of {number:,} parameters on {device}"


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _models() -> list[nn.Module]:
    """Return the modules that are no parts of others, the largest first."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    parts = {id(part) for each in modules for part in each.modules() if part is not each}
    whole = [each for each in modules if id(each) not in parts]
    return sorted(whole, key=lambda each: -sum(p.numel() for p in each.parameters()))


def _run_here(run: ScriptRun) -> ScriptOutcome:
    """Run a script in this process until its optimizers have taken their steps.

    Raises:
        BaseException: whatever ends the script before.
    """
    recorder = _Recorder(run.steps)
    recorder.install()
    outcome = ScriptOutcome()
    provocation = None if run.seed is None else Provocation.draw(run.seed, fails=False)
    planned = run.options is not None and run.options.is_planned
    devices = ProvokedDevices(provocation, is_planned=planned)

    def make(torch_device: torch.device) -> Any:
        outcome.order = choose_order(torch_device, provocation)
        return devices.make(torch_device)

    script = MainScript(run.script, run.arguments, is_module=run.is_module)
    with contextlib.ExitStack() as stack:
        if run.deterministic:
            outcome.operators = stack.enter_context(deterministic_kernels())
        engines: list[Engine] = stack.enter_context(devices_made_by(make))
        if run.options is not None:
            RunSession(RunRequest(script=script, options=run.options, quiet=True)).begin()
        seed_all()
        with contextlib.suppress(_EnoughError):
            script.run()
            raise ScriptFailedError("the script ended")
        if run.options is None and engines:
            outcome.refusal = (
                f"{run.script} offloads by itself, so it cannot be run plainly; leave that out of "
                f"it, or verify its model by a function: ebbtide verify module:function"
            )
    for engine in engines:
        stats = engine.stats
        outcome.moved_bytes += stats.offloaded_bytes + stats.rebuilt_bytes
        outcome.moved_bytes += stats.recomputed_bytes + stats.weight_reload_bytes
    outcome.values, outcome.layers = recorder.values, recorder.layers
    outcome.what = recorder.what
    return outcome


def main(request: str, outcome: str) -> NoReturn:
    """Run what a file asks for, and write what came of it; called in a child."""
    run: ScriptRun = pickle.loads(Path(request).read_bytes())
    found = _run_here(run)
    torch.save(found, f"{outcome}.part")
    os.replace(f"{outcome}.part", outcome)
    sys.stdout.flush()
    os._exit(0)  # what the script would do at its end is none of the verification's business
