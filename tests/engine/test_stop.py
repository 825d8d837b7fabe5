"""Stop strings: found however the text is cut, earliest first, and never shown in part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyrig.engine.stop import StopChecker


def run(pieces: list[str], stop: list[str], include: bool = False) -> tuple[str, str | None]:
    checker = StopChecker(stop, include)
    shown = ""
    for piece in pieces:
        text, hit = checker.push(piece)
        shown += text
        if hit is not None:
            return shown, hit
    return shown + checker.flush(), None


def expected(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """By the definition, one character after the other."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stop if text[:end].endswith(s)]
        if hits:
            hit = max(hits, key=len)
            return text[: end if include else end - len(hit)], hit
    return text, None


def test_a_stop_string_ends_the_text_before_it_or_with_it() -> None:
    assert run(["one\nUser: two"], ["\nUser:"]) == ("one", "\nUser:")
    assert run(["one\nUser: two"], ["\nUser:"], include=True) == ("one\nUser:", "\nUser:")


def test_a_stop_string_is_found_across_pieces_and_no_part_of_it_is_shown() -> None:
    checker = StopChecker(["<end>"])
    assert checker.push("text <e") == ("text ", None)
    assert checker.push("nd") == ("", None)
    assert checker.push("> more") == ("", "<end>")


def test_text_held_back_is_shown_as_soon_as_it_cannot_match() -> None:
    checker = StopChecker(["<end>"])
    assert checker.push("a <en") == ("a ", None)
    assert checker.push("<e") == ("<en", None)
    assert checker.push("mu") == ("<emu", None)
    assert checker.push("<") == ("", None)
    assert checker.flush() == "<"
    assert checker.flush() == ""


def test_the_stop_string_that_is_complete_first_wins_then_the_longer_one() -> None:
    assert run(["abcd"], ["bcd", "c"]) == ("ab", "c")
    assert run(["abcd"], ["cd", "bcd"]) == ("a", "bcd")


def test_text_before_min_tokens_is_shown_and_matches_nothing() -> None:
    checker = StopChecker(["stop"])
    assert checker.push("a stop st", armed=False) == ("a stop st", None)
    assert checker.push("op here") == ("op here", None)
    assert checker.push(" stop") == (" ", "stop")


def test_what_was_held_back_before_a_disarmed_piece_is_not_lost() -> None:
    checker = StopChecker(["stop"])
    assert checker.push("st") == ("", None)
    assert checker.push("op", armed=False) == ("stop", None)


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopChecker([]).push("anything") == ("anything", None)


@pytest.mark.parametrize("include", [False, True])
@given(
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
)
def test_how_the_text_is_cut_makes_no_difference(pieces: list[str], stop: list[str], include: bool) -> None:
    assert run(pieces, stop, include) == expected("".join(pieces), stop, include)


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stop=st.lists(st.text("ab", min_size=2, max_size=5), min_size=1, max_size=3),
)
def test_no_more_is_held_back_than_can_begin_a_stop_string(pieces: list[str], stop: list[str]) -> None:
    checker = StopChecker(stop)
    given_text = shown = ""
    for piece in pieces:
        text, hit = checker.push(piece)
        given_text, shown = given_text + piece, shown + text
        if hit is not None:
            break
        held = given_text.removeprefix(shown)
        assert given_text == shown + held
        assert held == "" or any(s.startswith(held) for s in stop)
        assert all(
            not any(s.startswith(given_text[-n:]) for s in stop) for n in range(len(held) + 1, len(given_text) + 1)
        )
