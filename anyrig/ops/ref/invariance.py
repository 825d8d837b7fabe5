"""How many rows a matrix product must have so that a row's bits do not depend on how many others there are.

Libraries pick another kernel for few rows (a matrix-vector product, say), and with it another order of additions.
From some small number of rows on they take the same path; which number depends on library and processor, so it is
looked for rather than assumed.
"""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

log = logging.getLogger(__name__)

CANDIDATES = (4, 8, 16)
MOST = CANDIDATES[-1]


def _smallest(product: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> int:
    """The smallest candidate whose products equal those of all rows at once, bit for bit; the largest otherwise."""
    whole = product(rows)
    total = rows.shape[-2]
    for unit in CANDIDATES:
        sizes = [n for n in (unit, 3 * unit, 5 * unit, total - unit) if n <= total]
        parts = all(
            torch.equal(product(rows[..., start : start + n, :]), whole[..., start : start + n, :])
            for n in sizes
            for start in (0, unit, total - n)
            if start + n <= total
        )
        if parts:
            return unit
    log.warning("the bits of a result may depend on the other requests here: no number of rows makes products alike")
    return MOST


@torch.inference_mode()
def linear_unit(
    shapes: Sequence[tuple[int, int]],
    make: Callable[[torch.nn.Linear], Callable[[torch.Tensor], torch.Tensor]],
    dtype: torch.dtype,
    device: str,
) -> int:
    """Rows to round a step up to, for linear layers of these `[out, in]` shapes.

    Args:
        make: what is put in place of a linear layer.
    """
    generator = torch.Generator().manual_seed(0)
    unit = CANDIDATES[0]
    for out, width in shapes:
        linear = torch.nn.Linear(width, min(out, 2048), bias=False, device="meta")
        weight = torch.randn(linear.out_features, width, generator=generator).to(device, dtype)
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        rows = torch.randn(96, width, generator=generator).to(device, dtype)
        unit = max(unit, _smallest(make(linear), rows))
    return unit


@lru_cache(maxsize=64)
def attention_unit(dim: int, v_dim: int, tile: int, device: str) -> int:
    """Query rows to round up to, for both products of attention on tiles of `tile` keys."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(5, 96, dim, generator=generator).to(device)
    k = torch.randn(5, tile, dim, generator=generator).to(device)
    v = torch.randn(5, tile, v_dim, generator=generator).to(device)
    p = torch.rand(5, 96, tile, generator=generator).to(device)
    unit = _smallest(lambda x: torch.bmm(x, k.transpose(1, 2)), q)
    return max(unit, _smallest(lambda x: torch.bmm(x, v), p))
