"""Sampling ops: every implementation against definitions written out in float64."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from anyrig.ops import registry
from anyrig.ops.sample import BLOCK, Draw, SampleOp, _mix, sequence_seed, uniform

IMPLEMENTATIONS = [i for i in registry.IMPLEMENTATIONS if i.op == "sample" and i.why_not("cpu") is None]
LAST = 1 - 2.0**-53


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda i: i.name)
def op(request: pytest.FixtureRequest) -> SampleOp:
    return request.param.load()


def padded(logits: torch.Tensor) -> torch.Tensor:
    width = -(-logits.shape[1] // BLOCK) * BLOCK
    return torch.nn.functional.pad(logits.float(), (0, width - logits.shape[1]), value=-torch.inf)


def draw(op: SampleOp, logits: torch.Tensor, draws: list[Draw], mark: bool = False) -> tuple[list[int], torch.Tensor]:
    z = padded(logits)
    return op.draw(z, draws, torch.empty_like(z), mark), z[:, : logits.shape[1]]


def kept(logits: torch.Tensor, d: Draw) -> tuple[set[int], float]:
    """Ids that the filters leave, by the definition, and how close the nearest comparison was."""
    z = logits.double() / d.temperature
    p = torch.softmax(z, -1).numpy()
    order = np.argsort(-p, kind="stable")
    order = order[p[order] > torch.finfo(torch.float32).tiny]
    close = math.inf
    if d.min_p > 0:
        close = min(close, float(np.abs(p / p.max() / d.min_p - 1).min()))
        order = order[p[order] >= d.min_p * p.max()]
    if 0 < d.top_k < len(order):
        order = order[p[order] >= p[order[d.top_k - 1]]]
    if d.top_p < 1:
        share = np.cumsum(p[order]) / p[order].sum()
        close = min(close, float(np.abs(share / d.top_p - 1).min()))
        order = order[: int(np.searchsorted(share, d.top_p)) + 1]
    return set(order.tolist()), close


@pytest.mark.parametrize("vocab", [7, 256, 1003, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_takes_the_lowest_of_equal_ids(op: SampleOp, vocab: int, dtype: torch.dtype) -> None:
    logits = torch.zeros(4, vocab, dtype=dtype)
    logits[1, [vocab - 1, vocab // 2]] = 3
    logits[2, 1:] = -5
    logits[3] = -torch.inf
    logits[3, vocab - 1] = -1e30
    ids, values = op.argmax(logits)
    assert ids.tolist() == [0, vocab // 2, 0, vocab - 1]
    assert values[1] == 3


@pytest.mark.parametrize("vocab", [1003, 4096])
def test_argmax_shows_a_nan_wherever_it_is(op: SampleOp, vocab: int) -> None:
    logits = torch.randn(5, vocab)
    for row, at in enumerate([0, 1, vocab // 2, vocab - 1]):
        logits[row, at] = torch.nan
    assert op.argmax(logits)[1].isnan().tolist() == [True] * 4 + [False]


@pytest.mark.parametrize("vocab", [300, 1003, 49152])
@pytest.mark.parametrize("spread", [0.1, 3.0, 12.0])
def test_filters_keep_what_their_definitions_say(op: SampleOp, vocab: int, spread: float) -> None:
    torch.manual_seed(vocab)
    settings = [
        (t, 0.5, min_p, top_k, top_p)
        for t, min_p, top_k, top_p in product((0.5, 1.3), (0.0, 0.05), (0, 1, 40, 250), (0.3, 0.95, 1.0))
    ]
    draws = [Draw(*s) for s in settings]
    logits = torch.randn(len(draws), vocab) * spread
    ids, left = draw(op, logits, draws, mark=True)
    compared = 0
    for row, d, token, z in zip(logits, draws, ids, left, strict=True):
        expected, close = kept(row, d)
        assert token in expected or close < 1e-5
        # Where a comparison is decided by less than float32 resolves, either side is right.
        if close > 1e-5 and (d.min_p or d.top_k or d.top_p < 1):
            assert set(z.isfinite().nonzero()[:, 0].tolist()) == expected, d
            compared += 1
    assert compared > len(draws) // 2


def test_tokens_that_tie_with_the_kth_are_kept(op: SampleOp) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 5.0]])
    _, left = draw(op, logits, [Draw(1.0, 0.0, top_k=2)], mark=True)
    assert left[0].isfinite().tolist() == [False, True, True, True, True]


@pytest.mark.parametrize("filters", [{}, {"top_k": 8}, {"top_p": 0.9}, {"min_p": 0.02}])
def test_draws_follow_the_distribution(op: SampleOp, filters: dict[str, float]) -> None:
    torch.manual_seed(3)
    logits = torch.randn(1, 24) * 1.5
    d = Draw(0.8, 0.0, **filters)  # type: ignore[arg-type]
    expected_ids, _ = kept(logits[0], d)
    p = torch.softmax(logits[0].double() / 0.8, -1).numpy()
    p[[i for i in range(24) if i not in expected_ids]] = 0
    p /= p.sum()
    n = 20_000
    draws = [Draw(0.8, uniform(11, i), **filters) for i in range(n)]  # type: ignore[arg-type]
    ids, _ = draw(op, logits.expand(n, -1), draws)
    counts = np.bincount(ids, minlength=24)
    assert counts[p == 0].sum() == 0
    chi2 = float(((counts - n * p)[p > 0] ** 2 / (n * p[p > 0])).sum())
    freedom = int((p > 0).sum()) - 1
    # Beyond 5 standard deviations of the chi-square distribution; the seed is fixed, so this passes or fails for good.
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("vocab", "filters"),
    [(1003, {}), (1003, {"top_k": 50}), (1003, {"min_p": 0.01}), (49152, {}), (49152, {"top_p": 0.9})],
)
def test_the_border_between_two_tokens_is_the_same_number_in_any_company(
    op: SampleOp, vocab: int, filters: dict[str, float]
) -> None:
    torch.manual_seed(4)
    logits = torch.randn(32, vocab)
    low, high = 0.3, 0.7

    def token(at: float) -> int:
        return draw(op, logits[:1], [Draw(0.9, at, **filters)])[0][0]  # type: ignore[arg-type]

    while np.nextafter(low, 1) < high:
        middle = (low + high) / 2
        low, high = (middle, high) if token(middle) == token(low) else (low, middle)
    assert token(low) != token(high)
    for rows in (1, 2, 7, 32):
        at = rows // 2
        order = [*range(1, at + 1), 0, *range(at + 1, rows)]
        for u in (low, high):
            ids, _ = draw(op, logits[order], [Draw(0.9, u, **filters)] * rows)  # type: ignore[arg-type]
            assert ids[at] == token(u)


def test_extreme_uniform_numbers_hit_tokens_of_the_distribution(op: SampleOp) -> None:
    logits = torch.full((4, 1003), -torch.inf)
    logits[:, [5, 600, 1001]] = torch.tensor([0.0, -1.0, -2.0])
    ids, _ = draw(op, logits, [Draw(1, 0.0), Draw(1, LAST), Draw(1, 0.0, top_k=2), Draw(1, LAST, top_k=2)])
    assert ids == [5, 1001, 5, 600]


def test_a_tiny_temperature_is_greedy_and_a_huge_one_uniform(op: SampleOp) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 512) * 10
    cold, _ = draw(op, logits.expand(50, -1), [Draw(1e-5, uniform(1, i)) for i in range(50)])
    assert set(cold) == {int(logits.argmax())}
    hot, _ = draw(op, logits.expand(2000, -1), [Draw(1e6, uniform(1, i)) for i in range(2000)])
    assert len(set(hot)) > 450


def test_logprobs_are_log_softmax_with_ranks(op: SampleOp) -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 1003) * 4
    logits[:, 7] = -torch.inf
    ids, ks = [0, 5, 1002, 9, 9, 3], [0, 1, 5, 20, 1003, 600]
    z = padded(logits)
    result = op.logprobs(z, ids, ks, torch.empty_like(z))
    exact = torch.log_softmax(logits.double(), -1)
    for row, (token, k, scores) in enumerate(zip(ids, ks, result, strict=True)):
        best = exact[row].argsort(descending=True)[: min(k, 1002)].tolist()
        assert list(scores) == list(dict.fromkeys([token, *best]))
        for t, (value, rank) in scores.items():
            assert value == pytest.approx(float(exact[row, t]), abs=1e-5)
            assert rank == 1 + int((exact[row] > exact[row, t]).sum())


def test_equal_logprobs_share_a_rank_and_lower_ids_come_first(op: SampleOp) -> None:
    z = padded(torch.tensor([[1.0, 3.0, 1.0, 3.0, 0.0, 1.0]]))
    (scores,) = op.logprobs(z, [4], [3], torch.empty_like(z))
    assert [(t, rank) for t, (_, rank) in scores.items()] == [(4, 6), (1, 1), (3, 1), (0, 3)]


def test_the_mix_is_splitmix64() -> None:
    # First outputs of the published generator (Vigna's splitmix64.c) for seed 1234567.
    state, golden, out = 1234567, 0x9E3779B97F4A7C15, []
    for _ in range(3):
        state = (state + golden) % 2**64
        out.append(_mix(state))
    assert out == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_uniform_numbers_are_stateless_even_and_unlike_between_neighbouring_seeds() -> None:
    n = 4000
    seeds = [0, 1, 2, 0x9E3779B97F4A7C15, -1, sequence_seed(0, 1), sequence_seed(0, 2)]
    streams = np.array([[uniform(seed, i) for i in range(n)] for seed in seeds])
    assert uniform(1, 17) == streams[1, 17]
    assert streams.min() >= 0
    assert streams.max() < 1
    for stream in streams:
        counts, _ = np.histogram(stream, 50, (0, 1))
        assert ((counts - n / 50) ** 2 / (n / 50)).sum() < 49 + 5 * math.sqrt(98)
    assert np.unique(streams).size == streams.size  # no stream is a shifted copy of another
    correlation = np.corrcoef(streams) - np.eye(len(seeds))
    assert np.abs(correlation).max() < 5 / math.sqrt(n)
