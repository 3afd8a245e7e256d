"""What all commands have in common: help, exit codes, JSON, and what a pipe gets to see."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from commands import call, commands
from ebbtide.errors import BudgetError, PolicyError, StoreFullError
from ebbtide.tools.exit_codes import ExitCode, ends_by_code, in_options

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"
COMMANDS = {
    "demo": "demo.md",
    "doctor": "doctor.md",
    "plan": "plan-command.md",
    "run": "run.md",
    "schedule": "schedules.md",
}
COMMAND_LINE = (GUIDES / "command-line.md").read_text()


def help_of(*command: str) -> str:
    done = call(*command, "--help")
    assert done.exit_code == 0
    return done.output


def options_of(command: str) -> Iterator[str]:
    yield from re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", help_of(command), re.MULTILINE)


# Help


def test_every_command_is_known_here() -> None:
    listed = re.findall(r"^  (\w+) +[A-Z]", help_of().partition("Commands:")[2], re.MULTILINE)
    assert set(listed) == COMMANDS.keys() | {"report", "verify"}


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_is_plain_and_80_columns_wide(command: tuple[str, ...]) -> None:
    text = help_of(*command)
    assert max(map(len, text.splitlines())) <= 80
    assert text.isascii()
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)
    assert "..." not in text.partition("Commands:")[2], "a summary is cut"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_parameter_is_an_argument_or_an_option_with_help(command: str) -> None:
    for parameter in typer.main.get_command(commands).commands[command].params:
        name = f"--{parameter.name.replace('_', '-')}"
        assert parameter.help
        assert parameter.param_type_name == "argument" or name in parameter.opts


@pytest.mark.parametrize(("command", "page"), COMMANDS.items())
def test_the_guide_of_a_command_has_every_option(command: str, page: str) -> None:
    text = (GUIDES / page).read_text()
    missing = {each for each in options_of(command) if f"{each}" not in text} - {"--help"}
    assert not missing, f"docs/guides/{page}"


@pytest.mark.slow
def test_without_docstrings_there_is_no_help_and_all_else_works() -> None:
    for arguments in (["schedule", "--layers", "1/2"], ["run", "-m", "this", "--quiet"]):
        command = [sys.executable, "-OO", "-m", "ebbtide", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        assert done.stdout


# Exit codes


def test_the_page_has_the_codes() -> None:
    table = COMMAND_LINE.partition("## Exit codes")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (\d+) \|", table, re.MULTILINE) == [str(int(each)) for each in ExitCode]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_the_codes_of_a_command(command: str) -> None:
    codes = re.findall(r"^ +(\d+) ", help_of(command).partition("Exit codes:")[2], re.MULTILINE)
    known = {str(int(each)) for each in ExitCode}
    assert {"0", "2", "130"} <= set(codes) <= known
    assert ("78" in codes) == (command in ("plan", "run"))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PolicyError("wrong"), 2),
        (StoreFullError(28, "full"), 2),
        (ImportError("missing"), 2),
        (FileNotFoundError(2, "No such file", "plan.json"), 2),
        (BudgetError("too small", smallest_bytes=1), 78),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_error_is_a_line_and_a_code(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, ends_by_code("plan"):
        raise error
    assert ended.value.exit_code == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("ebbtide plan: ")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "place"),
    [
        (["demo", "--device", "cpu"], "ebbtide.tools.demo.run_demo"),
        (["doctor", "--device", "cpu"], "ebbtide.tools.doctor.examine"),
        (["plan", "gpt"], "ebbtide.tools.plan_tables.run_plan"),
        (["schedule", "--layers", "1/2"], "ebbtide.tools.main.rehearse"),
    ],
)
def test_ctrl_c_is_130_in_every_command(
    line: list[str], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupt)
    done = call(*line)
    assert done.exit_code == 130
    assert f"ebbtide {line[0]}: interrupted" in done.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("doctor --store disk:/no/such", "--store disk:/no/such: there is no such directory"),
        ("demo --store disk:/no/such", "--store disk:/no/such: there is no such directory"),
        ("schedule --layers 2/4 --bandwidth 0", "--bandwidth must be more than 0"),
        ("schedule --layers 2/4 --forward-ms -1", "--forward-ms must be more than 0, got -1"),
    ],
)
def test_mistakes_are_refused_at_once_and_named_as_they_were_typed(line: str, words: str) -> None:
    done = call(*line.split())
    assert done.exit_code == 2 and words in done.stderr
    assert done.stdout == ""


def test_arguments_of_python_are_said_as_options() -> None:
    error = PolicyError("num_layers=9 is out of range; name them, layers=['0', '1']")
    assert in_options(error) == ("--num-layers=9 is out of range; name them, --layers=['0', '1']")
    error = PolicyError("try weights=ebbtide.WeightPolicy() or more layers in the store")
    assert in_options(error) == "try --weights or more layers in the store"


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_is_wrong_use(command: str) -> None:
    done = call(command, "--no-such-option")
    assert done.exit_code == ExitCode.WRONG_USE
    assert "--no-such-option" in done.stderr
    assert done.stdout == ""
