"""Streamed text breaks between words at the terminal's edge, whatever pieces it comes in."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyrig.cli.wrap import Wrapper


def screen(pieces: list[str], width: int) -> list[str]:
    """The lines that a terminal shows after the pieces were written."""
    wrapper, lines = Wrapper(width), [""]
    for part in re.split(r"(\x1b\[\d*[DK]|\n)", "".join(wrapper.feed(p) for p in pieces)):
        if part == "\n":
            lines.append("")
        elif part.endswith("D") and part.startswith("\x1b"):
            lines[-1] = lines[-1][: -int(part[2:-1])]
        elif not part.startswith("\x1b"):
            lines[-1] += part
    return lines


def test_a_word_that_reaches_the_edge_moves_to_the_next_line_whole() -> None:
    assert screen(["one two thr", "ee four"], 12) == ["one two ", "three four"]


def test_a_word_longer_than_the_line_is_cut() -> None:
    assert screen(["abcdefghijkl"], 6) == ["abcde", "fghij", "kl"]


def test_line_breaks_of_the_text_stay() -> None:
    assert screen(["a\n\nb", "\n"], 20) == ["a", "", "b", ""]


def test_wide_characters_take_two_columns() -> None:
    assert screen(["日本語日本語"], 7) == ["日本語", "日本語"]


@given(
    words=st.lists(st.text("abc", min_size=1, max_size=8), max_size=30),
    cuts=st.lists(st.integers(1, 5), max_size=60),
    width=st.integers(10, 30),
)
def test_words_survive_and_lines_fit(words: list[str], cuts: list[int], width: int) -> None:
    text, pieces = " ".join(words), []
    for cut in cuts:
        pieces.append(text[:cut])
        text = text[cut:]
    lines = screen([*pieces, text], width)
    assert " ".join(lines).split() == words
    assert all(len(line) < width for line in lines)


@pytest.mark.parametrize("width", [10, 40])
def test_nothing_changes_while_there_is_room(width: int) -> None:
    assert Wrapper(width).feed("  a b\n") == "  a b\n"
