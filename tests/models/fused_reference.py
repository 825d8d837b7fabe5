"""The loop of `core/decoder.py`, written out in float32 for one sequence: what a description means."""

import numpy as np
import torch
from torch.nn import functional

from anyrig.core.decoder import BlockSpec, DecoderSpec, Rope
from anyrig.core.spec import LayerSpec
from anyrig.models.describe import Description

BLOCK = 16
ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def gather(description: Description) -> dict[str, torch.Tensor]:
    """Every tensor of a description whole and in float32."""
    pieces: dict[str, list[torch.Tensor]] = {}
    for name, piece in description.tensors():
        pieces.setdefault(name, []).append(torch.as_tensor(piece).float())
    return {name: torch.cat(found) for name, found in pieces.items()}


def logits(spec: DecoderSpec, tensors: dict[str, torch.Tensor], ids: list[int]) -> np.ndarray:
    """Causal logits `[tokens, vocab]` of one sequence."""
    embed = tensors["head" if spec.tied else "embed"]
    x = embed[torch.tensor(ids)] * spec.embed_scale
    for i, layer in enumerate(spec.layers):
        own = {n.removeprefix(f"layers.{i}."): t for n, t in tensors.items() if n.startswith(f"layers.{i}.")}
        rope = None if layer.rope is None else spec.ropes[layer.rope]
        a = attention(layer.attention, rope, rms(x, own["attn_norm"], spec.eps), own, spec.eps)
        if "attn_out_norm" in own:
            a = rms(a, own["attn_out_norm"], spec.eps)
        x = x + layer.multiplier * a
        m = mlp(layer, rms(x, own["mlp_norm"], spec.eps), own)
        if "mlp_out_norm" in own:
            m = rms(m, own["mlp_out_norm"], spec.eps)
        x = x + layer.multiplier * m
    out = rms(x, tensors["final_norm"], spec.eps) @ tensors["head"].T * spec.logit_scale
    if spec.final_softcap is not None:
        out = spec.final_softcap * torch.tanh(out / spec.final_softcap)
    return out.numpy()


def attention(
    spec: LayerSpec, rope: Rope | None, x: torch.Tensor, own: dict[str, torch.Tensor], eps: float
) -> torch.Tensor:
    n = len(x)
    qkv = x @ own["qkv"].T + own.get("qkv_bias", torch.zeros(1))
    q, k, v = qkv.split([spec.heads * spec.dim, spec.kv_heads * spec.dim, spec.kv_heads * spec.v_dim], -1)
    q, k, v = q.view(n, spec.heads, -1), k.view(n, spec.kv_heads, -1), v.view(n, spec.kv_heads, -1)
    if "q_norm" in own:
        q = rms(q, own["q_norm"], eps)
    if "k_norm" in own:
        k = rms(k, own["k_norm"], eps)
    if rope is not None:
        q, k = turn(q, rope), turn(k, rope)
    group = spec.heads // spec.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scaling
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    position = torch.arange(n)
    seen = position <= position[:, None]
    if spec.window is not None:
        seen &= position > position[:, None] - spec.window
    scores = scores.masked_fill(~seen, -torch.inf)
    if "sinks" in own:
        scores = torch.cat([scores, own["sinks"].view(-1, 1, 1).expand(-1, n, 1)], -1)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :n], v)
    return out.reshape(n, -1) @ own["o"].T + own.get("o_bias", torch.zeros(1))


def mlp(layer: BlockSpec, x: torch.Tensor, own: dict[str, torch.Tensor]) -> torch.Tensor:
    both = x @ own["gate_up"].T + own.get("gate_up_bias", torch.zeros(1))
    gate, up = both.view(len(x), -1, 2, BLOCK).unbind(2)
    inner = ACTIVATIONS[layer.activation](gate) * up
    return inner.reshape(len(x), -1) @ own["down"].T + own.get("down_bias", torch.zeros(1))


def turn(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """`x` `[tokens, heads, dim]`, each token turned by its position."""
    n = len(rope.inv_freq)
    angles = torch.arange(len(x), dtype=torch.float32)[:, None, None] * torch.tensor(rope.inv_freq)
    cos, sin = angles.cos() * rope.scaling, angles.sin() * rope.scaling
    left, right = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if rope.interleaved else (slice(0, n), slice(n, 2 * n))
    out = x.clone()
    out[..., left] = x[..., left] * cos - x[..., right] * sin
    out[..., right] = x[..., right] * cos + x[..., left] * sin
    return out


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
