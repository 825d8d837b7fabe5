"""The command line as a whole: exit codes, one-line errors, suggestions, verbosity."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from anyrig import __version__
from anyrig.cli import main
from anyrig.cli.console import console
from anyrig.cli.main import VERBS, run
from anyrig.core.errors import DataError


@pytest.fixture(autouse=True)
def fresh_console() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    console.debug = False
    console.verbosity = 0
    logging.basicConfig(force=True)  # the command line's handler writes to a captured stderr that is gone


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """A verb `probe` that does what the list's first item says: raise it or return it."""
    behaviour: list[object] = [None]

    def probe() -> object:
        if isinstance(behaviour[0], BaseException):
            raise behaviour[0]
        return behaviour[0]

    monkeypatch.setitem(VERBS, "probe", (f"{__name__}:probe", "for tests"))
    monkeypatch.setattr(sys.modules[__name__], "probe", probe, raising=False)
    yield behaviour


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    for verb, (_, line) in VERBS.items():
        assert f"  {verb} " in shown and line in shown


def test_h_is_help_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["-h"]) == 0 and run(["generate", "-h"]) == 0
    assert "Usage: anyrig generate MODEL [PROMPT] [OPTIONS]" in capsys.readouterr().out


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    assert capsys.readouterr().out.startswith("Usage: anyrig")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"anyrig {__version__}\n"


def test_help_groups_the_options_by_what_they_configure(capsys: pytest.CaptureFixture[str]) -> None:
    run(["generate", "--help"])
    shown = capsys.readouterr().out
    engine, sampling = shown.index("Engine options:"), shown.index("Sampling options:")
    assert engine < shown.index("--max-num-seqs INTEGER") < sampling < shown.index("--temperature NUMBER")
    assert "--include-stop-str-in-output / --no-include-stop-str-in-output" in shown  # no name is cut short


@pytest.mark.parametrize(
    ("line", "first", "second"),
    [
        ("generte", "error: no such command `generte`", "did you mean `anyrig generate`?"),
        ("generate m x --temprature 1", "error: no such option: --temprature", "did you mean --temperature?"),
        ("--verson", "error: no such option: --verson", "did you mean --version?"),
        (
            "generate m x --dtype bfloat",
            "error: `--dtype` must be one of auto, float32, bfloat16, float16. Given: 'bfloat'",
            "did you mean `bfloat16`?",
        ),
        ("generate", "error: missing argument 'MODEL'", "see anyrig generate --help"),
        ("generate m x --max-num-seqs 0", "error: `max_num_seqs` must be at least 1. Given: 0", None),
        ("generate m x --max_num_seqs 0", "error: `max_num_seqs` must be at least 1. Given: 0", None),
        ("chat m --n 2", "error: no such option: --n", "did you mean"),
    ],
)
def test_wrong_usage_is_one_line_a_suggestion_and_exit_code_2(
    line: str, first: str, second: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == 2
    got = errors(capsys)
    assert got[0] == first
    assert (second is None and len(got) == 1) or (second is not None and got[1].strip().startswith(second))


def test_an_unknown_model_is_an_error_without_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pull", "smollm2-135"]) == 1
    got = errors(capsys)
    assert got[0].startswith("error: ") and "smollm2-135" in got[0]
    assert "smollm2-135m" in got[1]


def test_a_verbs_return_value_is_the_exit_code(verb: list[object]) -> None:
    verb[0] = 3
    assert run(["probe"]) == 3
    verb[0] = typer.Exit(4)
    assert run(["probe"]) == 4


def test_an_error_of_the_users_shows_message_and_hint(verb: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    verb[0] = DataError("row 3 is broken", "mend it")
    assert run(["probe"]) == 1
    assert errors(capsys) == ["error: row 3 is broken", "       mend it"]


def test_an_error_of_ours_says_how_to_see_more(verb: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    verb[0] = KeyError("x")
    assert run(["probe"]) == 1
    assert errors(capsys) == [
        "error: KeyError: 'x'",
        "       this was not foreseen; --debug shows where it happened",
    ]


@pytest.mark.parametrize("line", [["--debug", "probe"], ["probe", "--debug"]])
def test_debug_shows_the_traceback(line: list[str], verb: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    verb[0] = DataError("row 3 is broken")
    assert run(line) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown and shown.endswith("error: row 3 is broken\n")


def test_debug_by_environment(
    verb: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANYRIG_DEBUG", "1")
    verb[0] = KeyError("x")
    run(["probe"])
    assert "Traceback" in capsys.readouterr().err


def test_interruption_is_exit_code_130_and_says_nothing(verb: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    verb[0] = KeyboardInterrupt()
    assert run(["probe"]) == 130
    assert errors(capsys) in ([], [""])


@pytest.mark.parametrize(
    ("line", "level"),
    [
        (["probe"], logging.WARNING),
        (["-q", "probe"], logging.ERROR),
        (["probe", "-q"], logging.ERROR),
        (["probe", "-v"], logging.INFO),
        (["-v", "probe"], logging.INFO),
        (["probe", "-vv"], logging.DEBUG),
    ],
)
def test_verbosity_may_stand_before_or_after_the_verb(line: list[str], level: int, verb: list[object]) -> None:
    assert run(line) == 0
    assert logging.getLogger("anyrig").level == level


def test_other_libraries_are_silent_unless_asked(verb: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    monkeypatch.setenv("TQDM_DISABLE", "0")
    run(["probe"])
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "error"
    assert os.environ["TQDM_DISABLE"] == "0", "what the user has decided stays"
    run(["probe", "-v"])
    assert "TRANSFORMERS_VERBOSITY" not in os.environ


def test_a_reader_that_leaves_early_is_no_error() -> None:
    program = f"{sys.executable} -m anyrig generate smollm2-135m x --print-config | head -1"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "# Engine\n"
    assert done.stderr == ""


def test_the_installed_command_and_the_module_are_the_same(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("anyrig")
    for line in ([str(command)], [sys.executable, "-m", "anyrig"]):
        done = subprocess.run([*line, "generte"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and done.stderr.startswith("error: no such command `generte`")


def test_colours_stay_off_a_terminal_and_under_no_color() -> None:
    for environ, coloured in ({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False):
        variables = {**os.environ, "TERM": "xterm", **environ}
        program = f"script -qec '{sys.executable} -m anyrig generte' /dev/null"
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60, env=variables)
        assert ("\x1b[" in done.stdout) is coloured, environ
    assert main.run(["generte"]) == 2
