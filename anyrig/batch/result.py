"""The added columns of a row, from what the engine returned or from what went wrong before it."""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from anyrig.batch.row import Row, RowResult
from anyrig.core.outputs import CompletionOutput, RequestOutput
from anyrig.core.params import SamplingParams


class Columns:
    """Makes the added columns of rows.

    With `n` > 1 every per-output column (output, finish_reason, output_tokens, logprobs) is a list; `error` and
    `prompt_tokens` are the row's.
    """

    def __init__(self, params: SamplingParams, prefix: str = "") -> None:
        self._prefix = prefix
        self._many = params.n > 1
        self._json = params.json_schema is not None
        self._whole = params.choices is not None  # part of a choice is no choice
        self._logprobs = params.logprobs is not None
        names = ["output", "finish_reason", "error", "prompt_tokens", "output_tokens"]
        self._own = names + (["logprobs"] if self._logprobs else [])

    @property
    def names(self) -> list[str]:
        return [self._prefix + name for name in self._own]

    def types(self) -> dict[str, Any]:
        """JSON types (`arrow_types.py`) as far as they don't depend on the rows."""
        per_output = {
            "output": "null" if self._json else "string",
            "finish_reason": "string",
            "output_tokens": "int",
            "logprobs": "null",
        }
        types: dict[str, Any] = {k: {"list": t} if self._many else t for k, t in per_output.items()}
        return self._columns({**types, "error": "string", "prompt_tokens": "int"})

    def error_of(self, result: RowResult) -> str:
        return str(result.added[self._prefix + "error"])

    def failed(self, message: str) -> RowResult:
        """A row that never reached the engine."""
        return RowResult(self._named("error", message), failed=True)

    def skipped(self) -> RowResult:
        return RowResult(self._named("skipped", None), skipped=True)

    def finished(self, out: RequestOutput, where: str) -> RowResult:
        """A row that the engine is done with."""
        outputs = sorted(out.outputs, key=lambda c: c.index)
        texts, errors = zip(*(self._output(c) for c in outputs), strict=True)
        problems = [e for e in errors if e is not None]
        per_output: dict[str, list[Any]] = {
            "output": list(texts),
            "finish_reason": [c.finish_reason for c in outputs],
            "output_tokens": [len(c.token_ids) for c in outputs],
        }
        if self._logprobs:
            per_output["logprobs"] = [_logprobs(c) for c in outputs]
        values = {name: column if self._many else column[0] for name, column in per_output.items()}
        values["error"] = f"{where}: {problems[0]}" if problems else None
        values["prompt_tokens"] = len(out.prompt_token_ids)
        return RowResult(
            self._columns(values),
            failed=bool(problems),
            prompt_tokens=len(out.prompt_token_ids),
            cached_tokens=out.num_cached_tokens,
            output_tokens=sum(per_output["output_tokens"]),
        )

    def _output(self, completion: CompletionOutput) -> tuple[Any, str | None]:
        if completion.finish_reason == "error":
            return None, completion.error or "the engine gave no reason"
        if not (self._json or self._whole):
            return completion.text, None
        if completion.finish_reason != "stop":
            return None, (
                f"the output was cut after {len(completion.token_ids)} tokens, before it was complete"
                f" ({completion.text[-60:]!r}): raise --max-tokens"
            )
        if self._whole:
            return completion.text, None
        try:
            return json.loads(completion.text), None
        except ValueError:  # `stop` strings can cut it
            return None, f"the output is not JSON: {completion.text[:100]!r}"

    def _named(self, finish_reason: str, error: str | None) -> dict[str, Any]:
        """A row without any output."""
        values = dict.fromkeys(self._own)
        return self._columns(
            {**values, "finish_reason": [finish_reason] if self._many else finish_reason, "error": error}
        )

    def _columns(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {self._prefix + name: values[name] for name in self._own}


def row_seed(run_seed: int, source: str, row: Row) -> int:
    """Seed of a row: of the run, the file's name and the row's number, so that a row done again equals itself."""
    text = f"{run_seed}\n{source}\n{row.position.number}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def _logprobs(completion: CompletionOutput) -> list[dict[str, Any]] | None:
    """Per token: the sampled one with its log-probability, and the most likely ones."""
    if completion.logprobs is None:
        return None

    def entry(token_id: int, place: int) -> dict[str, Any]:
        known = completion.logprobs[place][token_id]  # type: ignore[index]
        value = known.logprob if math.isfinite(known.logprob) else None
        return {"token_id": token_id, "token": known.decoded_token, "logprob": value, "rank": known.rank}

    return [
        {**entry(sampled, place), "top": [entry(i, place) for i in completion.logprobs[place]]}
        for place, sampled in enumerate(completion.token_ids)
    ]
