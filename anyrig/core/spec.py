"""What the probe found out about a decoder, and what one step does: plain data shared by scheduler, models and ops."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer asks for, recorded by the probe forward (`models/probe.py`).

    Attributes:
        index: order of the call in a forward.
        name: module path, for messages.
        heads, kv_heads: query heads and key/value heads (`heads % kv_heads == 0`).
        dim, v_dim: head size of queries/keys, and of values.
        scaling: factor on the scores.
        window: a token sees itself and `window - 1` tokens before it; None: all.
        softcap: scores become `softcap * tanh(scores / softcap)`; None: unchanged.
        sinks: the layer passes one extra logit per head that takes part in the softmax (`s_aux`).
        kv_source: index of the layer whose keys and values this one reads (itself, unless shared).
    """

    index: int
    name: str
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    kv_source: int = -1


@dataclass(slots=True)
class Chunk:
    """The part of one sequence that one step computes: tokens `start .. start + length` of it.

    Attributes:
        seq_id: the engine's number of the sequence.
        tokens: ids to compute, `length` of them.
        start: position of the first one; keys and values of all positions below are in the pages.
        block_table: pages that hold positions `0 .. start + length`, in order.
        rows: how many logits rows the step returns for it, always the last ones of the chunk
            (0: a prompt that isn't finished; 1: the next token; more: prompt log-probabilities).
    """

    seq_id: int
    tokens: list[int]
    start: int
    block_table: list[int]
    rows: int = 1

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class StepPlan:
    """One step: the ragged batch, in the order of its rows.

    Attributes:
        chunks: work of this step.
        preempted: sequences whose pages were taken away before this step.
    """

    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(c.length for c in self.chunks)


@dataclass(slots=True)
class StepResult:
    """What a step gives for the rows that its chunks ask for, in their order.

    Attributes:
        logits: `[R, vocab]`, a torch tensor of any floating dtype or a float32 numpy array; None when only the best
            tokens were asked for.
        best: id of the most likely token of each row; None when the runner hands out logits only.
        best_logits: its logit, NaN where the row holds a NaN.
    """

    logits: Any = None
    best: list[int] | None = None
    best_logits: list[float] | None = None
