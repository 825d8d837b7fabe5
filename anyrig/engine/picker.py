"""From the result of a step to tokens, by the shortest way that each row allows.

1. The most likely token as the model's logits are: the runner may have found it without writing any logits.
2. Temperature, top_k, top_p, min_p: drawn by the CPU kernels, where the logits are theirs.
3. Everything else (penalties, grammars, log-probabilities, other devices): `Sampler`, which needs torch. It is imported
   when the first such row comes: a prepared model starts without it.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from anyrig.core.spec import StepResult
from anyrig.engine.rows import NOT_FINITE, Sampled, SampleRow
from anyrig.ops.cpu import native
from anyrig.ops.sample import TokenScores

if TYPE_CHECKING:
    from anyrig.engine.sampler import Sampler


class Picker:
    """Samples one token per row of a step; a row's result does not depend on its company.

    Args:
        vocab_size: width of the logits.
        logprobs_mode: see `Sampler`.
        threads: for the CPU kernels.
    """

    def __init__(
        self, vocab_size: int, logprobs_mode: Literal["raw", "processed"] = "raw", threads: int | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self.logprobs_mode = logprobs_mode
        self._threads = threads or 1
        self._torch: Sampler | None = None

    def sample(self, result: StepResult, at: Sequence[int], rows: Sequence[SampleRow]) -> list[Sampled]:
        """One token per row.

        Args:
            result: of the step.
            at: which of its rows each of `rows` is.
            rows: whom the tokens are for.
        """
        sampled: list[Sampled | None] = [None] * len(rows)
        if result.best is not None and result.best_logits is not None:
            for i, row in enumerate(rows):
                if row.plain and row.params.logprobs is None:
                    finite = math.isfinite(result.best_logits[at[i]])
                    sampled[i] = Sampled(result.best[at[i]]) if finite else Sampled(-1, error=NOT_FINITE)
                elif (
                    row.simple
                    and isinstance(result.logits, np.ndarray)
                    and not math.isfinite(result.best_logits[at[i]])
                ):
                    sampled[i] = Sampled(-1, error=NOT_FINITE)
        if isinstance(result.logits, np.ndarray):
            self._draw(result.logits, at, rows, sampled)
        left = [i for i, token in enumerate(sampled) if token is None]
        if left:
            picked = [at[i] for i in left]
            logits = result.logits if picked == list(range(len(result.logits))) else result.logits[picked]
            for i, token in zip(left, self._with_torch(logits, [rows[i] for i in left]), strict=True):
                sampled[i] = token
        return [token for token in sampled if token is not None]

    def prompt_logprobs(self, logits: Any, target_ids: Sequence[int], k: int) -> list[TokenScores]:
        """See `Sampler.prompt_logprobs`; logits may be a numpy array."""
        sampler = self._sampler()
        if isinstance(logits, np.ndarray):
            import torch

            logits = torch.from_numpy(logits)
        return sampler.prompt_logprobs(logits, target_ids, k)

    def _draw(self, logits: Any, at: Sequence[int], rows: Sequence[SampleRow], sampled: list[Sampled | None]) -> None:
        """Rows without adjustments or log-probabilities, drawn in place by the kernels; their logits are spent."""
        todo = [i for i, row in enumerate(rows) if sampled[i] is None and row.simple]
        module = native.module()
        if not todo or module is None:
            return
        draws = [rows[i].draw() for i in todo]
        ids = np.empty(len(todo), np.int32)
        module.draw(
            logits,
            np.array([at[i] for i in todo], np.int32),
            np.array([d.temperature for d in draws], np.float32),
            np.array([d.uniform for d in draws], np.float64),
            np.array([d.min_p for d in draws], np.float32),
            np.array([d.top_k for d in draws], np.int32),
            np.array([d.top_p for d in draws], np.float32),
            ids,
            False,
            self._threads,
        )
        for i, token in zip(todo, ids.tolist(), strict=True):
            sampled[i] = Sampled(token)

    def _with_torch(self, logits: Any, rows: Sequence[SampleRow]) -> list[Sampled]:
        sampler = self._sampler()
        if not isinstance(logits, np.ndarray):
            return sampler.sample(logits, rows)
        import torch

        # One thread: torch's own would go on spinning on the cores that the kernels are about to need.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return sampler.sample(torch.from_numpy(logits), rows)
        finally:
            torch.set_num_threads(threads)

    def _sampler(self) -> "Sampler":
        if self._torch is None:
            from anyrig.engine.sampler import Sampler

            self._torch = Sampler(self.vocab_size, self.logprobs_mode)
        return self._torch
