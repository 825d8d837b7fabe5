"""Contract of sampling: the whole-vocabulary work between rows of logits and token ids.

What an implementation must keep, besides the result:

* **Batch invariance.** Everything about a row depends on that row alone, to the last bit: other rows, their number and
  the row's position change nothing.
* **Random numbers come from the caller**, one per row, by `uniform`: a row that is computed again (after a preemption)
  draws the same token.
* **Ties** go to the lowest id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

# Rows handed to `draw` and `logprobs` are padded with -inf to a multiple of this, so that partial sums and maxima over
# blocks need no special last block.
BLOCK = 256

# id -> (log-probability, rank); rank 1 is the most likely token of the vocabulary.
TokenScores = dict[int, tuple[float, int]]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is drawn; the filters act in this order, each on what the one before left (as vLLM's do).

    Attributes:
        temperature: divides the logits, above 0.
        uniform: random number in [0, 1).
        min_p: drop tokens below this share of the best one's probability; 0 drops none.
        top_k: keep the k best tokens, and those that tie with the k-th; 0 keeps all.
        top_p: keep the smallest set of best tokens that holds this share of what is left; 1 keeps all.
    """

    temperature: float
    uniform: float
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


class SampleOp(Protocol):
    """`W` is the padded width, `R` the number of rows, `scratch` memory to overwrite, shaped like `logits`."""

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Best token of each row and its logit, which is NaN where the row holds a NaN.

        Args:
            logits: [R, V] of any floating dtype and any V; left as it is.

        Returns:
            ids [R] int64 and values [R].
        """

    def draw(
        self, logits: torch.Tensor, draws: Sequence[Draw], scratch: torch.Tensor, mark_dropped: bool = False
    ) -> list[int]:
        """One token per row by inverting the cumulative distribution at `Draw.uniform`.

        Filters also drop what is less likely than float32's smallest normal number, 1e-38.

        Args:
            logits: [R, W] float32, contiguous, no NaN, at least one finite value per row. Overwritten: with the
                logits divided by the temperature (shifted so that the best is 0) and, if `mark_dropped`, -inf for
                every token that a filter dropped.
        """

    def logprobs(
        self, logits: torch.Tensor, ids: Sequence[int], ks: Sequence[int], scratch: torch.Tensor
    ) -> list[TokenScores]:
        """Log-softmax of each row at `ids[i]` (first) and at its `ks[i]` best tokens; tokens at -inf are left out.

        Args:
            logits: [R, W] float32, contiguous; left as it is.
        """


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): a bijection of 64-bit numbers that scatters."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, counter: int) -> float:
    """The `counter`-th random number in [0, 1) of `seed`, 53 bits; no state, so any of them can be had at any time.

    The seed is scattered first: neighbouring seeds must not give shifted copies of one stream.
    """
    return (_mix((_mix(seed & _MASK) + (counter + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def sequence_seed(seed: int, index: int) -> int:
    """64-bit seed of a request's completion number `index` (0 for the first), from the request's seed."""
    return _mix((_mix(seed & _MASK) + index * _GOLDEN) & _MASK)
