"""Sampling in plain torch (contract: `anyrig/ops/sample.py`).

Why it is written in these steps: on a CPU, torch's sums over a whole row, `exp` and the like may split a range between
threads or leave a remainder to other code, depending on the shape of the whole batch; then a row's last bit depends on
its company. Used here are only operations whose result for a row is its own: softmax and log_softmax (one thread owns a
row), exactly rounded elementwise ones, maxima, and sums over blocks of exactly 256.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from anyrig.ops.sample import BLOCK, Draw, TokenScores

# Tokens less likely than the first floor are looked at only where those above it do not settle the matter: it bounds
# what has to be sorted by 4096, and nearly all rows are settled by it.
_FLOORS = (2.0**-12, 2.0**-18, float(torch.finfo(torch.float32).tiny))

Ids = NDArray[np.int64]
Values = NDArray[np.float32]


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vocab = logits.shape
    if vocab % BLOCK or not logits.is_contiguous():
        ids = logits.argmax(-1)
        return ids, logits.gather(1, ids[:, None])[:, 0]
    # The maximum is vectorised, its position is not: look for the position in one block of each row only.
    blocks = logits.view(rows, -1, BLOCK)
    best = blocks.amax(-1)
    block = best.argmax(-1)
    each = torch.arange(rows, device=logits.device)
    return block * BLOCK + blocks[each, block].argmax(-1), best[each, block]


def draw(logits: torch.Tensor, draws: Sequence[Draw], scratch: torch.Tensor, mark_dropped: bool = False) -> list[int]:
    # Best logit to 0 first: a tiny temperature then sends the others to -inf rather than the best one to +inf.
    logits.sub_(logits.amax(-1, keepdim=True))
    logits.div_(torch.tensor([[d.temperature] for d in draws], dtype=torch.float32, device=logits.device))
    probs = torch.softmax(logits, -1, out=scratch)
    whole = [i for i, d in enumerate(draws) if d.min_p == 0 and d.top_k == 0 and d.top_p == 1]
    filtered = [i for i, d in enumerate(draws) if d.min_p > 0 or d.top_k > 0 or d.top_p < 1]
    ids = [0] * len(draws)
    if whole:
        part = probs if not filtered else probs[whole]
        for i, token in zip(whole, _invert(part, [draws[i].uniform for i in whole]), strict=True):
            ids[i] = token
    if filtered:
        part = probs if not whole else probs[filtered]
        kept = _filter(part, [draws[i] for i in filtered])
        for i, (candidates, weights) in zip(filtered, kept, strict=True):
            total = np.cumsum(weights, dtype=np.float64)
            at = np.searchsorted(total, draws[i].uniform * total[-1], side="right")
            ids[i] = int(candidates[min(int(at), len(candidates) - 1)])
            if mark_dropped:
                left = torch.from_numpy(candidates).to(logits.device)
                saved = logits[i, left]
                logits[i] = -torch.inf
                logits[i, left] = saved
    return ids


def logprobs(logits: torch.Tensor, ids: Sequence[int], ks: Sequence[int], scratch: torch.Tensor) -> list[TokenScores]:
    scores = torch.log_softmax(logits, -1, out=scratch)
    given = scores.gather(1, torch.tensor(ids, device=logits.device)[:, None])
    larger = _reaches(scores, torch.nextafter(given, torch.full_like(given, torch.inf))).cpu().numpy()
    ranks = [int(np.count_nonzero(row)) + 1 for row in larger]
    result: list[TokenScores] = [
        {token: (value, rank)} for token, value, rank in zip(ids, given[:, 0].tolist(), ranks, strict=True)
    ]
    k = min(max(ks), scores.shape[1])
    if k == 0:
        return result
    for row, want, (candidates, values) in zip(result, ks, _at_least(scores, _best(scores, k)[:, -1]), strict=True):
        order = np.argsort(-values, kind="stable")[:want]
        best = values[order]
        above = np.searchsorted(-best, -best).tolist()
        for token, value, rank in zip(candidates[order].tolist(), best.tolist(), above, strict=True):
            row.setdefault(token, (value, rank + 1))
    return result


def _invert(probs: torch.Tensor, uniforms: Sequence[float]) -> list[int]:
    """First id at which the cumulative probability exceeds the uniform number, for each row of probs [R, W]."""
    blocks = probs.view(len(probs), -1, BLOCK)
    at, inside = _step(blocks.sum(-1), torch.tensor(uniforms, dtype=torch.float64, device=probs.device))
    offset, _ = _step(blocks[torch.arange(len(probs), device=probs.device), at], inside)
    ids: list[int] = (at * BLOCK + offset).tolist()
    return ids


def _step(weights: torch.Tensor, share: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index at which `share` [R] of the total of weights [R, N] is exceeded, and the share of that weight used up.

    The index always points to a weight above 0, whatever the rounding.
    """
    reached = weights.to(torch.float64).cumsum(-1)
    total = reached[:, -1:]
    target = share[:, None] * total
    last = (reached < total).sum(-1, keepdim=True)
    at = torch.minimum(torch.searchsorted(reached, target, right=True), last)
    weight = weights.gather(1, at).to(torch.float64)
    before = reached.gather(1, at) - weight
    return at[:, 0], ((target - before) / weight).clamp_(0, 1)[:, 0]


def _filter(probs: torch.Tensor, draws: Sequence[Draw]) -> list[tuple[Ids, Values]]:
    """Tokens that pass min_p, top_k and top_p, best first, with their probabilities, for each row of probs [R, W]."""
    exact = probs.amax(-1) * torch.tensor([d.min_p for d in draws], dtype=torch.float32, device=probs.device)
    ks = torch.tensor([min(d.top_k, probs.shape[1]) for d in draws], device=probs.device)
    if k := int(ks.max()):
        kth = _best(probs, k).gather(1, (ks - 1).clamp(min=0)[:, None])[:, 0]
        exact = torch.where(ks > 0, torch.maximum(exact, kth), exact)
    # What passes min_p and top_k is at least `exact`. With top_p alone a floor is guessed, and lowered if that failed.
    guessed = [d.min_p == 0 and d.top_k == 0 for d in draws]
    kept: dict[int, tuple[Ids, Values]] = {}
    for floor in _FLOORS:
        todo = [i for i in range(len(draws)) if i not in kept]
        if not todo:
            break
        floors = torch.tensor([floor if guessed[i] else _FLOORS[-1] for i in todo], device=probs.device)
        rows = probs if len(todo) == len(draws) else probs[todo]
        for i, (ids, values) in zip(todo, _at_least(rows, torch.maximum(floors, exact[todo])), strict=True):
            order = np.argsort(-values, kind="stable")
            ids, values = ids[order], values[order]
            end = _cut(values, draws[i], 1.0 if guessed[i] else None)
            if end <= len(values) or not guessed[i] or floor == _FLOORS[-1]:
                kept[i] = (ids[:end], values[:end])
    return [kept[i] for i in range(len(draws))]


def _cut(values: Values, draw: Draw, mass: float | None) -> int:
    """How many of the sorted probabilities pass top_k and top_p; more than there are: some beyond them may pass too.

    `mass` is what top_p is a share of; None: the sum of those that passed the other filters.
    """
    end = len(values)
    if 0 < draw.top_k < end:
        end = int(np.searchsorted(-values, -values[draw.top_k - 1], side="right"))
    if draw.top_p < 1:
        total = np.cumsum(values[:end], dtype=np.float64)
        end = int(np.searchsorted(total, draw.top_p * (total[-1] if mass is None else mass))) + 1
    return end


def _best(values: torch.Tensor, k: int) -> torch.Tensor:
    """Lower bounds [R, k] of each row's best, second best ... k-th best value.

    The k-th best of the blocks' maxima is one of the k-th best value: k blocks hold something at least as large.
    """
    blocks = values.view(len(values), -1, BLOCK)
    return (blocks.amax(-1) if k <= blocks.shape[1] else values).topk(k).values


def _reaches(values: torch.Tensor, floors: torch.Tensor) -> torch.Tensor:
    """values [R, W] >= floors [R, 1], as booleans. On CPU by numpy: torch's comparison isn't vectorised (six times)."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.greater_equal(values.numpy(), floors.numpy()))
    return values >= floors


def _at_least(values: torch.Tensor, floors: torch.Tensor) -> list[tuple[Ids, Values]]:
    """Ids, ascending, and values of each row's finite entries of at least floors [R], from values [R, W]."""
    floors = floors.clamp(min=torch.finfo(values.dtype).min)[:, None]
    # Hits are few: find the groups of eight that hold one (eight booleans read as one integer), then look inside.
    groups = _reaches(values, floors).view(torch.int64).nonzero()
    row = groups[:, :1]
    ids = groups[:, 1:] * 8 + torch.arange(8, device=values.device)
    near = values[row, ids]
    hit = near >= floors[row[:, 0]]
    rows, flat_ids, flat = row.expand_as(ids)[hit].cpu().numpy(), ids[hit].cpu().numpy(), near[hit].cpu().numpy()
    ends = np.searchsorted(rows, np.arange(len(values) + 1))
    return [(flat_ids[a:b], flat[a:b]) for a, b in pairwise(ends)]
