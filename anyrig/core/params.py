"""How one request is sampled. Names and defaults are those of the field (vLLM `sampling_params.py`, OpenAI's API)."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, Self

from anyrig.core.errors import InvalidRequest

MAX_LOGPROBS = 1024


def _param(help: str, default: Any = None, **kwargs: Any) -> Any:
    return field(default=default, metadata={"help": help}, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one request; validated when made, so that a request that exists can be run.

    `temperature=0` is greedy. A field left at its default takes the model's `generation_config` value where the
    caller asked for that (`LLM.default_params`); nothing is taken from there silently otherwise.

    Raises:
        InvalidRequest: naming the field, the value and the allowed range.
    """

    max_tokens: int | None = _param("most tokens to generate; unset: what is left of the context", 16)
    min_tokens: int = _param("no end token or stop string counts before this many tokens", 0)
    temperature: float = _param("randomness; 0 is greedy", 1.0)
    top_p: float = _param("keep the smallest set of tokens whose probabilities add up to this", 1.0)
    top_k: int = _param("keep the k most likely tokens; 0 keeps all", 0)
    min_p: float = _param("drop tokens below this share of the most likely one's probability", 0.0)
    seed: int | None = _param("seed of this request; unset: drawn from the engine's seed")
    n: int = _param("completions per prompt", 1)
    repetition_penalty: float = _param("above 1 discourages tokens of the prompt and the output", 1.0)
    presence_penalty: float = _param("subtracted once from the logit of every token already in the output", 0.0)
    frequency_penalty: float = _param("subtracted per occurrence in the output", 0.0)
    logit_bias: Mapping[int, float] | None = _param("added to the logits of these token ids")
    allowed_token_ids: Sequence[int] | None = _param("only these token ids may be generated")
    banned_token_ids: Sequence[int] | None = _param("these token ids are never generated")
    stop: Sequence[str] = _param("strings that end the output; they are not part of it", ())
    stop_token_ids: Sequence[int] = _param("token ids that end the output", ())
    include_stop_str_in_output: bool = _param("keep the stop string in the text", False)
    ignore_eos: bool = _param("go on after the end token", False)
    logprobs: int | None = _param("log-probabilities of this many most likely tokens, and of the sampled one")
    prompt_logprobs: int | None = _param("the same for the prompt's tokens (reads nothing from the prefix cache)")
    skip_special_tokens: bool = _param("leave special tokens out of the text", True)
    choices: Sequence[str] | None = _param("the output is exactly one of these strings")
    regex: str | None = _param("the output matches this regular expression")
    json_schema: Mapping[str, Any] | str | None = _param("the output is JSON that satisfies this schema")

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, ())
        self._check()

    def _check(self) -> None:
        def fail(name: str, must: str) -> None:
            raise InvalidRequest(f"`{name}` must be {must}. Given: {getattr(self, name)!r}")

        def number(name: str, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
            value = getattr(self, name)
            known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not known or not low <= value <= high or (open_low and value == low):
                bound = f"{'greater than' if open_low else 'at least'} {low:g}"
                fail(name, bound if high == math.inf else f"{bound} and at most {high:g}")

        def whole(name: str, low: int, high: float = math.inf, *, optional: bool = False) -> None:
            value = getattr(self, name)
            if value is None and optional:
                return
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                fail(name, f"a whole number of at least {low}" + ("" if high == math.inf else f" and at most {high}"))

        whole("max_tokens", 1, optional=True)
        whole("min_tokens", 0)
        whole("n", 1, 1024)
        whole("top_k", 0)
        whole("seed", -(2**63), 2**63 - 1, optional=True)
        whole("logprobs", 0, MAX_LOGPROBS, optional=True)
        whole("prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        number("temperature", 0.0)
        number("top_p", 0.0, 1.0, open_low=True)
        number("min_p", 0.0, 1.0)
        number("repetition_penalty", 0.0, open_low=True)
        number("presence_penalty", -2.0, 2.0)
        number("frequency_penalty", -2.0, 2.0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"`min_tokens` ({self.min_tokens}) must not exceed `max_tokens` ({self.max_tokens})")
        if any(not isinstance(s, str) or not s for s in self.stop):
            fail("stop", "strings that are not empty")
        for name in ("logit_bias", "allowed_token_ids", "banned_token_ids", "stop_token_ids"):
            if any(not isinstance(t, Integral) or isinstance(t, bool) for t in getattr(self, name) or ()):
                fail(name, "given by token ids, whole numbers")
        if self.logit_bias is not None and any(not isinstance(b, Real) for b in self.logit_bias.values()):
            fail("logit_bias", "finite numbers by token id")
        if self.logit_bias is not None and any(not math.isfinite(b) for b in self.logit_bias.values()):
            fail("logit_bias", "finite numbers by token id")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            fail("allowed_token_ids", "unset or hold at least one id")
        if self.choices is not None and (
            not self.choices or any(not isinstance(c, str) or not c for c in self.choices)
        ):
            fail("choices", "a list of at least one string, none of them empty")
        if sum(x is not None for x in (self.choices, self.regex, self.json_schema)) > 1:
            raise InvalidRequest("only one of `choices`, `regex` and `json_schema` can be given")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def structured(self) -> bool:
        """Whether a grammar constrains the output."""
        return self.choices is not None or self.regex is not None or self.json_schema is not None

    def replace(self, **changes: Any) -> Self:
        return replace(self, **changes)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Parameters from a row, a request body or a file; an unknown key is an error with the nearest name.

        Raises:
            InvalidRequest: on an unknown key or an invalid value.
        """
        from difflib import get_close_matches

        names = {f.name for f in fields(cls)}
        for key in values:
            if key not in names:
                near = get_close_matches(key, names, 1)
                raise InvalidRequest(
                    f"unknown sampling parameter `{key}`", f"did you mean `{near[0]}`?" if near else None
                )
        return cls(**values)

    def schema_text(self) -> str | None:
        """The JSON schema as text, whether it was given as text or as an object."""
        if self.json_schema is None or isinstance(self.json_schema, str):
            return self.json_schema
        return json.dumps(self.json_schema)


def generation_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's generation_config says about sampling, by the names of `SamplingParams`."""
    named = {**generation, **({"temperature": 0.0} if generation.get("do_sample") is False else {})}
    return {f.name: named[f.name] for f in fields(SamplingParams) if f.name in named}
