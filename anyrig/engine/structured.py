"""Structured output: a grammar says at each step which tokens may come next (library: llguidance)."""

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from anyrig.core.errors import InvalidRequest
from anyrig.core.params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# At most one space or line break between the parts of a JSON text: free whitespace invites small models to emit
# nothing else until their tokens are spent.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \n]?"}
_CACHED = 256


class _Backend(Protocol):
    def to_str(self) -> str: ...


class TokenizerWithBackend(Protocol):
    """What is needed of a tokenizer (`models.tokenizer.Tokenizer`)."""

    @property
    def backend(self) -> _Backend: ...

    @property
    def vocab_size(self) -> int: ...


class Grammar:
    """Where one output stands in its grammar."""

    def __init__(self, matcher: "LLMatcher", words: int, hidden: int | None = None) -> None:
        self._matcher = matcher
        self._mask = np.zeros(words, np.uint32)
        self._hidden = hidden
        self._filled = False

    def allowed(self, width: int) -> NDArray[np.bool_]:
        """Which of the ids 0 .. width - 1 may come next, [width]."""
        self._fill()
        bits = np.unpackbits(self._mask.view(np.uint8), count=min(width, 32 * len(self._mask)), bitorder="little")
        allowed = bits.view(np.bool_)
        if self._hidden is not None:
            allowed[self._hidden :] = False
        return allowed if len(allowed) == width else np.pad(allowed, (0, width - len(allowed)))

    def allowed_if_few(self, width: int) -> NDArray[np.int64] | None:
        """The ids that may come next, ascending, if they are so few that a list is cheaper than a mask; else None."""
        self._fill()
        words = np.flatnonzero(self._mask)
        if len(words) * 8 > len(self._mask):
            return None
        bits = np.unpackbits(self._mask[words].view(np.uint8), bitorder="little").view(np.bool_)
        ids = (words[:, None] * 32 + np.arange(32)).ravel()[bits]
        return ids[ids < (width if self._hidden is None else min(width, self._hidden))]

    def _fill(self) -> None:
        if not self._filled:
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            self._filled = True

    def accept(self, token_id: int) -> bool:
        """Go on by one token; False if the grammar doesn't allow it (it allows nothing from then on)."""
        self._filled = False
        return bool(self._matcher.consume_token(token_id))

    @property
    def finished(self) -> bool:
        """The output is complete and nothing but an end token can follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def accepting(self) -> bool:
        """The output is complete as it stands; it may still go on unless `finished`."""
        return bool(self._matcher.is_accepting())

    @property
    def error(self) -> str:
        """Why the grammar gave up (a token that it forbids, or limits of the library); empty if it didn't."""
        return _reason(self._matcher.get_error())

    def copy(self) -> "Grammar":
        """An independent grammar at the same place."""
        return Grammar(self._matcher.deep_copy(), len(self._mask), self._hidden)


class GrammarCompiler:
    """Makes grammars for one tokenizer; the ones last used are kept compiled. Safe to use from several threads.

    Args:
        vocab_size: width of the logits; may be more than the tokenizer has.
        eos_ids: tokens that end an output. Those that the model doesn't have are left out; with none left, the output
            ends where `Grammar.finished` says so, and never where it could still go on.
    """

    def __init__(self, tokenizer: TokenizerWithBackend, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._eos_ids = [i for i in eos_ids if 0 <= i < vocab_size]
        # Without an end token the library gets one made for it, behind the tokenizer's own, which is never allowed.
        self._hidden = None if self._eos_ids else tokenizer.vocab_size
        self._width = max(vocab_size, tokenizer.vocab_size + 1)
        self._lock = Lock()
        self._made: LLTokenizer | None = None
        self._cache: OrderedDict[str, Grammar] = OrderedDict()

    def compile(self, params: SamplingParams) -> Grammar | None:
        """The grammar of a request at its beginning, or None when it asks for none.

        Raises:
            InvalidRequest: with what is wrong with the choices, regular expression or schema.
        """
        if not params.structured:
            return None
        from llguidance import LLMatcher

        name = "choices" if params.choices is not None else "regex" if params.regex is not None else "json_schema"
        if params.choices is not None:
            text = LLMatcher.grammar_from_regex(_any_of(params.choices))
        elif params.regex is not None:
            text = LLMatcher.grammar_from_regex(params.regex)
        else:
            text = LLMatcher.grammar_from_json_schema(_schema(params), overrides=_JSON_OPTIONS)
        with self._lock:
            if text not in self._cache:
                matcher = LLMatcher(self._ll_tokenizer(), text, log_level=0)
                if matcher.is_error():
                    raise InvalidRequest(f"`{name}` cannot be used: {_reason(matcher.get_error())}", _HINTS[name])
                self._cache[text] = Grammar(matcher, -(-self._width // 32), self._hidden)
                if len(self._cache) > _CACHED:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(text)
            return self._cache[text].copy()

    def _ll_tokenizer(self) -> "LLTokenizer":
        """Made at the first grammar: it takes a few tenths of a second."""
        if self._made is None:
            from llguidance import LLTokenizer

            text, eos = self._tokenizer.backend.to_str(), self._eos_ids
            if self._hidden is not None:
                text, eos = _with_end_token(text), [self._hidden]
            self._made = LLTokenizer(text, n_vocab=self._width, eos_token=eos)
        return self._made


_HINTS = {
    "choices": "give plain strings",
    "regex": "the syntax is that of Rust's regex crate, without look-around, back-references and word boundaries",
    "json_schema": "see the JSON Schema features of llguidance",
}


def _with_end_token(text: str) -> str:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(text)
    backend.add_special_tokens(["<|end of structured output|>"])
    return str(backend.to_str())


def _any_of(choices: Sequence[str]) -> str:
    """A regular expression for exactly these strings. One expression, because thousands of grammar rules are slow."""
    return "|".join("".join(map(_literal, choice)) for choice in dict.fromkeys(choices))


def _literal(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}"


def _schema(params: SamplingParams) -> str:
    try:
        text = params.schema_text() or ""
        schema = json.loads(text)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"`json_schema` is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise InvalidRequest(f"`json_schema` must be a JSON object. Given: {text[:80]}")
    return text


def _reason(message: str) -> str:
    """The library's message in one line, without the dump of its state."""
    return " ".join(message.partition("<state>")[0].split())[:300]
