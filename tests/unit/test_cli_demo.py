"""The demo: its figures, its report, and what it says when it cannot run."""

import dataclasses
import io
import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from ebbtide import StepStats, __version__
from ebbtide.cli.main import app
from ebbtide.demo import darcy_fno, worker
from ebbtide.demo import run as demo_module
from ebbtide.demo.comparison import build_table, compare, limits
from ebbtide.demo.config import DemoConfig, Mode
from ebbtide.demo.memory_timeline import Timeline
from ebbtide.demo.results import FinalResult, ModeResult, StepResult, first_difference
from ebbtide.demo.team import Team, WorkerError
from ebbtide.memory.measured_memory import ProcessMemory

GIB = 2**30
# 4 samples x 32 channels x 64 x 64 nodes x 4 B = 2 MiB: the smallest size that is offloaded.
TINY = ["--resolution", "64", "--batch-size", "4", "--steps", "3", "--warm-steps", "2"]


# The whole demo


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the demo printed, and where its results are."""
    pytest.importorskip("neuralop")
    out = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "ebbtide.cli.main", "demo", "--device", "cpu", *TINY]
    done = subprocess.run(
        [*command, "--out", out, "--data", out / "data"],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200", "OMP_WAIT_POLICY": "passive"},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, out


@pytest.fixture(scope="module")
def figures(run: tuple[str, Path]) -> dict:
    return json.loads((run[1] / "demo.json").read_text())


def test_table_fits_80_columns_even_on_a_wide_terminal(run: tuple[str, Path]) -> None:
    report = run[0].partition("FNO, Darcy")[2].partition("Figures:")[0]
    assert "Peak RSS" in report
    assert max(map(len, report.splitlines())) <= 80


def test_what_is_left_out_and_what_limits_it_is_said(run: tuple[str, Path]) -> None:
    for text in ("save_on_cpu is left out", "same bits", "Time: in each step", "Memory: saved"):
        assert text in run[0]


def test_figures_are_complete(figures: dict) -> None:
    assert set(figures["modes"]) == {"none", "ebbtide"}
    assert figures["configuration"]["resolution"] == 64
    assert figures["environment"]["torch"] == torch.__version__
    assert {"cpu", "cores", "python", "device", "torch_threads"} <= set(figures["environment"])
    for mode in figures["modes"].values():
        assert len(mode["steps"]) == 3
        assert mode["idle_bytes"] < mode["peak_bytes"]
        assert all(step["duration_s"] > 0 and step["peak_bytes"] > 0 for step in mode["steps"])


def test_ebbtide_offloads_and_changes_no_bit(figures: dict) -> None:
    plain, offloaded = figures["modes"]["none"], figures["modes"]["ebbtide"]
    assert offloaded["compared"] is True
    assert offloaded["first_difference"] is None
    # About 27 unique tensors of 2 MiB, less 12 that GELUs give again.
    assert 25 * 2**20 < offloaded["steps"][1]["stats"]["offloaded_bytes"] < 40 * 2**20
    for one, other in zip(plain["steps"], offloaded["steps"], strict=True):
        assert one["loss"] == other["loss"]
        assert one["gradients_sha256"] == other["gradients_sha256"]
    # Steps differ from each other, so equal hashes mean something.
    assert plain["steps"][0]["gradients_sha256"] != plain["steps"][1]["gradients_sha256"]
    assert plain["test_l2"] == offloaded["test_l2"]


def test_picture_is_1600_by_600(run: tuple[str, Path]) -> None:
    pytest.importorskip("matplotlib")
    header = (run[1] / "demo.png").read_bytes()[:24]
    assert struct.unpack(">II", header[16:24]) == (1600, 600)


# Comparison and table, on figures made up


def step(
    *, duration_s: float = 2.0, peak: float = 3.0, stats: StepStats | None = None
) -> StepResult:
    return StepResult(
        duration_s=duration_s,
        user_s=3.0,
        kernel_s=1.0,
        peak_bytes=int(peak * GIB),
        loss=1.5,
        train_l2=0.5,
        train_h1=0.25,
        gradients_sha256="a",
        stats=stats,
        timeline=[(0.0, GIB), (1.0, 2 * GIB)],
    )


def result(mode: Mode, steps: list[StepResult]) -> ModeResult:
    return ModeResult(mode, GIB, steps, FinalResult(0.1, 0.2, "p", ()))


def test_equal_runs_have_no_difference() -> None:
    steps = [step() for _ in range(3)]
    assert first_difference(result(Mode.NONE, steps), result(Mode.EBBTIDE, steps)) is None


def test_a_changed_bit_is_found_and_named() -> None:
    steps = [step() for _ in range(3)]
    reference = result(Mode.NONE, steps)
    other = dataclasses.replace(step(), gradients_sha256="b")
    assert first_difference(reference, result(Mode.EBBTIDE, [*steps[:2], other])) == (
        "gradients, step 3"
    )
    other = dataclasses.replace(step(), loss=1.5 + 2**-52)
    assert first_difference(reference, result(Mode.EBBTIDE, [other, *steps[1:]])) == "loss, step 1"
    changed = result(Mode.EBBTIDE, steps)
    changed.final = FinalResult(0.1, 0.2, "q", ())
    assert first_difference(reference, changed) == "final parameters"
    assert first_difference(reference, result(Mode.EBBTIDE, steps[:2])) == "number of steps"


def test_digest_sees_one_bit() -> None:
    value = torch.arange(6.0).reshape(2, 3)
    flipped = value.clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    base = worker.digest([("w", value)])
    assert worker.digest([("w", value.clone())]) == base
    assert worker.digest([("w", value.t().contiguous().t())]) == base
    others = [("w", flipped), ("v", value), ("w", value.reshape(3, 2)), ("w", None)]
    digests = {worker.digest([other]) for other in others}
    assert len(digests | {base}) == 5


def test_digest_takes_complex_and_scalar_tensors() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert worker.digest([("w", value.conj())]) == worker.digest([("w", value.conj_physical())])
    assert worker.digest([("w", value.conj())]) != worker.digest([("w", value)])
    assert worker.digest([("w", torch.tensor(1.0))]) != worker.digest([("w", torch.tensor(2.0))])


def render(config: DemoConfig, results: list[ModeResult]) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(build_table(config, results))
    for line in limits(config, results):
        console.print(line)
    return console.export_text()


def test_table_of_three_modes_on_an_accelerator_fits() -> None:
    config = DemoConfig(1024, 64, device=torch.device("meta"))
    stats = StepStats(saved_bytes=999 * GIB, unique_bytes=888 * GIB, offloaded_bytes=888 * GIB)
    results = [result(mode, [step(duration_s=123.4, peak=1234.5)] * 4) for mode in Mode]
    results[2].steps = [step(duration_s=123.4, peak=1234.5, stats=stats)] * 4
    table = render(config, results)
    assert max(map(len, table.splitlines())) <= 80
    assert "…" not in table
    assert "save_on_cpu" in table
    assert "1234.50 GiB" in table


def test_ratios_are_of_what_is_above_idle_and_of_median_steps() -> None:
    config = DemoConfig()
    # Idle is 1 GiB. The first two steps of a turn of five are slow, and not counted.
    slow = step(duration_s=9.0)
    plain = result(Mode.NONE, [slow, slow, step(), step(), step(), slow, slow])
    offloaded = step(duration_s=3.0, peak=1.5, stats=StepStats(offloaded_bytes=GIB))
    other = result(Mode.EBBTIDE, [slow, slow, *[offloaded] * 3, slow, slow])
    other.steps = [dataclasses.replace(one, peak_bytes=int(1.5 * GIB)) for one in other.steps]
    table = render(config, [plain, other])
    assert "0.25x" in table  # (1.5 - 1) / (3 - 1)
    assert "1.50x" in table  # 3 s / 2 s


def test_a_difference_shows_in_the_table() -> None:
    steps = [step()] * 3
    results = [result(Mode.NONE, steps), result(Mode.EBBTIDE, steps)]
    assert "same bits" in render(DemoConfig(), results)
    results[1].steps = [*steps[:2], dataclasses.replace(step(), gradients_sha256="b")]
    assert compare(results) == {Mode.EBBTIDE: "gradients, step 3"}
    assert "differ:" in render(DemoConfig(), results)


def test_noise_is_admitted() -> None:
    steps = [step(), step(), step(duration_s=2.0), step(duration_s=3.5)]
    assert any("vary" in line for line in limits(DemoConfig(), [result(Mode.NONE, steps)]))
    assert not any(
        "vary" in line for line in limits(DemoConfig(), [result(Mode.NONE, [step()] * 3)])
    )


# Memory


def test_peak_of_a_process_begins_again() -> None:
    memory = ProcessMemory()
    if not memory.can_reset:
        pytest.skip("this kernel keeps the peak")
    size_bytes = 256 * 2**20
    before_bytes = memory.now_bytes()
    with Timeline(memory) as timeline:
        buffer = torch.ones(size_bytes, dtype=torch.uint8)
        while len(timeline.samples) < 2:
            pass
    del buffer
    # Half the size is more than anything else here takes or gives back meanwhile.
    assert memory.peak_bytes() >= before_bytes + size_bytes // 2
    assert max(level for _, level in timeline.samples) >= before_bytes + size_bytes // 2
    memory.reset_peak()
    assert memory.peak_bytes() < before_bytes + size_bytes // 2


def test_kernel_that_keeps_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path, _text: str) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refuse)
    memory = ProcessMemory()
    assert not memory.can_reset
    assert memory.peak_bytes() > 0


# What cannot run


def refused(options: list[str], out: Path) -> str:
    """What is printed on stderr when the demo refuses with exit code 2."""
    done = CliRunner().invoke(app, ["demo", "--out", str(out), *options])
    assert done.exit_code == 2, done.output
    return done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--modes", "none,magic"], "'magic' is not one of none, save_on_cpu, rebuild, ebbtide"),
        (["--modes", "save_on_cpu", "--device", "cpu"], "no mode"),
        (["--resolution", "8"], "--resolution must be 32 or more"),
        (["--batch-size", "0"], "--batch-size must be 1 or more"),
        (["--steps", "2"], "--steps must be 3 or more"),
        (["--threads", "0"], "--threads must be 1 or more"),
        (["--device", "warp"], "'warp' is not a torch device"),
    ],
)
def test_wrong_option_is_one_line(options: list[str], says: str, tmp_path: Path) -> None:
    message = refused(options, tmp_path)
    assert says in message
    assert message.count("\n") == 1


def test_accelerator_that_is_not_there(tmp_path: Path) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has one")
    assert "torch sees no accelerator" in refused(["--device", "cuda"], tmp_path)


def test_out_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written to" in refused([], tmp_path / "file" / "demo")


def test_neuraloperator_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "neuralop", None)
    assert 'pip install "ebbtide[neuralop]"' in refused([], tmp_path)


def save_published(directory: Path, n_samples: int) -> None:
    for split in ("train", "test"):
        fields = {"x": torch.rand(n_samples, 64, 64), "y": torch.rand(n_samples, 64, 64)}
        torch.save(fields, directory / f"darcy_{split}_64.pt")


def test_published_files_are_used_where_they_are(tmp_path: Path) -> None:
    pytest.importorskip("neuralop")
    save_published(tmp_path, 12)
    config = DemoConfig(64, 4, 3, data=tmp_path)
    published = torch.load(tmp_path / "darcy_train_64.pt")
    batch = next(darcy_fno.load_problem(config).epochs())
    assert torch.equal(batch["x"][:, 0], published["x"][:4])
    assert not darcy_fno.has_published_files(tmp_path, 32)


def test_published_files_with_too_few_samples(tmp_path: Path) -> None:
    pytest.importorskip("neuralop")
    save_published(tmp_path, 11)
    message = refused([*TINY, "--device", "cpu", "--data", str(tmp_path)], tmp_path / "out")
    assert "has 11 samples" in message


def test_store_that_does_not_fit_is_refused_by_the_worker(tmp_path: Path) -> None:
    pytest.importorskip("neuralop")
    message = refused([*TINY, "--device", "cpu", "--store", "host"], tmp_path)
    assert 'store="host"' in message
    assert "Traceback" not in message


def test_a_difference_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "run_demo", lambda _config, _console: False)
    done = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--device", "cpu"])
    assert done.exit_code == 1


def test_dead_and_failing_workers_are_reported() -> None:
    pytest.importorskip("neuralop")
    config = DemoConfig(64, 4, modes=(Mode.NONE, Mode.EBBTIDE))
    with Team(config) as team:
        for mode in config.modes:
            team.ask(mode, worker.Started)
        victim = team.pid(Mode.NONE)
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"none was ended by SIGKILL.*--batch-size"):
            team.ask(Mode.NONE, worker.Prepared, {})
        with pytest.raises(WorkerError, match="ebbtide failed: KeyError") as failed:
            team.ask(Mode.EBBTIDE, worker.Prepared, {})  # there are no such weights
        assert "in prepare" in failed.value.trace


# The command itself


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"ebbtide {__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from ebbtide.cli.main import app\n"
        "assert CliRunner().invoke(app, ['demo', '--help']).exit_code == 0\n"
        "heavy = {'neuralop', 'matplotlib', 'scipy', 'ebbtide.demo.worker'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
