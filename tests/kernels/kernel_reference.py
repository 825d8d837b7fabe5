"""The kernels' arithmetic in numpy, as plainly as it can be said; sums in float64."""

import numpy as np

UNIT = 64  # activations that share a scale


def bf16(x):
    """float32 rounded to the nearest bfloat16 (ties to even), as float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def bf16_bits(x):
    return (bf16(x).view(np.uint32) >> 16).astype(np.uint16)


def quantised(x):
    """Activations [m, k] on the int8 grid of each 64 of them, as float64."""
    m, k = x.shape
    padded = np.zeros((m, -(-k // UNIT) * UNIT), np.float64)
    padded[:, :k] = x
    groups = padded.reshape(m, -1, UNIT)
    scale = np.abs(groups).max(axis=2, keepdims=True) / 127
    levels = np.rint(np.divide(groups, scale, out=np.zeros_like(groups), where=scale > 0))
    return (levels * scale).reshape(m, -1)[:, :k]


def activations(random, m, k):
    """float32 [m, k] whose place on the int8 grid is beyond doubt: nothing is near the middle between two levels."""
    levels = random.integers(-127, 128, (m, k)) + random.uniform(-0.4, 0.4, (m, k))
    levels[:, ::UNIT] = 127 * random.choice([-1, 1], levels[:, ::UNIT].shape)
    scales = np.repeat(random.uniform(0.001, 0.1, (m, -(-k // UNIT))), UNIT, axis=1)[:, :k]
    return np.clip(levels, -127, 127).astype(np.float32) * scales.astype(np.float32)


def product(kind, x, w):
    """x [m, k] times w [n, k] as `kind` computes it, where w are the weights that are left after packing.

    And the sum of the terms' sizes, which is what rounding errors are in proportion to.
    """
    if kind == "bfloat16":
        x = bf16(x)
    elif kind in ("int8", "int4"):
        x = quantised(x)
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    return x @ w.T, np.abs(x) @ np.abs(w).T


def attention(q, k, v, start, *, scaling, window=0, softcap=0.0, sinks=None):
    """One sequence: q [t, heads, dim] at positions start .., k [all, kv_heads, dim], v [all, kv_heads, v_dim]."""
    tokens, heads, _ = q.shape
    group = heads // k.shape[1]
    out = np.zeros((tokens, heads, v.shape[2]))
    for t in range(tokens):
        last = start + t
        first = max(0, last - window + 1) if window else 0
        for h in range(heads):
            scores = k[first : last + 1, h // group].astype(np.float64) @ q[t, h].astype(np.float64) * scaling
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            top = max(scores.max(), -np.inf if sinks is None else sinks[h])
            weights = np.exp(scores - top)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[h] - top))
            out[t, h] = weights @ v[first : last + 1, h // group].astype(np.float64) / total
    return out
