"""What a piece of work must compute and read, from the model's shapes alone: the numerators of GFLOP/s and GB/s.

Counted are products with weights (2 FLOP per weight and token), attention (2 per element of queries and of values and
position seen), weights read once per step, keys and values read and written. Norms, rope and sampling are left out:
they are below a percent. This is the least that the arithmetic needs: what a program does twice counts once.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from anyrig.models import checkpoint

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}

_TABLE = re.compile(r"(embed_tokens|wte|wpe|word_embeddings|embed_in|embeddings?|embed_positions)\.weight$")
_HEAD = re.compile(r"(lm_head|embed_out|output)\.weight$")


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer: heads, head sizes, and how far back a token sees (None: all)."""

    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    window: int | None = None

    @property
    def kv_width(self) -> int:
        """Elements of keys and values per token."""
        return self.kv_heads * (self.dim + self.v_dim)

    @property
    def flops(self) -> int:
        """Per pair of a token and a position that it sees."""
        return 2 * self.heads * (self.dim + self.v_dim)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one decoder, in weights.

    Attributes:
        parameters: all of them.
        table: embeddings that a token only looks up; 0 when they are the head too.
        head: the product that makes logits.
        experts: all experts of all layers together.
        expert_share: how much of them one token goes through.
        attention: its layers with keys and values.
    """

    parameters: int
    table: int
    head: int
    attention: tuple[Attention, ...]
    experts: int = 0
    expert_share: float = 1.0

    @property
    def body(self) -> int:
        """Weights that every token meets between embedding and logits, experts aside."""
        return self.parameters - self.table - self.head - self.experts

    def kv_bytes(self, itemsize: int) -> int:
        """Of one token."""
        return sum(a.kv_width for a in self.attention) * itemsize


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one phase: floating point (or integer) operations, and bytes moved to and from memory."""

    flops: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.weight_bytes + other.weight_bytes, self.kv_bytes + other.kv_bytes)


def read_shape(path: Path) -> Shape:
    """The shape of the model in a directory, from config.json and the headers of its weight files."""
    sizes: dict[str, int] = {}
    for file in checkpoint.weight_files(path):
        sizes |= {name: prod(entry["shape"]) for name, entry in checkpoint.read_header(file).items()}
    return shape_of(checkpoint.read_config(path), sizes)


def shape_of(config: Mapping[str, Any], sizes: Mapping[str, int]) -> Shape:
    """The shape that a Transformers configuration and the sizes of its tensors (name -> elements) describe."""
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, Mapping) else config
    table = sum(size for name, size in sizes.items() if _TABLE.search(name))
    head = sum(size for name, size in sizes.items() if _HEAD.search(name))
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    count = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
    return Shape(
        parameters=sum(sizes.values()),
        table=table if head else 0,
        head=head or table,
        attention=_attention(config),
        experts=experts,
        expert_share=_first(config, "num_experts_per_tok", default=1) / count if experts and count else 1.0,
    )


def phases(
    shape: Shape,
    lengths: Sequence[tuple[int, int]],
    *,
    prefill_steps: int,
    decode_steps: int,
    weight_bytes: float,
    kv_itemsize: int,
) -> tuple[Cost, Cost]:
    """Prefill and decode of requests given by `(prompt, generated)` tokens.

    Args:
        prefill_steps, decode_steps: each reads all weights once (of experts, those that its tokens meet on average).
        weight_bytes: of all parameters as they are kept, packed or quantised.
        kv_itemsize: bytes per element of keys and values.
    """
    prompts, decoded = [p for p, _ in lengths], [(p, p + g - 1) for p, g in lengths]
    in_tokens, out_tokens = sum(prompts), sum(end - start for start, end in decoded)
    per_token = shape.kv_bytes(kv_itemsize)

    def weights(steps: int, tokens: int) -> float:
        if not steps or not tokens:
            return 0.0
        met: float = 1 - (1 - shape.expert_share) ** (tokens / steps)
        touched = shape.body + shape.head + shape.experts * met
        return steps * touched * weight_bytes / shape.parameters

    def seen(start: int, end: int) -> float:
        return sum(a.flops * _positions(start, end, a.window) for a in shape.attention)

    def read(start: int, end: int) -> float:
        return sum(a.kv_width * kv_itemsize * _positions(start, end, a.window) for a in shape.attention)

    active = shape.body + shape.experts * shape.expert_share
    prefill = Cost(
        flops=2 * active * in_tokens + 2 * shape.head * len(prompts) + sum(seen(0, p) for p in prompts),
        weight_bytes=weights(prefill_steps, in_tokens),
        kv_bytes=2 * per_token * in_tokens,  # written, and read once by the tokens behind
    )
    decode = Cost(
        flops=2 * (active + shape.head) * out_tokens + sum(seen(a, b) for a, b in decoded),
        weight_bytes=weights(decode_steps, out_tokens),
        kv_bytes=per_token * out_tokens + sum(read(a, b) for a, b in decoded),
    )
    return prefill, decode


def _positions(start: int, end: int, window: int | None) -> int:
    """How many positions the tokens `start .. end` see, themselves included, added up."""
    total = (end * (end + 1) - start * (start + 1)) // 2
    if window is not None and end > window:
        first = max(start, window)
        total -= ((end - window) * (end - window + 1) - (first - window) * (first - window + 1)) // 2
    return total


def _attention(config: Mapping[str, Any]) -> tuple[Attention, ...]:
    layers = _first(config, "num_hidden_layers", "n_layer", "n_layers")
    heads = _first(config, "num_attention_heads", "n_head", "n_heads")
    if not layers or not heads:
        return ()  # recurrent models
    dim = _first(config, "head_dim") or _first(config, "hidden_size", "n_embd") // heads
    v_dim = _first(config, "v_head_dim") or dim
    kv_heads = _first(config, "num_key_value_heads", "num_kv_heads") or heads
    if config.get("qk_rope_head_dim"):  # latent attention (DeepSeek), its keys and values written out
        dim = config["qk_rope_head_dim"] + _first(config, "qk_nope_head_dim")
    window = _first(config, "sliding_window") if config.get("use_sliding_window", True) else 0
    types = config.get("layer_types")
    if not isinstance(types, Sequence):
        every = _first(config, "sliding_window_pattern")
        full = [not window or (every and (i + 1) % every == 0) for i in range(layers)]
        types = ["full_attention" if f else "sliding_attention" for f in full]
    return tuple(
        Attention(heads, kv_heads, dim, v_dim, window if kind == "sliding_attention" and window else None)
        for kind in types
        if kind in ("full_attention", "sliding_attention")
    )


def _first(config: Mapping[str, Any], *keys: str, default: int = 0) -> int:
    return next((config[key] for key in keys if isinstance(config.get(key), int)), default)
