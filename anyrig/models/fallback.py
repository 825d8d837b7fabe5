"""Models that the paged path can't run (recurrent layers, attention of their own): Transformers' forward and cache.

Slow and plain: one sequence after the other, each with a cache object of its own. Everything around the forward,
sampling, structured output, streaming, is the same as on the paged path.
"""

from typing import Any

import torch

from anyrig.core.spec import Chunk
from anyrig.models.probe import takes


class Fallback:
    """One model and the caches of the sequences that are on their way."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model: Any = model
        self.device = next(model.parameters()).device
        self._caches: dict[int, Any] = {}
        forward = type(model).forward
        self._cache_name = next((n for n in ("cache", "past_key_values", "cache_params") if takes(forward, n)), None)
        self._keep = takes(forward, "logits_to_keep")

    @torch.inference_mode()
    def forward(self, chunk: Chunk) -> torch.Tensor | None:
        """Logits `[chunk.rows, vocab]` of the chunk's last rows, or None when it asks for none."""
        cache = self._caches.get(chunk.seq_id) if chunk.start else None
        kwargs: dict[str, Any] = {"use_cache": True}
        if self._cache_name is not None and cache is not None:
            kwargs[self._cache_name] = cache
        if self._keep:
            kwargs["logits_to_keep"] = max(1, chunk.rows)
        if takes(type(self.model).forward, "position_ids"):
            kwargs["position_ids"] = torch.arange(chunk.start, chunk.start + chunk.length, device=self.device)[None]
        out = self.model(input_ids=torch.tensor([chunk.tokens], device=self.device), **kwargs)
        # Read by name from the instance: outputs that renamed the field keep the old name as a property.
        names = (self._cache_name, "cache", "past_key_values", "cache_params", "state")
        self._caches[chunk.seq_id] = next((out[n] for n in names if n and out.get(n) is not None), None)
        return out.logits[0, -chunk.rows :] if chunk.rows else None

    def forget(self, seq_id: int) -> None:
        self._caches.pop(seq_id, None)
