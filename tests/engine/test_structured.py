"""Grammars: whatever is sampled among the allowed tokens, the output is what was asked for."""

import json
import re
from functools import cache
from typing import Any

import numpy as np
import pytest

from anyrig.core.errors import InvalidRequest
from anyrig.core.params import SamplingParams
from anyrig.engine.structured import Grammar, GrammarCompiler
from anyrig.models import locate
from anyrig.models.tokenizer import Tokenizer

VOCAB = 49152
EOS = 2
WALKS = 25


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(locate.resolve("smollm2-135m").path)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), VOCAB, [EOS])


def grammar(**params: Any) -> Grammar:
    made = compiler().compile(SamplingParams(**params))
    assert made is not None
    return made


def walk(grammar: Grammar, seed: int, most: int = 400, stop: float = 0.3) -> str:
    """Text of random allowed tokens up to the end token, which is taken with probability `stop` where it may come.

    Long walks prefer short tokens that close things, so that they come to an end.
    """
    random = np.random.default_rng(seed)
    out: list[int] = []
    while len(out) < most:
        allowed = np.flatnonzero(grammar.allowed(VOCAB))
        few = grammar.allowed_if_few(VOCAB)
        assert few is None or few.tolist() == allowed.tolist()
        assert len(allowed), tokenizer().decode(out)
        if EOS in allowed and (len(allowed) == 1 or random.random() < stop):
            assert grammar.accepting
            assert grammar.accept(EOS)
            assert grammar.finished
            return tokenizer().decode(out, skip_special_tokens=False)
        allowed = allowed[allowed != EOS]
        closing = np.intersect1d(allowed, closing_tokens()) if len(out) > 20 else allowed[:0]
        token = int(random.choice(closing if len(closing) else allowed))
        assert grammar.accept(token)
        out.append(token)
    raise AssertionError(f"no end after {most} tokens: {tokenizer().decode(out)[:300]!r}")


@cache
def closing_tokens() -> np.ndarray[Any, Any]:
    ids = [tokenizer().backend.token_to_id(t) for t in ('"', "}", "]", "e", "1")]
    return np.array(sorted(i for i in ids if i is not None))


@pytest.mark.parametrize(
    "choices",
    [
        ["positive", "negative", "neutral"],
        ["ab", "abc", "abcde", "b"],
        ["New York", "New", "new york", " New York", "New York\n"],
        ["日本", "日本語", "😀", "naïve", "e\u0301"],
        ["a.b", "a|b", "(x)", "[y]", "c*", "\\d", 'say "hi"', "/", "^$", "tab\there", "<|im_end|>", "{1,2}"],
        [f"label {i}" for i in range(500)],
    ],
)
def test_the_output_is_exactly_one_of_the_choices(choices: list[str]) -> None:
    seen = {walk(grammar(choices=choices), seed) for seed in range(4 * WALKS)}
    assert seen <= set(choices)
    assert len(seen) >= min(len(choices), 2)


def test_a_choice_that_begins_another_one_can_be_the_output() -> None:
    choices = ["ab", "abc", "abcde"]
    assert {walk(grammar(choices=choices), seed) for seed in range(100)} == set(choices)


@pytest.mark.parametrize(
    "regex",
    [
        r"[0-9]{3}-[0-9]{4}",
        r"(yes|no), because [a-z ]{1,30}\.",
        r"^[a-z\d_]{2,8}@example\.(com|org)$",
        r"[а-я]{2,5}|[一-十]{1,3}",
        r"a.c",
        r"x?",
        r"/[^/]{1,5}/",
    ],
)
def test_the_output_matches_the_regular_expression(regex: str) -> None:
    for seed in range(WALKS):
        text = walk(grammar(regex=regex), seed)
        assert re.fullmatch(regex, text), text


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["good", "bad", 3, None]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 1, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "ok": {"type": "boolean"}},
            "required": ["zip", "ok"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "mood", "tags", "home"],
    "additionalProperties": False,
}


def is_person(value: Any) -> bool:
    return (
        list(value) == ["name", "age", "mood", "tags", "home"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and type(value["age"]) is int
        and 0 <= value["age"] <= 120
        and value["mood"] in ("good", "bad", 3, None)
        and 1 <= len(value["tags"]) <= 3
        and all(isinstance(t, str) and len(t) <= 5 for t in value["tags"])
        and list(value["home"]) == ["zip", "ok"]
        and re.fullmatch("[0-9]{5}", value["home"]["zip"]) is not None
        and type(value["home"]["ok"]) is bool
    )


SCHEMAS: list[tuple[dict[str, Any], Any]] = [
    (PERSON, is_person),
    ({"type": "integer", "minimum": -5, "maximum": 17}, lambda v: type(v) is int and -5 <= v <= 17),
    ({"type": "number", "minimum": 0, "exclusiveMaximum": 1}, lambda v: isinstance(v, (int, float)) and 0 <= v < 1),
    ({"type": "string", "minLength": 2, "maxLength": 4}, lambda v: isinstance(v, str) and 2 <= len(v) <= 4),
    ({"const": {"é": ["\u2028", '"', "\\"]}}, lambda v: v == {"é": ["\u2028", '"', "\\"]}),
    ({"enum": ["a", "ab", 'a"b', 1.5, True, [], {}]}, lambda v: v in ["a", "ab", 'a"b', 1.5, True, [], {}]),
    (
        {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "minItems": 2, "maxItems": 4},
        lambda v: 2 <= len(v) <= 4 and all(x is None or type(x) is bool for x in v),
    ),
    (
        {
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"type": "null"}},
                    "required": ["v"],
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/node",
        },
        lambda v: isinstance(v, dict) and v["v"] is None and set(v) <= {"v", "next"},
    ),
]


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_the_output_is_json_that_satisfies_the_schema(number: int) -> None:
    schema, valid = SCHEMAS[number]
    for seed in range(WALKS):
        text = walk(grammar(json_schema=schema), seed)
        assert valid(json.loads(text)), text


def test_whitespace_in_json_is_bounded() -> None:
    for seed in range(WALKS):
        text = walk(grammar(json_schema=PERSON), seed)
        outside = re.sub(r'"(\\.|[^"\\])*"', '""', text)
        assert not re.search(r"\s\s|^\s|\t|\r", outside), text


def test_a_schema_may_be_given_as_text() -> None:
    assert walk(grammar(json_schema='{"const": 7}'), 0) == "7"


def test_after_completion_only_the_end_token_may_come() -> None:
    made = grammar(choices=["yes"])
    assert not made.finished
    for token in tokenizer().encode("yes"):
        assert made.accept(token)
    assert made.finished
    assert np.flatnonzero(made.allowed(VOCAB)).tolist() == [EOS]
    assert made.allowed_if_few(VOCAB).tolist() == [EOS]


def test_a_forbidden_token_is_refused_and_told() -> None:
    made = grammar(choices=["yes"])
    assert not made.accept(tokenizer().encode("no")[0])
    assert "doesn't satisfy the grammar" in made.error
    assert "<state>" not in made.error
    assert not made.finished


def test_a_copy_goes_its_own_way_and_cached_grammars_start_afresh() -> None:
    first = grammar(choices=["ab", "cd"])
    assert first.accept(tokenizer().encode("a")[0])
    twin = first.copy()
    assert twin.accept(tokenizer().encode("b")[0])
    assert twin.finished
    assert not first.finished
    assert grammar(choices=["ab", "cd"]).accept(tokenizer().encode("c")[0])


def test_logits_may_be_wider_than_the_tokenizer() -> None:
    wide = GrammarCompiler(tokenizer(), VOCAB + 100, [EOS]).compile(SamplingParams(regex=".*"))
    assert wide is not None
    allowed = wide.allowed(VOCAB + 100)
    assert allowed.shape == (VOCAB + 100,)
    assert not allowed[VOCAB:].any()
    assert allowed[:VOCAB].sum() > 40_000


@pytest.mark.parametrize("eos", [[], [VOCAB + 5]])
def test_without_an_end_token_the_grammar_still_finishes(eos: list[int]) -> None:
    made = GrammarCompiler(tokenizer(), VOCAB, eos).compile(SamplingParams(choices=["ab", "abc"]))
    assert made is not None
    for token in tokenizer().encode("ab"):
        made.accept(token)
    assert made.accepting
    assert made.allowed(VOCAB).any()
    assert made.accept(tokenizer().encode("c")[0])
    assert made.finished
    assert not made.allowed(VOCAB).any()
    assert made.allowed_if_few(VOCAB + 100).tolist() == []


def test_any_of_several_end_tokens_may_end_the_output() -> None:
    made = GrammarCompiler(tokenizer(), VOCAB, [0, EOS]).compile(SamplingParams(regex="a?"))
    assert made is not None
    allowed = made.allowed(VOCAB)
    assert allowed[[0, EOS]].all()


def test_a_request_without_structure_has_no_grammar() -> None:
    assert compiler().compile(SamplingParams()) is None


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"regex": "("}, "`regex` cannot be used.*unclosed"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"json_schema": {"type": "colour"}}, "`json_schema` cannot be used.*colour"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json_schema": {"type": "string", "minLength": 5, "maxLength": 2}}, "minLength"),
        ({"json_schema": "{not json"}, "`json_schema` is not JSON"),
        ({"json_schema": "[1]"}, "must be a JSON object"),
        ({"json_schema": {"const": {1, 2}}}, "`json_schema` is not JSON"),
    ],
)
def test_what_cannot_be_compiled_is_refused_at_once_with_the_reason(params: dict[str, Any], words: str) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=words):
            compiler().compile(SamplingParams(**params))
