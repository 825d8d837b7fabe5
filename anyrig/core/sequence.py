"""One sequence of tokens on its way through the scheduler."""

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of one completion (a request with `n` completions has `n` of these).

    Invariant between two steps: keys and values of `tokens[:computed]` are in `pages`, and
    `computed < len(tokens)` while it runs (the last token is the next step's input).

    Attributes:
        seq_id: the engine's number, rising with arrival.
        tokens: prompt and output.
        num_prompt: how many of them are prompt.
        priority: lower runs first; among equals the older one.
        computed: tokens whose keys and values are in the pages.
        pages: block table.
        hashes: content hashes of the full pages so far.
        cached: prompt tokens that came from the prefix cache at the first start.
        leader: a sequence with the same prompt that computes it for this one to share, or None.
        row_from: positions from here on need logits although they are not the last (prompt log-probabilities);
            None: only the last position does.
        salt: part of the page hashes; sequences with another salt share nothing with this one.
    """

    seq_id: int
    tokens: list[int]
    num_prompt: int
    priority: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    cached: int | None = None
    leader: "Sequence | None" = None
    row_from: int | None = None
    salt: str = ""
    running: bool = False
    finished: bool = False

    @property
    def order(self) -> tuple[int, int]:
        """Who comes first."""
        return (self.priority, self.seq_id)

    @property
    def prompt_computed(self) -> bool:
        return self.computed >= self.num_prompt or self.finished
