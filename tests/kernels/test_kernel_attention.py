"""Paged attention against numpy: mixtures of prefill and decode, and the same bits however a sequence came to be."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from kernel_reference import attention, bf16


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    v_dim: int = 64
    page_size: int = 16
    half: bool = True
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False

    def __str__(self):
        shape = f"{self.heads}/{self.kv_heads}x{self.dim}" + (f"-{self.v_dim}" if self.v_dim != self.dim else "")
        extras = (
            [f"window{self.window}"] * bool(self.window) + ["softcap"] * bool(self.softcap) + ["sinks"] * self.sinks
        )
        return "-".join([shape, f"pages{self.page_size}", "bf16" if self.half else "fp32", *extras])


PLAIN = Case()
CASES = [
    PLAIN,
    replace(PLAIN, half=False),
    replace(PLAIN, heads=9, kv_heads=3),
    replace(PLAIN, heads=8, kv_heads=1, page_size=32, half=False),
    replace(PLAIN, heads=3, kv_heads=3, dim=80, v_dim=80, page_size=64),
    replace(PLAIN, dim=96, v_dim=32, half=False),
    replace(PLAIN, heads=2, kv_heads=1, dim=256, v_dim=256),
    replace(PLAIN, dim=192, v_dim=128),
    replace(PLAIN, window=1),
    replace(PLAIN, window=37, half=False),
    replace(PLAIN, window=128, page_size=32),
    replace(PLAIN, softcap=3.0),
    replace(PLAIN, sinks=True, half=False),
    replace(PLAIN, heads=8, kv_heads=1, window=70, softcap=20.0, sinks=True, page_size=64),
]


class Sequences:
    """Some sequences' queries, keys and values, and the pages that a kernel keeps them in."""

    def __init__(self, kernels, case, lengths, seed=3, threads=1):
        random = np.random.default_rng(seed)
        self.case, self.lengths = case, lengths
        draw = lambda n, heads, dim: random.standard_normal((n, heads, dim)).astype(np.float32)  # noqa: E731
        self.q = [draw(n, case.heads, case.dim) for n in lengths]
        self.k = [draw(n, case.kv_heads, case.dim) for n in lengths]
        self.v = [draw(n, case.kv_heads, case.v_dim) for n in lengths]
        self.sinks = random.standard_normal(case.heads).astype(np.float32) if case.sinks else None
        self.scaling = 1.5 / case.dim**0.5
        needed = [-(-n // case.page_size) for n in lengths]
        pages = random.permutation(sum(needed) + 3).astype(np.int32)
        self.tables = np.split(pages[: sum(needed)], np.cumsum(needed)[:-1])
        self.num_pages = len(pages)
        kind = np.uint16 if case.half else np.float32
        # What others left there: large, so that a position too many is seen.
        stale = np.uint16(0x4640) if case.half else np.float32(12288)
        self.k_pages = np.full((case.kv_heads, len(pages), case.page_size, case.dim), stale, kind)
        self.v_pages = np.full((case.kv_heads, len(pages), case.page_size, case.v_dim), stale, kind)
        self.op = kernels.Attention(case.page_size, threads)

    def step(self, *chunks, padding=0):
        """Attention of chunks (sequence, start, end); the outputs of each, [end - start, heads, v_dim]."""
        case = self.case

        def flat(arrays):
            parts = [arrays[i][a:b] for i, a, b in chunks]
            return np.concatenate([*parts, np.full((padding, *parts[0].shape[1:]), 7, np.float32)])

        tables = [self.tables[i] for i, _, _ in chunks]
        integers = lambda values: np.array(values, np.int32)  # noqa: E731
        self.op.prepare(
            integers([b - a for _, a, b in chunks]),
            integers([a for _, a, _ in chunks]),
            np.concatenate(tables),
            integers(np.cumsum([0, *map(len, tables)])),
            self.num_pages,
        )
        q, k, v = flat(self.q), flat(self.k), flat(self.v)
        out = np.full((len(q), case.heads, case.v_dim), np.nan, np.float32)
        options = (self.scaling, case.window, case.softcap, self.sinks)
        self.op.attend(q, k, v, self.k_pages, self.v_pages, *options, True, out)
        ends = np.cumsum([b - a for _, a, b in chunks])
        assert (out[ends[-1] :] == 0).all(), "rows without a sequence are zeros"
        return np.split(out, ends)[:-1]

    def want(self, i, start, end):
        """The same from numpy, and the size of the values that were averaged."""
        keep = bf16 if self.case.half else np.asarray
        q, k, v = (keep(x[i]) for x in (self.q, self.k, self.v))
        options = {"window": self.case.window, "softcap": self.case.softcap, "sinks": self.sinks}
        return [
            attention(q[start:end], k[:end], values[:end], start, scaling=self.scaling, **options)
            for values in (v, np.abs(v))
        ]

    def check(self, got, i, start, end):
        want, size = self.want(i, start, end)
        # In bfloat16 the weights are rounded as well.
        tolerance = (2.0**-8 if self.case.half else 2e-5) * size + 1e-6
        assert (np.abs(got - want) <= tolerance).all(), (
            f"off by {np.nanmax(np.abs(got - want) / size):.1e} of the values"
        )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_mixture_of_prompts_chunks_and_single_tokens_is_numpys(kernels, case):
    s = Sequences(kernels, case, [1, 63, 130, 71])
    s.step((2, 0, 129), (3, 0, 17))
    chunks = [(0, 0, 1), (2, 129, 130), (1, 0, 63), (3, 17, 71)]
    for (i, a, b), got in zip(chunks, s.step(*chunks, padding=5), strict=True):
        s.check(got, i, a, b)


@pytest.mark.parametrize("case", [PLAIN, replace(PLAIN, half=False), replace(PLAIN, window=520, sinks=True)], ids=str)
def test_a_long_sequence_is_numpys_across_the_splits(kernels, case):
    s = Sequences(kernels, case, [1100])
    s.step((0, 0, 1090))
    for a, b in ((1090, 1099), (1099, 1100)):
        s.check(s.step((0, a, b))[0], 0, a, b)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_token_has_the_same_bits_however_its_sequence_was_cut_and_in_any_company(kernels, case):
    lengths = [150, 40, 7]
    whole = Sequences(kernels, case, lengths).step((0, 0, 150))[0]
    for threads in (1, 2):
        s = Sequences(kernels, case, lengths, threads=threads)
        at, others = 0, 0
        for size in (1, 63, 2, 17, 47, 19, 1):
            company = [(1, others, others + 5)] if others < 40 else [(2, 0, 7)]
            got = s.step(*company, (0, at, at + size), padding=size % 3)[1]
            assert np.array_equal(got, whole[at : at + size]), f"tokens {at} to {at + size}, {threads} threads"
            at, others = at + size, others + 5
        assert at == 150


def test_bits_are_the_same_across_splits_for_one_and_two_threads(kernels):
    alone = Sequences(kernels, PLAIN, [1100]).step((0, 0, 1100))[0]
    s = Sequences(kernels, PLAIN, [1100], threads=2)
    parts = [s.step((0, a, b))[0] for a, b in ((0, 500), (500, 1099), (1099, 1100))]
    assert np.array_equal(np.concatenate(parts), alone)


def test_scores_that_overflow_an_exponential_do_not_overflow(kernels):
    s = Sequences(kernels, replace(PLAIN, half=False), [70])
    s.q[0] *= 300
    got = s.step((0, 0, 70))[0]
    assert np.isfinite(got).all()
    assert np.array_equal(got[0], np.repeat(s.v[0][0], 2, axis=0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_pages": 2}, "page"),
        ({"starts": [60]}, "pages for its positions"),
        ({"lengths": [0]}, "pages for its positions"),
        ({"starts": [-1]}, "pages for its positions"),
        ({"offsets": [0, 9]}, "pages for its positions"),
        ({"table": [0, 1, -1, 3]}, "page"),
    ],
    ids=str,
)
def test_a_step_that_would_leave_the_pages_is_refused(kernels, change, message):
    step = {"lengths": [50], "starts": [0], "table": [0, 1, 2, 3], "offsets": [0, 4], "num_pages": 4} | change
    op = kernels.Attention(16, 1)
    pages = step.pop("num_pages")
    with pytest.raises(ValueError, match=message):
        op.prepare(**{name: np.array(value, np.int32) for name, value in step.items()}, num_pages=pages)


def test_many_items_of_a_long_sequence_keep_their_splits_together(kernels):
    # 40 heads on one KV head: every token is an item of its own, and 2,100 of them once overflowed a product of ints.
    case = Case(heads=40, kv_heads=1, dim=16, v_dim=16, half=False)
    s = Sequences(kernels, case, [2100], threads=2)
    (got,) = s.step((0, 0, 2100))
    for a in (0, 511, 512, 2095):
        s.check(got[a : a + 5], 0, a, a + 5)


@pytest.mark.parametrize("half", [True, False])
def test_a_query_that_is_not_a_number_gives_no_number(kernels, half):
    s = Sequences(kernels, replace(PLAIN, half=half, softcap=3.0), [20, 9])
    s.q[0][13] = np.nan
    got = s.step((0, 0, 20), (1, 0, 9))
    assert np.isnan(got[0][13]).all() and np.isfinite(np.delete(got[0], 13, 0)).all()
    s.check(got[1], 1, 0, 9)


@pytest.mark.parametrize(
    "name, shape", [("k", (20, 2, 32)), ("v", (20, 1, 64)), ("v", (19, 2, 64)), ("out", (20, 4, 32))]
)
def test_arrays_that_do_not_belong_together_are_refused(kernels, name, shape):
    s = Sequences(kernels, PLAIN, [20])
    s.step((0, 0, 20))
    arrays = {"q": s.q[0], "k": s.k[0], "v": s.v[0], "out": np.empty((20, 4, 64), np.float32)}
    arrays[name] = np.zeros(shape, np.float32)
    with pytest.raises(ValueError):
        s.op.attend(arrays["q"], arrays["k"], arrays["v"], s.k_pages, s.v_pages, 1.0, 0, 0.0, None, True, arrays["out"])
