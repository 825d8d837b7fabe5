"""Perplexity of a text, by the engine's own prompt log-probabilities.

The text is one sequence of tokens. Windows of `window` tokens start every `stride` tokens; a token is scored once, in
the first window that reaches it, so that all but those of the first window have at least `window - stride` tokens
before them. What nothing stands before can't be scored: the text's first token and, where windows don't overlap, each
window's. Models whose tokenizer puts a beginning-of-text token before a text get it before every window, as one of its
`window` tokens, and then those count as well. Perplexity is e to the mean negative log-likelihood of what was scored.
"""

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from anyrig.core.errors import DataError, UsageError
from anyrig.core.params import SamplingParams
from anyrig.engine.engine import Engine

OWN_TEXT = "time_machine.txt"


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens `start .. end` of the text, those from `scored` on counted."""

    start: int
    end: int
    scored: int


@dataclass(frozen=True, slots=True)
class Perplexity:
    """One model's result.

    Attributes:
        nll: negative log-likelihood of all scored tokens together, natural logarithm.
        tokens: scored.
        computed: tokens that went through the model for that.
        seconds: that it took.
    """

    nll: float
    tokens: int
    computed: int
    seconds: float

    @property
    def value(self) -> float:
        return math.exp(self.nll / self.tokens)


def windows(length: int, window: int, stride: int, *, first: bool) -> list[Window]:
    """The windows over `length` tokens; `first`: the text's first token is scored too (something stands before it)."""
    found: list[Window] = []
    scored = 0
    for start in range(0, length, stride):
        end = min(start + window, length)
        found.append(Window(start, end, max(scored, start if first else start + 1)))
        scored = end
        if end == length:
            break
    return found


def measure(engine: Engine, ids: Sequence[int], window: int, stride: int) -> Perplexity:
    """Score `ids`, tokens of a text without special ones.

    Raises:
        UsageError: a window that the model does not hold.
        DataError: fewer than two tokens, or scores that are not finite.
    """
    if window >= engine.max_model_len:
        raise UsageError(
            f"--window must be below {engine.max_model_len}, what the model holds. Given: {window}",
            "or raise --max-model-len, if that is what limits it",
        )
    if len(ids) < 2:
        raise DataError(f"the text has {len(ids)} tokens; perplexity needs at least 2")
    bos = _bos(engine)
    params = SamplingParams(prompt_logprobs=0, max_tokens=1, temperature=0, ignore_eos=True)
    parts = windows(len(ids), window - len(bos), min(stride, window - len(bos)), first=bool(bos))
    before, start = engine.stats.computed_tokens, time.perf_counter()
    for i, part in enumerate(parts):
        engine.add_request(str(i), [*bos, *ids[part.start : part.end]], params)
    nll, tokens = 0.0, 0
    while engine.has_unfinished():
        for out in engine.step():
            part = parts[int(out.request_id)]
            scores = out.prompt_logprobs
            assert scores is not None
            for position in range(part.scored, part.end):
                entry = scores[position - part.start + len(bos)]
                assert entry is not None
                nll -= entry[ids[position]].logprob
            tokens += part.end - part.scored
    if not math.isfinite(nll):
        raise DataError(f"the log-likelihood of the text is {nll}", "another --dtype may hold the model's numbers")
    return Perplexity(nll, tokens, engine.stats.computed_tokens - before, time.perf_counter() - start)


def read_text(file: Path | None) -> tuple[str, str]:
    """Name and content of a text file, or of the text that anyrig brings along (see `data/README.md`).

    Raises:
        DataError: unreadable, or not UTF-8.
    """
    if file is None:
        return OWN_TEXT, resources.files("anyrig.bench").joinpath("data", OWN_TEXT).read_text("utf-8")
    try:
        return file.name, file.expanduser().read_text("utf-8")
    except OSError as error:
        raise DataError(f"cannot read the text {file} ({error.strerror})") from None
    except UnicodeDecodeError:
        raise DataError(f"not UTF-8 text: {file}") from None


def result(
    model: str, name: str, text: str, window: int, stride: int, measured: Sequence[tuple[str, str, Perplexity]]
) -> dict[str, Any]:
    """What `eval perplexity --json` prints.

    Args:
        measured: kind of weights, what ran, and the result; changes are against the first.
    """
    base = measured[0][2].value
    return {
        "what": "perplexity",
        "model": model,
        "text": name,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "window": window,
        "stride": stride,
        "tokens": measured[0][2].tokens,
        "results": [
            {
                "weights": weights,
                "variant": variant,
                "perplexity": round(p.value, 4),
                "change_percent": round(100 * (p.value / base - 1), 3) if i else None,
                "nll": round(p.nll, 3),
                "tokens_per_s": round(p.computed / p.seconds, 1),
                "seconds": round(p.seconds, 2),
            }
            for i, (weights, variant, p) in enumerate(measured)
        ],
    }


def _bos(engine: Engine) -> list[int]:
    """The token that the tokenizer puts before a text, if any."""
    with_special, without = (engine.tokenizer.encode("a", add_special_tokens=special) for special in (True, False))
    return with_special[:1] if with_special[:1] != without[:1] else []
