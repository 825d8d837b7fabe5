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
from anyrig.engine.torch_threads import torch_threads
from anyrig.ops.cpu import native
from anyrig.ops.cpu.draw import draw
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
                if not math.isfinite(result.best_logits[at[i]]):
                    sampled[i] = Sampled(-1, error=NOT_FINITE)  # whatever the row needs
                elif row.plain and row.params.logprobs is None:
                    sampled[i] = Sampled(result.best[at[i]])
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
        with torch_threads(self._torch_threads(logits)):
            return self._sampler().prompt_logprobs(_tensor(logits), target_ids, k)

    def _draw(self, logits: Any, at: Sequence[int], rows: Sequence[SampleRow], sampled: list[Sampled | None]) -> None:
        """Rows without adjustments or log-probabilities, drawn in place by the kernels; their logits are spent."""
        todo = [i for i, row in enumerate(rows) if sampled[i] is None and row.simple]
        module = native.module()
        if not todo or module is None:
            return
        tokens = draw(module, logits, [at[i] for i in todo], [rows[i].draw() for i in todo], self._threads)
        for i, token in zip(todo, tokens, strict=True):
            sampled[i] = Sampled(token)

    def _with_torch(self, logits: Any, rows: Sequence[SampleRow]) -> list[Sampled]:
        with torch_threads(self._torch_threads(logits)):
            return self._sampler().sample(_tensor(logits), rows)

    def _torch_threads(self, logits: Any) -> int | None:
        """One where the CPU kernels compute the steps; None: torch's."""
        on_cpu = isinstance(logits, np.ndarray) or logits.device.type == "cpu"
        return 1 if on_cpu and native.module() is not None else None

    def _sampler(self) -> "Sampler":
        if self._torch is None:
            from anyrig.engine.sampler import Sampler

            self._torch = Sampler(self.vocab_size, self.logprobs_mode)
        return self._torch


def _tensor(logits: Any) -> Any:
    if not isinstance(logits, np.ndarray):
        return logits
    import torch

    return torch.from_numpy(logits)
