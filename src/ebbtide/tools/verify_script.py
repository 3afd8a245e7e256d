"""Verifies what `ebbtide verify` names. Each run of a training script is a process of its own.

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
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, final

import torch
from torch import nn
from torch.optim import optimizer as optimizers

from ebbtide.devices.device import AbstractDevice
from ebbtide.errors import PolicyError
from ebbtide.policy import WeightPolicy
from ebbtide.runtime.engine import devices_made_by, make_device
from ebbtide.runtime.torch_internals import tree_map_only
from ebbtide.tools.found_models import RunOptions
from ebbtide.tools.models import find_function, read_task
from ebbtide.tools.run import MainScript, RunSession
from ebbtide.tools.verify import (
    Outcome,
    Provocation,
    VerifyReport,
    choose_order,
    copy_of,
    describe_model,
    deterministic_kernels,
    layers_of,
    random_states,
    seed_all,
    verify,
    verify_runs,
)


def verify_script(
    script: MainScript, options: RunOptions, steps: int, seeds: range
) -> VerifyReport:
    """Verify a script.

    Args:
        script: the script.
        options: how models are offloaded.
        steps: each run ends after so many steps of optimizers.
        seeds: the seeds of the provocations.
    """

    def run(offloaded: bool, provocation: Provocation | None, deterministic: bool) -> Outcome:
        seed = None if provocation is None else provocation.seed
        given = options if offloaded else None
        found = _run_in_child(script, steps, given, seed, deterministic)
        return replace(found, what=f"{script.name}: {found.what}")

    return verify_runs(run, seeds, steps=steps)


def _run_in_child(script: MainScript, steps: int, *others: Any) -> Outcome:
    """Run a script in a process of its own, see `_run_here`.

    Raises:
        PolicyError: it ended early, or offloads by itself.
    """
    with tempfile.TemporaryDirectory(prefix="ebbtide-verify-") as directory:
        asked, outcome = Path(directory) / "request", Path(directory) / "outcome"
        asked.write_bytes(pickle.dumps((script, steps, *others)))
        # Not with -m: the script becomes __main__, and classes of that module cannot be written.
        code = f"from {__name__} import main; main({str(asked)!r}, {str(outcome)!r})"
        command = [sys.executable, "-c", code]
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if outcome.exists():
            found: Outcome = torch.load(outcome, weights_only=False)
            return found
    last = (ended.stderr.strip().splitlines() or ["it printed no error"])[-1]
    ending = f"exit code {ended.returncode}"
    if ended.returncode < 0:
        ending = f"signal {-ended.returncode}"
    raise PolicyError(
        f"{script.name} cannot be verified: a run of it ended before {steps} steps "
        f"of an optimizer were compared ({ending}): {last}"
    )


def verify_function(
    address: str,
    device: str | None,
    options: RunOptions,
    steps: int,
    seeds: range,
) -> VerifyReport:
    """Verify the training step that a user's function returns.

    Args:
        address: the function, as ``module:function``.
        device: where it trains; None: where the function has put it.
        options: how the model is offloaded.
        steps: training steps in each run.
        seeds: the seeds of the provocations.
    """
    model, batch, loss = read_task(address, find_function(address)())
    if device is not None:
        model = model.to(device)
        batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)
    offload = options.arguments(model, frugal=False)
    if options.weights:
        offload["weights"] = WeightPolicy(min_bytes=1)
    return verify(
        model, batch, loss, steps=steps, offload=offload, orders=len(seeds), seed=seeds.start
    )


# ---- The child ----


class _EnoughError(BaseException):
    """The optimizers have taken their steps. No `except Exception` of a script catches it."""


@final
class _Recorder:
    """Copies what the optimizers of a script step with, and ends it after some steps.

    A loss is a number of which the script calls `backward`. It stays on the device until the step:
    to copy it at once, the host would wait between forward and backward, and hide races.
    """

    def __init__(self, steps: int) -> None:
        self.outcome = Outcome()
        self._steps = steps
        self._step = 0
        self._losses: list[torch.Tensor] = []
        self._names: dict[int, str] = {}
        backward = torch.Tensor.backward

        def note_backward(loss: torch.Tensor, *args: Any, **others: Any) -> None:
            if loss.numel() == 1:
                self._losses.append(loss.detach().clone())
            backward(loss, *args, **others)  # type: ignore[no-untyped-call]

        torch.Tensor.backward = note_backward  # type: ignore[method-assign, assignment]
        optimizers.register_optimizer_step_pre_hook(self._before)
        optimizers.register_optimizer_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._step += 1
        if not self._names:
            self._find_names()
        losses, self._losses = self._losses, []
        for number, loss in enumerate(losses, start=1):
            self.outcome.values[f"step {self._step}: loss {number}"] = copy_of(loss)
        for name, parameter in reversed(self._parameters_of(optimizer)):
            whole_name = f"step {self._step}: gradient of {name}"
            self.outcome.values[whole_name] = copy_of(parameter.grad)

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._step < self._steps:
            return
        device = torch.device("cpu")
        for name, parameter in self._parameters_of(optimizer):
            self.outcome.values[f"last step: {name}"] = copy_of(parameter)
            device = parameter.device
        for model in _models():
            for name, buffer in model.named_buffers():
                self.outcome.values[f"last step: {name}"] = copy_of(buffer)
        self.outcome.values |= random_states(device)
        raise _EnoughError

    def _find_names(self) -> None:
        models = _models()
        for model in models:
            for name, parameter in model.named_parameters():
                self._names.setdefault(id(parameter), name)
        self.outcome.layers = layers_of(models)
        self.outcome.what = describe_model(models[0]) if models else "no module"

    def _parameters_of(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        return [
            (self._names.get(id(each), f"parameter {number} of an optimizer"), each)
            for number, each in enumerate(parameters)
        ]


def _models() -> list[nn.Module]:
    """Return the modules that are no parts of others, the largest first."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    parts = {id(part) for each in modules for part in each.modules() if part is not each}
    whole = [each for each in modules if id(each) not in parts]
    return sorted(whole, key=lambda each: -sum(p.numel() for p in each.parameters()))


def _run_here(
    script: MainScript,
    steps: int,
    options: RunOptions | None,
    seed: int | None,
    deterministic: bool,
) -> Outcome:
    """Run a script in this process until its optimizers have taken their steps.

    Args:
        script: the script.
        steps: the run ends after so many steps of optimizers.
        options: how models are offloaded; None: not at all.
        seed: of the provocation; None: nothing is provoked.
        deterministic: whether torch takes deterministic kernels.

    Raises:
        BaseException: whatever ends the script before.
    """
    outcome = _Recorder(steps).outcome
    provocation = None if seed is None else Provocation.draw(seed)
    planned = options is not None and options.is_planned

    def make(torch_device: torch.device) -> AbstractDevice:
        outcome.order = choose_order(torch_device, provocation)
        device = make_device(torch_device)
        return device if provocation is None else provocation.wrap(device, is_planned=planned)

    with contextlib.ExitStack() as stack:
        stack.enter_context(deterministic_kernels(deterministic))
        engines = stack.enter_context(devices_made_by(make))
        if options is not None:
            RunSession(script, options, quiet=True).begin()
        seed_all()
        with contextlib.suppress(_EnoughError):
            script.run()
            sys.exit("the script ended")
    if options is None and engines:
        sys.exit(
            "it offloads by itself, so it cannot be run plainly; leave that out of it, or verify "
            "its model in Python: ebbtide.verify(model, batch)"
        )
    for engine in engines:
        outcome.note_moved(engine.stats)
    return outcome


def main(request: str, outcome: str) -> NoReturn:
    """Run what a file asks for, and write what came of it; called in a child."""
    found = _run_here(*pickle.loads(Path(request).read_bytes()))
    torch.save(found, f"{outcome}.part")
    os.replace(f"{outcome}.part", outcome)
    sys.stdout.flush()
    os._exit(0)  # what the script would do at its end is none of the verification's business
