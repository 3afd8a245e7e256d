"""Run one client program in this process, with ebbtide or without, and write down what came of it.

A program adds two lines to an ordinary training script: ``import ebbtide`` and ``handle =
ebbtide.offload(...)``. Without ebbtide it runs less those two lines. It leaves ``model`` and
``losses`` at its top level.

A program whose framework recomputes layers itself assigns ``OWN_CHECKPOINTS = False``;
``--own-checkpoints`` makes that True.

Run: python tests/clients/run_program.py PROGRAM plain|offloaded DIRECTORY [--own-checkpoints]
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ebbtide.stores import ProcessMemory

READY = "_note_that_the_model_is_ready"
OWN_CHECKPOINTS = "OWN_CHECKPOINTS"


def added_lines(program: ast.Module) -> tuple[ast.stmt, ast.stmt]:
    """Return the two statements of a program that ebbtide needs.

    Raises:
        ValueError: the program mentions ebbtide elsewhere, too, or not in these two ways.
    """
    added = [statement for statement in program.body if _mentions_ebbtide(statement)]
    match added:
        case [
            ast.Import(names=[ast.alias(name="ebbtide")]) as first,
            ast.Assign(targets=[ast.Name(id="handle")]) as second,
        ]:
            return first, second
    lines = ", ".join(f"line {statement.lineno}" for statement in added)
    raise ValueError(
        f"a client adds `import ebbtide` and `handle = ebbtide.offload(...)` at its top level, and "
        f"nothing else; this one mentions ebbtide or the handle in {lines or 'no line'}"
    )


def _mentions_ebbtide(statement: ast.stmt) -> bool:
    nodes = list(ast.walk(statement))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return bool(names & {"ebbtide", "handle"})


def prepare(source: str, *, offloaded: bool, own_checkpoints: bool = False) -> ast.Module:
    """Return a program with or without its two lines, and with a note where the second one stood.

    Raises:
        ValueError: the program does more with ebbtide than those two lines, or it has no setting
            for its own checkpoints.
    """
    program = ast.parse(source)
    if own_checkpoints:
        _turn_on_checkpoints(program)
    first, second = added_lines(program)
    ready = ast.copy_location(ast.parse(f"{READY}()").body[0], second)
    body: list[ast.stmt] = []
    for statement in program.body:
        if offloaded or statement not in (first, second):
            body.append(statement)
        if statement is second:
            body.append(ready)
    program.body = body
    return ast.fix_missing_locations(program)


def _turn_on_checkpoints(program: ast.Module) -> None:
    for statement in program.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)]) if name == OWN_CHECKPOINTS:
                statement.value = ast.copy_location(ast.Constant(True), statement.value)
                return
    raise ValueError(f"this program has no setting {OWN_CHECKPOINTS}")


class Measurement:
    """Memory from the moment when the model is ready."""

    def __init__(self) -> None:
        self._memory = ProcessMemory()
        self.idle_bytes = 0

    def begin(self) -> None:
        self._memory.reset_peak()
        self.idle_bytes = self._memory.now_bytes()

    def finish(self) -> dict[str, int]:
        return {"idle_bytes": self.idle_bytes, "peak_bytes": self._memory.peak_bytes()}


def weights_digest(model: nn.Module) -> str:
    """Return the SHA-256 of this process's share of a model's parameters and buffers."""
    hashed = hashlib.sha256()
    for name, tensor in _weights_of(model):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        plain = local.detach().cpu().resolve_conj().resolve_neg().contiguous()
        name = name.replace("_checkpoint_wrapped_module.", "")  # torch's checkpoint_wrapper
        hashed.update(f"{plain.dtype} {tuple(plain.shape)} {name}".encode())
        hashed.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def _weights_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def declare_torchvision_operators() -> None:
    """Let torchvision be imported where its compiled operators cannot be loaded.

    The package index has torchvision for CUDA only. Beside a torch for the CPU its library does not
    load, and `import torchvision` fails because it describes two operators that are not there.
    No client here calls them; they are for object detection.
    """
    for name in ("nms", "qnms"):
        if hasattr(torch.ops.torchvision, name):  # they were declared when the process began
            continue
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{name}", schema)


def main() -> None:
    """Run the program and write ``MODE_RANK.json`` to the directory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("program", type=Path)
    parser.add_argument("mode", choices=["plain", "offloaded"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--own-checkpoints", action="store_true")
    arguments = parser.parse_args()
    if torch.version.cuda is None:
        declare_torchvision_operators()
    code = prepare(
        arguments.program.read_text(),
        offloaded=arguments.mode == "offloaded",
        own_checkpoints=arguments.own_checkpoints,
    )
    sys.argv = [str(arguments.program)]
    printed = _record_warnings()
    measurement = Measurement()
    names: dict[str, Any] = {"__name__": "__main__", READY: measurement.begin}
    exec(compile(code, str(arguments.program), "exec"), names)
    outcome: dict[str, Any] = measurement.finish()
    outcome["losses"] = [float(loss).hex() for loss in names["losses"]]
    outcome["weights"] = weights_digest(names["model"])
    outcome["printed"] = printed
    if "handle" in names:
        outcome["stats"] = asdict(names["handle"].stats)
        outcome["layers"] = list(names["handle"].layers)
        names["handle"].detach()
    rank = os.environ.get("RANK", "0")
    (arguments.directory / f"{arguments.mode}_{rank}.json").write_text(json.dumps(outcome))


def _record_warnings() -> list[str]:
    """Return a list that receives what ebbtide warns of, beside its being printed."""
    printed: list[str] = []
    show = warnings.showwarning

    def record(message: Warning | str, *rest: Any, **named: Any) -> None:
        if "offload" in str(message):
            printed.append(str(message))
        show(message, *rest, **named)

    warnings.showwarning = record
    return printed


if __name__ == "__main__":
    main()
