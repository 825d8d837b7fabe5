"""What people type or pipe in: prompts of `generate`, turns of `chat`."""

import io
import sys
from pathlib import Path

import pytest

from anyrig.cli.editor import Editor
from anyrig.cli.prompts import gather
from anyrig.core.errors import DataError, UsageError


def pipe(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def turns(monkeypatch: pytest.MonkeyPatch, text: str) -> list[str]:
    pipe(monkeypatch, text.encode())
    return list(Editor(Path("/nowhere")).turns())


def test_prompts_come_in_the_order_argument_flags_files(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("from a file\n\n")
    assert gather("one", ["two", "three"], [tmp_path / "p.txt"]) == ["one", "two", "three", "from a file\n"]


def test_stdin_is_read_when_nothing_else_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, "Grüße\n".encode())
    assert gather(None, [], []) == ["Grüße"]


@pytest.mark.parametrize("argument", [True, False])
def test_a_dash_is_stdin(argument: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, b"piped")
    assert (gather("-", [], []) if argument else gather(None, [], [Path("-")])) == ["piped"]


def test_stdin_is_left_alone_when_there_is_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, b"not this")
    assert gather("one", [], []) == ["one"]


@pytest.mark.parametrize("content", [b"", b"\n"])
def test_an_empty_prompt_is_refused(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, content)
    with pytest.raises(DataError, match="the prompt is empty"):
        gather(None, [], [])


def test_text_that_is_not_utf8_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pipe(monkeypatch, b"\xff\xfe")
    with pytest.raises(DataError, match="stdin is not UTF-8"):
        gather(None, [], [])
    (tmp_path / "p").write_bytes(b"\xff")
    with pytest.raises(DataError, match="not UTF-8"):
        gather(None, [], [tmp_path / "p"])


def test_a_file_that_cannot_be_read_is_named() -> None:
    with pytest.raises(DataError, match=r"cannot read the prompt from /nowhere \(No such file or directory\)"):
        gather(None, [], [Path("/nowhere")])


def test_no_prompt_on_a_terminal_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    with pytest.raises(UsageError, match="no prompt was given"):
        gather(None, [], [])


def test_every_piped_line_is_a_turn_and_blank_ones_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert turns(monkeypatch, "one\n\n  \ntwo\r\nthree") == ["one", "two", "three"]


def test_a_backslash_at_the_end_goes_on_in_the_next_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert turns(monkeypatch, "one\\\ntwo\\\nthree\nfour\n") == ["one\ntwo\nthree", "four"]


def test_a_block_between_triple_quotes_is_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert turns(monkeypatch, '"""\na\n\nb\n"""\n"""c\nd"""\n"""e"""\n') == ["a\n\nb", "c\nd", "e"]


def test_an_unfinished_block_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert turns(monkeypatch, 'one\n"""\ntwo\n') == ["one"]
