"""What a request returns. The shapes are those that vLLM's users know (`vllm/outputs.py`)."""

from dataclasses import dataclass, field, replace
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
        logprob: natural logarithm of the probability.
        rank: 1 for the most likely token of the vocabulary, 2 for the next one.
        decoded_token: the token's text.
    """

    logprob: float
    rank: int
    decoded_token: str


# One entry per generated token: the sampled token always, and the most likely ones that were asked for.
TokenLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` completions of a request.

    Attributes:
        index: which of the `n`.
        text: detokenized text, without special tokens, without the stop string (unless asked for).
        token_ids: generated ids, the end token included.
        logprobs: one dictionary per generated token, or None when not asked for.
        cumulative_logprob: sum of the sampled tokens' log-probabilities, or None when not asked for.
        finish_reason: None while running.
        stop_reason: the stop string or stop token id that ended it, None for the end token.
        error: what went wrong when finish_reason is "error".
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass(slots=True)
class Timing:
    """Moments of a request in seconds of `time.perf_counter`, None until they come."""

    arrived: float
    first_token: float | None = None
    finished: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """State of one request, at its end (`LLM.generate`) or so far (`stream`).

    Attributes:
        prompt: the prompt as text, None when ids were given.
        prompt_logprobs: one entry per prompt token (the first is None), or None when not asked for.
        num_cached_tokens: prompt tokens whose keys and values came from the prefix cache.
        finished: no more tokens will come for any of the completions.
        timing: None for a request that was refused.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    timing: Timing | None = None

    def snapshot(self) -> "RequestOutput":
        """A copy that stays as it is while this one grows."""
        outputs = [
            replace(o, token_ids=list(o.token_ids), logprobs=None if o.logprobs is None else list(o.logprobs))
            for o in self.outputs
        ]
        prompt_logprobs = None if self.prompt_logprobs is None else list(self.prompt_logprobs)
        timing = None if self.timing is None else replace(self.timing)
        return replace(self, outputs=outputs, prompt_logprobs=prompt_logprobs, timing=timing)
