"""One of the `n` completions of a request: from sampled tokens to text, until something ends it."""

from collections.abc import Sequence as SequenceABC

from anyrig.core.outputs import CompletionOutput, FinishReason, Logprob, TokenLogprobs
from anyrig.core.params import SamplingParams
from anyrig.core.sequence import Sequence
from anyrig.engine.detokenizer import Detokenizer
from anyrig.engine.rows import Sampled, SampleRow
from anyrig.engine.stop import StopChecker
from anyrig.engine.structured import Grammar
from anyrig.models.tokenizer import Tokenizer


class Completion:
    """Takes one sampled token per step and keeps `output` true.

    Text is made as it comes only when somebody looks at it on the way (`stream`) or a stop string may end it;
    otherwise once, at the end.
    """

    def __init__(
        self,
        index: int,
        sequence: Sequence,
        params: SamplingParams,
        tokenizer: Tokenizer,
        eos_ids: SequenceABC[int],
        max_len: int,
        seed: int,
        grammar: Grammar | None,
        stream: bool,
    ) -> None:
        self.sequence = sequence
        self.params = params
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.max_tokens = min(params.max_tokens or max_len, max_len - sequence.num_prompt)
        wanted = params.logprobs is not None
        self.output = CompletionOutput(
            index, logprobs=[] if wanted else None, cumulative_logprob=0.0 if wanted else None
        )
        prompt = sequence.tokens[: sequence.num_prompt]
        self.row = SampleRow(params, prompt, self.output.token_ids, seed, grammar, tuple(eos_ids))
        self.grammar = grammar
        self._detokenizer = Detokenizer(tokenizer, prompt, params.skip_special_tokens)
        self._stop = StopChecker(params.stop, params.include_stop_str_in_output)
        self._incremental = stream or bool(params.stop)
        self._pushed = 0

    @property
    def finished(self) -> bool:
        return self.output.finish_reason is not None

    def take(self, sampled: Sampled) -> None:
        """One more token; `output.finish_reason` is set when it was the last one."""
        if sampled.error is not None:
            self.fail(sampled.error)
            return
        out, token = self.output, sampled.token_id
        out.token_ids.append(token)
        self.sequence.tokens.append(token)
        if sampled.logprobs is not None and out.logprobs is not None:
            out.logprobs.append(decoded(sampled.logprobs, self.tokenizer))
            out.cumulative_logprob = (out.cumulative_logprob or 0.0) + (sampled.logprob or 0.0)
        if self.grammar is not None and not self.grammar.accept(token):
            self.fail(f"the grammar can't go on: {self.grammar.error}")
            return
        count = len(out.token_ids)
        may_stop = count >= self.params.min_tokens
        if may_stop and token in self.params.stop_token_ids:
            self._end("stop", token, text_of_last=False)
        elif may_stop and token in self.eos_ids and not self.params.ignore_eos:
            self._end("stop", text_of_last=not self.params.skip_special_tokens)
        elif self._incremental and self._stopped_by_text(may_stop):
            return
        elif self.grammar is not None and self.grammar.finished:
            self._end("stop")
        elif count >= self.max_tokens:
            self._end("length")

    def fail(self, message: str) -> None:
        self.output.error = message
        self._end("error")

    def abort(self) -> None:
        if not self.finished:
            self._end("abort")

    def _stopped_by_text(self, may_stop: bool) -> bool:
        return self._release(self._push_until(len(self.output.token_ids)), may_stop)

    def _push_until(self, end: int) -> str:
        """Text that the tokens up to `end` add for good."""
        text = self._detokenizer.push(self.output.token_ids[self._pushed : end])
        self._pushed = max(self._pushed, end)
        return text

    def _release(self, text: str, may_stop: bool) -> bool:
        """Show the text that can't become part of a stop string. True when a stop string ended the completion."""
        shown, hit = self._stop.push(text, may_stop)
        self.output.text += shown
        if hit is not None:
            self.output.finish_reason, self.output.stop_reason = "stop", hit
        return hit is not None

    def _end(self, reason: FinishReason, stop_reason: int | None = None, *, text_of_last: bool = True) -> None:
        """Finish, with whatever text is still held back. A stop string in that text still counts."""
        self.output.finish_reason = reason
        self.output.stop_reason = stop_reason
        text = self._push_until(len(self.output.token_ids) - (not text_of_last)) + self._detokenizer.flush()
        if not self._release(text, len(self.output.token_ids) >= self.params.min_tokens):
            self.output.text += self._stop.flush()


def decoded(scores: dict[int, tuple[float, int]], tokenizer: Tokenizer) -> TokenLogprobs:
    """Log-probabilities with the tokens' text, in the order of `scores`."""
    return {token: Logprob(value, rank, tokenizer.token_text(token)) for token, (value, rank) in scores.items()}
