"""Contract of paged attention: one op for prefill, decode and any mixture of them.

The keys and values of a step are written to their pages first and read back from there, so that a token sees the same
bits whether it was computed in this step or in an earlier one. A row's result depends on nothing but its own query and
the keys and values it may see: not on the other rows, not on how the prompt was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from anyrig.core.spec import LayerSpec, StepPlan

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class KVPages:
    """Keys and values of one layer.

    Attributes:
        k: `[kv_heads, num_pages, page_size, dim]`
        v: `[kv_heads, num_pages, page_size, v_dim]`

    Head first, so that the pages of one head can be gathered as rows of one flat table, and page 0 is the trash page.
    The order of numbers within a page of a head belongs to the implementation that writes and reads them.
    """

    k: torch.Tensor
    v: torch.Tensor


class AttentionStep(Protocol):
    """Work of one step, planned once and shared by all layers."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerSpec,
        kv: KVPages,
        sinks: torch.Tensor | None = None,
        *,
        write: bool = True,
    ) -> torch.Tensor:
        """Attention of one layer.

        Args:
            q: `[heads, tokens, dim]`, rope applied.
            k: `[kv_heads, tokens, dim]`
            v: `[kv_heads, tokens, v_dim]`
            layer: what the layer asks for.
            kv: the layer's pages; `k` and `v` are written there unless `write` is False.
            sinks: `[heads]`, when `layer.sinks`.

        Returns:
            `[tokens, heads, v_dim]` in the dtype of `q`; rows of padding tokens hold zeros.
        """
        ...


class AttentionOp(Protocol):
    """An implementation, made once per engine."""

    name: str

    def __init__(self, page_size: int, device: str = "cpu", threads: int | None = None) -> None:
        """`threads`: for kernels that have their own; None: the cores that this process may use."""
        ...

    @staticmethod
    def why_not(layers: Sequence[LayerSpec], page_size: int, dtype: torch.dtype) -> str | None:
        """Why it can't compute these layers on pages of this size and dtype, or None when it can."""
        ...

    def prepare(self, plan: StepPlan, num_tokens: int) -> AttentionStep:
        """Plan the work of a step whose flat batch has `num_tokens` rows (the plan's, then padding)."""
        ...
