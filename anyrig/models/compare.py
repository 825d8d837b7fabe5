"""Do two tensors of a watched forward hold the same, and what stands between them: a factor, a rope?"""

from collections.abc import Iterator

import torch
from torch import nn

from anyrig.core.decoder import Rope


def ropes(model: nn.Module) -> Iterator[Rope]:
    """Every rotary embedding of the model's buffers."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name:
                scaling = getattr(module, f"{name.removesuffix('inv_freq')}attention_scaling", 1.0)
                yield Rope(tuple(buffer.float().flatten().tolist()), float(scaling))


def turn(x: torch.Tensor, positions: torch.Tensor, rope: Rope) -> torch.Tensor:
    """`x` `[heads, tokens, dim]` with a rope applied, in float32."""
    n = len(rope.inv_freq)
    if 2 * n > x.shape[-1]:
        return torch.full_like(x, torch.nan, dtype=torch.float32)
    angles = positions[:, None].float() * torch.tensor(rope.inv_freq, device=x.device)
    cos, sin = angles.cos() * rope.scaling, angles.sin() * rope.scaling
    out = x.float().clone()
    first, second = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if rope.interleaved else (slice(0, n), slice(n, 2 * n))
    a, b = out[..., first].clone(), out[..., second].clone()
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def factor(
    total: torch.Tensor, x: torch.Tensor, base: torch.Tensor, candidates: list[float], fit: bool = True
) -> float | None:
    """The `f` of `total = base + f * x`: one of the candidates, or any number in float32; None when there is none."""
    eps = torch.finfo(total.dtype).eps
    total, x, base = total.double(), x.double(), base.double()
    # Rounding errors are relative to the numbers themselves, which may be a thousand times larger in a few columns.
    weight = 1 / (total.square() + base.square() + 1e-30)
    best = float((weight * x * (total - base)).sum() / (weight * x * x).sum().clamp_min(1e-300))
    candidates = sorted(candidates, key=lambda f: abs(f - best))[:2]
    for f in [*candidates, best] if fit and eps < 1e-5 else candidates:
        bound = 4 * eps * (total.abs() + base.abs() + (f * x).abs())
        if bool(((total - base - f * x).abs() <= bound).all()):
            return f
    return None


def near(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal but for roundings in the precision of `got`; `expected` is float32."""
    got, eps = got.float(), torch.finfo(got.dtype).eps
    bound = 16 * eps * (expected.abs() + expected.square().mean().sqrt())
    return got.shape == expected.shape and bool(((got - expected).abs() <= bound).all())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def is_norm(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    return own.keys() == {"weight"} and own["weight"].dim() == 1
