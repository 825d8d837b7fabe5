"""Rope variants that look at the whole batch are frozen at load.

Transformers' `dynamic_rope_update` picks the frequencies by the largest position of the batch, so that in a flat batch
one long request would change all others. The length that decides is `max_model_len` instead, once and for all
(vLLM does the same, pull request 27431).
"""

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def freeze_rope(model: torch.nn.Module, max_model_len: int) -> None:
    """Fix the frequencies of every rotary embedding whose kind depends on the length."""
    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, dict):  # one kind per type of layer
            for layer_type, one in list(kind.items()):
                if _moves(one):
                    _freeze(module, one, max_model_len, layer_type=layer_type)
                    kind[layer_type] = "default"
        elif _moves(kind):
            _freeze(module, kind, max_model_len)
            module.rope_type = "default"  # type: ignore[assignment]  # what the wrapper looks at


def _moves(kind: Any) -> bool:
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def _freeze(module: Any, kind: str, max_model_len: int, **layer: str) -> None:
    prefix = "".join(f"{name}_" for name in layer.values())
    old = getattr(module, f"{prefix}inv_freq")
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, old.device, seq_len=max_model_len, **layer)
    module.register_buffer(f"{prefix}inv_freq", inv_freq, persistent=False)
    setattr(module, f"{prefix}attention_scaling", scaling)
