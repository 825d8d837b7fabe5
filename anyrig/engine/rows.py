"""What is sampled for, and what comes of it: one row of logits of one sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from anyrig.core.params import SamplingParams
from anyrig.engine.adjust import Adjustment
from anyrig.engine.structured import Grammar
from anyrig.ops.sample import Draw, TokenScores, uniform

# Below this the division would only make infinities: greedy, as in vLLM.
_COLDEST = 1e-5

NOT_FINITE = "the model's logits are not finite (NaN or infinity)"


@dataclass(slots=True)
class SampleRow:
    """One sequence to sample for. Made once per sequence and given again at every step: it keeps penalty counts.

    Attributes:
        params: checked by `check_token_ids` when the request came in.
        prompt_ids: for the repetition penalty.
        output_ids: tokens generated so far; the list that the caller appends to.
        seed: of this sequence (`ops.sample.sequence_seed`); with the number of tokens so far it decides the draw.
        grammar: advanced by the caller with each token.
        eos_ids: end tokens, forbidden before `min_tokens`.
    """

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: list[int]
    seed: int
    grammar: Grammar | None = None
    eos_ids: Sequence[int] = ()
    adjustment: Adjustment | None = field(init=False, repr=False)
    greedy: bool = field(init=False)

    def __post_init__(self) -> None:
        adjustment = Adjustment(self.params, self.prompt_ids, self.eos_ids, self.grammar)
        self.adjustment = adjustment if adjustment.needed else None
        self.greedy = self.params.temperature < _COLDEST

    @property
    def plain(self) -> bool:
        """The most likely token, of the logits as they are."""
        return self.greedy and self.adjustment is None

    @property
    def simple(self) -> bool:
        """Drawn from the logits as they are, and nothing but the token is wanted."""
        return not self.greedy and self.adjustment is None and self.params.logprobs is None

    def draw(self) -> Draw:
        p = self.params
        return Draw(p.temperature, uniform(self.seed, len(self.output_ids)), p.min_p, p.top_k, p.top_p)


@dataclass(slots=True)
class Sampled:
    """One sampled token.

    Attributes:
        token_id: -1 when there is an error.
        logprob: of the token; None when not asked for.
        logprobs: id -> (log-probability, rank), the sampled token first; None when not asked for.
        error: why this row has no token.
    """

    token_id: int
    logprob: float | None = None
    logprobs: TokenScores | None = None
    error: str | None = None
