"""Run a client without ebbtide and with it, each in processes of its own, and compare the two."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ebbtide
from catalog import Client

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
TIMEOUT_S = 240

# Below this share of the plain peak, memory counts as lower: two runs of one program differ by 2%.
LOWER = 0.95

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # sums in an order that does not depend on the machine
    "OMP_WAIT_POLICY": "passive",
    "CUDA_VISIBLE_DEVICES": "",  # the figure of these tests is RSS
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Outcome:
    """What one process of a client left.

    Attributes:
        losses: the losses as hexadecimal floats, which keep every bit.
        weights: SHA-256 of the weights after training.
        idle_bytes: RSS when the model was ready.
        peak_bytes: the largest RSS from then on.
        printed: what ebbtide warned of.
        stats: fields of `ebbtide.StepStats` of the last step; empty without ebbtide.
        layers: the modules that count as layers; empty without ebbtide.
    """

    losses: list[str]
    weights: str
    idle_bytes: int
    peak_bytes: int
    printed: list[str]
    stats: dict[str, Any]
    layers: list[str]

    @property
    def above_idle_bytes(self) -> int:
        return self.peak_bytes - self.idle_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that were not kept: offloaded, or rebuilt."""
        names = ("offloaded_bytes", "rebuilt_bytes")
        return sum(int(self.stats.get(name, 0)) for name in names)


class ClientError(Exception):
    """A client's process failed. The message ends with the last line that it wrote."""


def run(
    program: str, mode: str, ranks: int, directory: Path, *, own_checkpoints: bool = False
) -> list[Outcome]:
    """Run a program; returns one outcome for each of its processes.

    Args:
        program: its file in ``programs``.
        mode: ``"plain"`` or ``"offloaded"``.
        ranks: number of its processes.
        directory: where it runs and writes.
        own_checkpoints: whether its framework recomputes layers itself.

    Raises:
        ClientError: the program failed.
    """
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        # The launcher looks for a free port itself.
        launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = [*launch, str(HERE / "run_program.py"), str(PROGRAMS / program), mode, str(directory)]
    if own_checkpoints:
        command.append("--own-checkpoints")
    returncode, stderr = _finish(command, directory)
    if returncode != 0:
        raise ClientError(f"{program} fails {mode}: {_error_in(stderr)}\n\n{stderr}")
    files = [directory / f"{mode}_{rank}.json" for rank in range(ranks)]
    return [_read(file) for file in files]


def _finish(command: Sequence[str], directory: Path) -> tuple[int, str]:
    """Run a command; returns its exit code and what it wrote to stderr.

    Raises:
        ClientError: it did not end in time. It was killed, and so were the processes it launched.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": _search_path()},
        cwd=directory,
        start_new_session=True,
    )
    try:
        stderr = process.communicate(timeout=TIMEOUT_S)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stderr = process.communicate()[1]
        raise ClientError(f"{command} did not end within {TIMEOUT_S} s\n\n{stderr}") from None
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, stderr


def _search_path() -> str:
    """Return a PYTHONPATH by which a process in another directory finds this ebbtide, no other."""
    ours = str(Path(ebbtide.__file__).parents[1])
    return os.pathsep.join([ours, *filter(None, [os.environ.get("PYTHONPATH")])])


def _read(file: Path) -> Outcome:
    return Outcome(**({"stats": {}, "layers": []} | json.loads(file.read_text())))


def _error_in(stderr: str) -> str:
    """Return the last line of the first traceback that names a program of ours."""
    lines = stderr.splitlines()
    begin = next((at for at, line in enumerate(lines) if "Traceback" in line), 0)
    raised = [line for line in lines[begin + 1 :] if "Error" in line and "File" not in line]
    return raised[0] if raised else stderr[-300:]


@dataclass(frozen=True)
class Comparison:
    """A client without ebbtide and with it.

    Attributes:
        plain: one outcome for each process, without ebbtide.
        offloaded: the same with ebbtide; empty if the client fails.
        problems: in which ways the client does not train as it trains without ebbtide.
    """

    plain: list[Outcome]
    offloaded: list[Outcome]
    problems: list[str]


def compare(client: Client, directory: Path) -> Comparison:
    """Run a client without ebbtide and with it.

    Raises:
        ClientError: the client fails without ebbtide.
    """
    plain = run(client.program, "plain", client.ranks, directory)
    try:
        offloaded = run(client.program, "offloaded", client.ranks, directory)
    except ClientError as error:
        return Comparison(plain, [], [str(error)])
    return Comparison(plain, offloaded, problems(plain, offloaded))


def unexpected(client: Client, found: Sequence[str]) -> list[str]:
    """Return the problems that the catalog does not know, or that a known one is not there."""
    if client.stays:
        return [problem for problem in found if "no reason was printed" not in problem]
    if client.known is None:
        return list(found)
    if not found:
        return [f"{client.title} trains now: take its known failure out of the catalog"]
    known = re.compile(client.known.match)
    return [problem for problem in found if not known.search(problem)]


def problems(plain: Sequence[Outcome], offloaded: Sequence[Outcome]) -> list[str]:
    """Say in which ways a client does not train with ebbtide as it trains without."""
    found = []
    for rank, (before, after) in enumerate(zip(plain, offloaded, strict=True)):
        where = f"process {rank}: " if len(plain) > 1 else ""
        found += [where + problem for problem in _problems(before, after)]
    return found


def _problems(plain: Outcome, offloaded: Outcome) -> list[str]:
    found = []
    if not plain.losses:
        found.append("the program recorded no losses")
    if plain.losses != offloaded.losses:
        values = [[float.fromhex(x) for x in each.losses] for each in (plain, offloaded)]
        found.append(f"the losses differ: {values[0]} without ebbtide, {values[1]} with it")
    if plain.weights != offloaded.weights:
        found.append("the weights after training differ")
    if offloaded.printed:
        return found  # the reason was printed
    if offloaded.moved_bytes == 0:
        found.append("nothing was offloaded or rebuilt, and no reason was printed")
    if offloaded.above_idle_bytes > LOWER * plain.above_idle_bytes:
        sizes = [outcome.above_idle_bytes // 2**20 for outcome in (plain, offloaded)]
        found.append(
            f"memory is not lower: {sizes[0]} MiB above idle without ebbtide, {sizes[1]} MiB with "
            f"it, and no reason was printed"
        )
    return found
