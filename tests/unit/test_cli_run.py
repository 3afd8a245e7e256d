"""`ebbtide run` in processes of its own: a script runs as it does under Python alone."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ebbtide
from commands import call
from ebbtide.observe.run_record import load_records

TRAIN = """
import hashlib, sys
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

model = nn.Sequential(*[Block() for _ in range(6)])
optimizer = torch.optim.Adam(model.parameters())

def hash_weights():
    tensors = [p.detach().numpy().tobytes() for p in model.parameters()]
    return hashlib.sha256(b"".join(tensors)).hexdigest()

def train(steps, rows=2**16):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(rows, 16)).square().mean()
        loss.backward()
        optimizer.step()
        print(loss.item(), flush=True)
    print(hash_weights())
"""


def environment(**more: str) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name != "RANK"}
    package = str(Path(ebbtide.__file__).parents[1])  # scripts run in another directory
    return {**found, "OMP_NUM_THREADS": "1", "PYTHONPATH": package, **more}


def run(
    *arguments: str, at: Path, watched: bool = True, before: tuple[str, ...] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a script by `ebbtide run`, or without it."""
    ours = ("-m", "ebbtide", "run") if watched else ()
    return subprocess.run(
        [sys.executable, *before, *ours, *arguments],
        cwd=at, env=environment(**env), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def script(at: Path, text: str, name: str = "script.py") -> str:
    (at / name).write_text(text)
    return name


def test_losses_and_weights_are_the_same_with_less_memory(tmp_path: Path) -> None:
    peak = "lines = open('/proc/self/status').read().splitlines()\n"
    peak += "print(*[line for line in lines if 'VmHWM' in line], file=sys.stderr)\n"
    name = script(tmp_path, TRAIN + "train(int(sys.argv[1]), 2**17)\n" + peak)
    plain = run(name, "3", at=tmp_path, watched=False)
    found = run("--json", "figures.json", name, "3", at=tmp_path)
    assert found.returncode == plain.returncode == 0, found.stderr
    assert found.stdout == plain.stdout and len(plain.stdout.splitlines()) == 4
    before, *_ = plain.stderr.splitlines()
    after, *lines = found.stderr.splitlines()
    peaks = [int(line.split()[1]) * 1024 for line in (before, after)]
    assert lines[0] == "ebbtide run: 1 model trained" and lines[-1].split() == ["steps", "3"]
    assert max(map(len, lines)) <= 80
    figures = json.loads((tmp_path / "figures.json").read_text())
    (model,) = figures["models"]
    assert model["model"] == "Sequential" and model["steps"] == 3 and len(model["layers"]) == 6
    # Each block saves its input (8 MiB) and the output of tanh (32 MiB). Two blocks, and what is in
    # flight, may be there at a time.
    assert model["last_step"]["offloaded_bytes"] == 6 * 40 * 2**20
    assert peaks[1] < peaks[0] - 6 * 40 * 2**20 + (2 * 40 + 64) * 2**20
    (record,) = load_records(tmp_path / "figures.json")
    assert record.title == "Sequential" and record.stats is not None
    assert dataclasses.asdict(record.stats) == model["last_step"]
    assert [layer.offloaded_bytes for layer in record.layers] == 6 * [40 * 2**20]


def test_a_budget_is_kept_and_the_plan_is_reported(tmp_path: Path) -> None:
    name = script(tmp_path, TRAIN + "train(8, 2**12)\n")  # at most 7 of them measure
    plain = run(name, at=tmp_path, watched=False)
    found = run("--budget", "90%", "--json", "figures.json", name, at=tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout == plain.stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    (model,) = figures["models"]
    assert 0 < figures["peak_bytes"] < figures["budget_bytes"]
    # Linux counts resident memory to some pages for each processor.
    assert model["plan"]["measured"]["peak_bytes"] <= figures["peak_bytes"] + 2**20
    assert "there is room" in model["plan"]["table"]
    assert "OVER" not in found.stderr and "nothing moves" in found.stderr


@pytest.mark.slow
def test_a_budget_that_nothing_fits_into_ends_the_script(tmp_path: Path) -> None:
    name = script(tmp_path, TRAIN + "import atexit; atexit.register(print, 'left')\ntrain(2)\n")
    found = run("--budget", "50MiB", name, at=tmp_path)
    assert found.returncode == 78
    assert found.stdout.splitlines()[1:] == ["left"]  # after the loss of the recorded step
    assert "BudgetError: budget=50.0 MiB is too small" in found.stderr
    assert "a smaller batch, or --weights" in " ".join(found.stderr.split())
    swallowed = TRAIN + "try:\n    train(2)\nexcept ValueError:\n    print('went on')\n"
    found = run("--budget", "50MiB", "--quiet", script(tmp_path, swallowed), at=tmp_path)
    assert (found.returncode, found.stdout.splitlines()[1:]) == (0, ["went on"])


PLACES = """
import multiprocessing, os, sys
import helper

def look():
    return [__name__, __file__, sys.argv, sys.path[0], __package__, os.path.basename(os.getcwd())]

def square(number):
    return number * number

if __name__ == "__main__":
    print(look(), type(__loader__).__name__, __spec__ and __spec__.name, open("data.txt").read())
    print(sys.modules["__main__"].look is look)
    if not __spec__ or __spec__.name != "__main__":  # of a directory, a child knows no __main__
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.apply(square, (7,)), pool.apply(look))
    sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["sub/script.py"], ["-m", "sub.script"], ["sub"]])
def test_a_script_sees_what_it_sees_under_python(tmp_path: Path, arguments: list[str]) -> None:
    folder = tmp_path / "sub"
    folder.mkdir()
    for name in ("script.py", "__main__.py"):
        script(folder, PLACES, name)
    for place in (folder, tmp_path):
        script(place, "", "helper.py")
    (tmp_path / "data.txt").write_text("data")
    script_arguments = ["--budget", "1", "--", "-m", "--help"]
    plain = run(*arguments, *script_arguments, at=tmp_path, watched=False)
    found = run(*arguments, *script_arguments, at=tmp_path)
    assert plain.returncode == found.returncode == 3, found.stderr
    assert found.stdout == plain.stdout and ("49" in plain.stdout) == (arguments != ["sub"])
    assert "no model was found" in found.stderr


@pytest.mark.slow
def test_an_error_looks_as_it_does_under_python(tmp_path: Path) -> None:
    text = "import torch\nmodel = torch.nn.Linear(2, 2)\ndef f():\n    model(torch.ones(3))\nf()\n"
    name = script(tmp_path, text)
    plain = run(name, at=tmp_path, watched=False)
    found = run("--quiet", name, at=tmp_path)
    assert plain.returncode == found.returncode == 1
    assert plain.stderr.startswith(found.stderr[:200])
    frames = [line for line in plain.stderr.splitlines() if line.startswith("  File")]
    ours = [line for line in found.stderr.splitlines() if line.startswith("  File")]
    assert [line for line in ours if "ebbtide" not in line][:2] == frames[:2]
    assert not [line for line in ours if "running" in line or "cli" in line]
    broken = script(tmp_path, "x = = 1\n", "broken.py")
    plain = run(broken, at=tmp_path, watched=False)
    found = run("--quiet", broken, at=tmp_path)
    assert (found.returncode, found.stderr) == (plain.returncode, plain.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_it_as_it_ends_python(tmp_path: Path, name: str) -> None:
    (tmp_path / "files").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "ebbtide", "run", script(tmp_path, TRAIN + "train(10**6)\n")],
        cwd=tmp_path, env=environment(TMPDIR=str(tmp_path / "files")), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline()
    process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=100)
    assert process.returncode == -getattr(signal, name)
    assert not [file for file in (tmp_path / "files").iterdir() if "inductor" not in file.name]
    if name == "SIGINT":
        assert "KeyboardInterrupt\n" in err and "1 model trained" in err
        assert "running" not in err and "typer" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.py"], "there is no file missing.py"),
        (["--budget", "24"], "write 24GiB"),
        (["--budget", "much"], "budget='much' cannot be read"),
        (["--budget", "1GiB", "--mode", "recompute"], "a budget decides itself what leaves"),
        (["--budget", "1GiB", "--plan", __file__], "budget makes a plan and plan follows one"),
        (["--plan", __file__], f"--plan {__file__}: this is not the JSON"),
        (["--plan", sys.executable], f"--plan {sys.executable}: this is not the JSON"),
        (["--plan", "missing.json"], "missing.json"),
        (["--store", "attic"], "--store='attic'"),
        (["--host-budget", "-1"], "--host-budget='-1' cannot be read"),
        (["--mode", "forget"], '--mode must be one of "offload"'),
        (["--keep-last", "-1"], "--keep-last must be a whole number of layers"),
        (["--min-bytes", "big"], "--min-bytes='big' cannot be read"),
        (["--json", "no/such/file"], "there is no such directory"),
        (["--report", "no/such/file"], "--report no/such/file: there is no such directory"),
    ],
)
def test_wrong_uses_are_named(arguments: list[str], words: str) -> None:
    more = [] if "missing.py" in arguments else [__file__]
    found = call("run", *arguments, *more)
    assert found.exit_code == 2 and words in found.output, found.output


ONE_STEP = """
import torch
from torch import nn

model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
model(torch.ones(2, 8)).sum().backward()
print("trained")
"""


def test_json_on_standard_output_follows_what_the_script_prints(tmp_path: Path) -> None:
    name = script(tmp_path, ONE_STEP + "raise SystemExit(5)\n")
    found = run("--json", "-", "--quiet", name, at=tmp_path)
    assert found.returncode == 5, found.stderr
    printed, brace, figures = found.stdout.partition("{\n")
    assert printed == "trained\n"
    assert json.loads(brace + figures)["format"] == "ebbtide-run"


@pytest.mark.parametrize("options", [("--store", "disk:no/such"), ("--plan", "none.json")])
def test_a_wrong_setting_ends_with_code_2_and_one_line_also_if_quiet(
    options: tuple[str, str],
) -> None:
    found = call("run", "--quiet", *options, __file__)
    assert found.exit_code == 2 and found.stdout == ""
    (line,) = found.stderr.splitlines()
    assert options[0] in line and options[1].removeprefix("disk:") in line


def test_so_does_a_setting_that_does_not_fit_the_model_of_the_script(tmp_path: Path) -> None:
    found = run("--quiet", "--num-layers", "9", script(tmp_path, ONE_STEP), at=tmp_path)
    assert found.returncode == 2 and found.stdout == ""
    (line,) = found.stderr.splitlines()
    assert "--num-layers" in line and "9" in line
