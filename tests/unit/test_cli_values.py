"""Flags, variables and YAML values become what a field holds, or an error that says what it must be."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from anyrig.cli.values import is_list, metavar, parse
from anyrig.core.errors import UsageError


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        ("3", int, 3),
        (3, int, 3),
        ("-1", int | None, -1),
        ("none", int | None, None),
        ("None", float | None, None),
        (None, int | None, None),
        ("none", str | None, "none"),
        ("1e-3", float, 0.001),
        (1, float, 1.0),
        ("yes", bool, True),
        ("0", bool, False),
        (True, bool, True),
        ("int8", Literal["none", "int8"], "int8"),
        ("512MB", str | int | None, "512MB"),
        (1024, str | int | None, 1024),
        (3, str, "3"),
        ("a,b", Sequence[str], ("a,b",)),
        (["a", "b"], Sequence[str], ("a", "b")),
        ('["a", "b,c"]', Sequence[str], ("a", "b,c")),
        ("1,2", Sequence[int], (1, 2)),
        (["1,2", "3"], Sequence[int] | None, (1, 2, 3)),
        ('{"5": -1}', Mapping[int, float] | None, {5: -1.0}),
        ({5: 1}, Mapping[int, float] | None, {5: 1.0}),
        ('{"type": "object"}', Mapping[str, Any] | str | None, {"type": "object"}),
        ("~/x", Path, Path.home() / "x"),
    ],
)
def test_a_value_becomes_the_fields_type(value: Any, hint: Any, expected: Any) -> None:
    got = parse(value, hint, "--x")
    assert got == expected and type(got) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        ("x", int, "`--x` must be a whole number. Given: 'x'"),
        ("1.5", int, "`--x` must be a whole number. Given: '1.5'"),
        (1.5, int, "`--x` must be a whole number. Given: 1.5"),
        (True, int, "`--x` must be a whole number. Given: True"),
        ("x", float | None, "`--x` must be a number. Given: 'x'"),
        ("maybe", bool, "`--x` must be true or false. Given: 'maybe'"),
        ("none", int, "`--x` must be a whole number. Given: 'none'"),
        (None, int, "`--x` must have a value"),
        (["a"], str, "`--x` must be one value. Given: ['a']"),
        ("{", Mapping[str, Any], "`--x` is not JSON"),
        ("[1]", Mapping[str, Any], "`--x` must be a JSON object. Given: [1]"),
        ("@/nowhere.json", Mapping[str, Any], "`--x` names a file that cannot be read: /nowhere.json"),
        ('{"a": 1}', Mapping[int, float], "`--x` must be a whole number. Given: 'a'"),
    ],
)
def test_a_wrong_value_is_named_with_what_it_must_be(value: Any, hint: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(value, hint, "--x")
    assert caught.value.message.startswith(message)
    assert caught.value.exit_code == 2


def test_a_wrong_choice_suggests_the_nearest_one() -> None:
    with pytest.raises(UsageError) as caught:
        parse("bfloat", Literal["float32", "bfloat16"], "--dtype")
    assert caught.value.message == "`--dtype` must be one of float32, bfloat16. Given: 'bfloat'"
    assert caught.value.hint == "did you mean `bfloat16`?"


def test_one_text_may_hold_a_list_where_that_is_wanted() -> None:
    hint = Sequence[str] | None
    assert parse(["yes,no"], hint, "--x", commas=True) == ("yes", "no")
    assert parse("yes, no", hint, "--x", commas=True) == ("yes", "no")
    assert parse(["yes, sir", "no"], hint, "--x", commas=True) == ("yes, sir", "no"), "two flags are two items"
    assert parse(["yes,no"], hint, "--x") == ("yes,no",)


def test_a_mapping_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "string"}')
    assert parse(f"@{file}", Mapping[str, Any] | str | None, "--json-schema") == {"type": "string"}


def test_a_file_name_without_its_sign_is_explained() -> None:
    with pytest.raises(UsageError) as caught:
        parse("schema.json", Mapping[str, Any] | str | None, "--json-schema")
    assert caught.value.hint == "a file is given as @FILE"


def test_help_shows_the_kind_of_value() -> None:
    assert metavar(int | None) == "INTEGER"
    assert metavar(Literal["a", "b"]) == "[a|b]"
    assert metavar(Sequence[int] | None) == "INTEGER"
    assert metavar(Mapping[str, Any] | str | None) == "JSON|@FILE"
    assert is_list(Sequence[str]) and not is_list(str)
