"""What a request wants done to the model's logits before sampling: bias, bans, penalties, grammar."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from anyrig.core.errors import InvalidRequest
from anyrig.core.params import SamplingParams
from anyrig.engine.structured import Grammar

if TYPE_CHECKING:  # imported where it is used: a prepared model that needs no adjustment starts without it
    import torch


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Refuse token ids that the model doesn't have.

    Raises:
        InvalidRequest: naming the parameter, the id and the allowed range.
    """
    for name in ("logit_bias", "allowed_token_ids", "banned_token_ids", "stop_token_ids"):
        for token in getattr(params, name) or ():
            if not 0 <= token < vocab_size:
                raise InvalidRequest(f"`{name}` has token id {token}, but the model's are 0 to {vocab_size - 1}")


class Adjustment:
    """The changes that one sequence asks for, with the token counts that its penalties need (kept between steps).

    Order, as in vLLM: allowed and banned tokens, grammar, bias, repetition penalty, frequency and presence penalty.
    `allowed_token_ids`, `banned_token_ids` and `min_tokens` never free what another of them forbids.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        eos_ids: Iterable[int],
        grammar: Grammar | None,
    ) -> None:
        self.params = params
        self.grammar = grammar
        self.ends = sorted({*eos_ids, *params.stop_token_ids})
        self.penalised = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
        self._prompt_ids = prompt_ids if params.repetition_penalty != 1 else ()
        self._slots: dict[int, int] = {}
        self._ids = np.empty(0, np.int64)
        self._counts = np.empty(0, np.float32)
        self._counted = -1

    @property
    def needed(self) -> bool:
        """Whether anything is ever changed."""
        p = self.params
        lists = p.logit_bias, p.allowed_token_ids, p.banned_token_ids
        return self.penalised or self.grammar is not None or p.min_tokens > 0 or any(x is not None for x in lists)

    def apply(self, logits: torch.Tensor, output_ids: Sequence[int]) -> None:
        """Change one row of float32 logits [V] in place; forbidden tokens become -inf."""
        p = self.params
        ended = False
        if p.allowed_token_ids is not None:
            _keep_only(logits, _index(p.allowed_token_ids, logits))
        if p.banned_token_ids:
            logits[_index(p.banned_token_ids, logits)] = -math.inf
        if self.grammar is not None:
            self._constrain(logits, self.grammar)
            ended = self.grammar.finished
        # A finished grammar leaves the end token only: `min_tokens` cannot be kept then.
        if len(output_ids) < p.min_tokens and not ended:
            logits[_index(self.ends, logits)] = -math.inf
        if p.logit_bias:
            import torch

            at = _index(p.logit_bias, logits)
            logits[at] += torch.tensor(list(p.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        if self.penalised:
            self._penalise(logits, output_ids)

    def _constrain(self, logits: torch.Tensor, grammar: Grammar) -> None:
        import torch

        few = grammar.allowed_if_few(len(logits))
        if few is not None:
            _keep_only(logits, torch.from_numpy(few).to(logits.device))
        else:
            logits.masked_fill_(torch.from_numpy(~grammar.allowed(len(logits))).to(logits.device), -math.inf)

    def _penalise(self, logits: torch.Tensor, output_ids: Sequence[int]) -> None:
        import torch

        p = self.params
        self._count(output_ids)
        used = len(self._slots)
        at = torch.from_numpy(self._ids[:used]).to(logits.device)
        counts = torch.from_numpy(self._counts[:used]).to(logits.device)
        values = logits[at]
        if p.repetition_penalty != 1:
            values = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
        if p.frequency_penalty != 0:
            values = values - counts * p.frequency_penalty
        if p.presence_penalty != 0:
            values = values - (counts > 0) * p.presence_penalty
        logits[at] = values

    def _count(self, output_ids: Sequence[int]) -> None:
        """Bring the counts (occurrences in the output; prompt tokens are there with 0) up to `output_ids`."""
        if not 0 <= self._counted <= len(output_ids):
            self._slots.clear()
            for token in self._prompt_ids:
                self._slot(token)
            self._counted = 0
        for token in output_ids[self._counted :]:
            slot = self._slot(token)  # may move the counts
            self._counts[slot] += 1
        self._counted = len(output_ids)

    def _slot(self, token: int) -> int:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            if slot == len(self._ids):
                more = max(64, slot)
                self._ids = np.concatenate([self._ids, np.zeros(more, np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(more, np.float32)])
            self._ids[slot], self._counts[slot] = token, 0
        return slot


def _index(ids: Iterable[int], logits: torch.Tensor) -> torch.Tensor:
    """Ids that the row has, as an index; end tokens of a tokenizer may lie beyond a model's logits."""
    import torch

    return torch.tensor([i for i in ids if i < len(logits)], dtype=torch.int64, device=logits.device)


def _keep_only(logits: torch.Tensor, at: torch.Tensor) -> None:
    saved = logits[at]
    logits.fill_(-math.inf)
    logits[at] = saved
