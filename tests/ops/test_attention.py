"""Every implementation of the attention contract against a dense computation, over the contract's grid."""

import random

import pytest
import torch

from anyrig.core.spec import Chunk, LayerSpec, StepPlan
from anyrig.ops import registry
from anyrig.ops.attention import KVPages

IMPLEMENTATIONS = [i for i in registry.IMPLEMENTATIONS if i.op == "attention" and i.why_not("cpu") is None]
# (already computed, new) tokens of each sequence of a mixed step: prefill, continued prefill, decode, tile borders
MIXED = [(0, 1), (0, 5), (7, 40), (300, 1), (255, 1), (256, 1), (200, 90), (0, 300), (1, 2), (511, 2)]


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda i: i.name)
def attention(request):
    return request.param.load()


def spec(heads=4, kv_heads=2, dim=64, v_dim=None, window=None, softcap=None, sinks=False):
    v_dim = v_dim or dim
    return LayerSpec(0, "layer", heads, kv_heads, dim, v_dim, dim**-0.5, window, softcap, sinks, kv_source=0)


def dense(q, k, v, start, layer, sinks):
    """`q [heads, n, dim]` at positions from `start`, all keys and values of the sequence -> `[n, heads, v_dim]`."""
    group = layer.heads // layer.kv_heads
    k, v = k.double().repeat_interleave(group, 0), v.double().repeat_interleave(group, 0)
    scores = q.double() @ k.transpose(1, 2) * layer.scaling
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    key, position = torch.arange(k.shape[1]), start + torch.arange(q.shape[1])[:, None]
    seen = key <= position
    if layer.window is not None:
        seen &= key > position - layer.window
    scores = scores.masked_fill(~seen, -torch.inf)
    if layer.sinks:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, q.shape[1], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[1]] @ v).transpose(0, 1)


class Case:
    """A mixed step on shuffled pages, with its inputs and what must come out."""

    def __init__(self, layer, lengths, page_size, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.layer, self.page_size, self.dtype = layer, page_size, dtype
        num_pages = 1 + sum(-(-(a + b) // page_size) for a, b in lengths) + 3
        ids = list(range(1, num_pages))
        random.Random(seed).shuffle(ids)

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        # Pages that nobody wrote hold large numbers: reading past a sequence's end would show.
        shape = (layer.kv_heads, num_pages, page_size)
        self.pages = KVPages(normal(*shape, layer.dim) * 50, normal(*shape, layer.v_dim) * 50)
        self.sinks = normal(layer.heads) if layer.sinks else None
        self.sequences, self.chunks = [], []
        for i, (start, n) in enumerate(lengths):
            end = start + n
            q, k = normal(layer.heads, end, layer.dim), normal(layer.kv_heads, end, layer.dim)
            v = normal(layer.kv_heads, end, layer.v_dim)
            table = [ids.pop() for _ in range(-(-end // page_size))]
            self.sequences.append((q, k, v))
            self.chunks.append(Chunk(i, [0] * n, start, table))

    def run(self, attention, chunks=None, rows=16):
        chunks = self.chunks if chunks is None else chunks
        plan = StepPlan(chunks)
        total = -(-plan.num_tokens // rows) * rows
        # What was computed before goes to the pages through the op itself: their inner order is its own.
        before = [Chunk(c.seq_id, [0] * c.start, 0, c.block_table) for c in chunks if c.start]
        if before:
            self.step(attention, StepPlan(before), StepPlan(before).num_tokens)
        out = self.step(attention, plan, total)
        assert out.dtype == self.dtype and out.shape == (total, self.layer.heads, self.layer.v_dim)
        return list(out[: plan.num_tokens].split([c.length for c in chunks]))

    def step(self, attention, plan, total):
        flat = []
        for which in range(3):
            parts = [self.sequences[c.seq_id][which][:, c.start : c.start + c.length] for c in plan.chunks]
            flat.append(torch.nn.functional.pad(torch.cat(parts, 1), (0, 0, 0, total - plan.num_tokens)))
        if reason := attention.why_not([self.layer], self.page_size, self.dtype):
            pytest.skip(reason)
        step = attention(self.page_size).prepare(plan, total)
        return step.attend(*flat, self.layer, self.pages, self.sinks)

    def expected(self):
        return [
            dense(q[:, c.start :], k, v, c.start, self.layer, self.sinks)
            for (q, k, v), c in zip(self.sequences, self.chunks, strict=True)
        ]


def assert_close(got, expected, tolerance):
    for one, other in zip(got, expected, strict=True):
        assert (one.double() - other).abs().max() <= tolerance


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_head_and_page_sizes(attention, dim, page_size):
    case = Case(spec(dim=dim), MIXED, page_size)
    assert_close(case.run(attention), case.expected(), 2e-5)


@pytest.mark.parametrize("heads, kv_heads", [(3, 3), (8, 1), (9, 3), (8, 4)])
def test_grouped_queries(attention, heads, kv_heads):
    case = Case(spec(heads, kv_heads), MIXED, 16)
    assert_close(case.run(attention), case.expected(), 2e-5)


@pytest.mark.parametrize("window", [1, 7, 100, 256, 10_000])
def test_sliding_window(attention, window):
    case = Case(spec(window=window), MIXED, 16)
    assert_close(case.run(attention), case.expected(), 2e-5)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("softcap, sinks", [(30.0, False), (None, True), (5.0, True)])
def test_softcap_and_sinks(attention, softcap, sinks, window):
    case = Case(spec(softcap=softcap, sinks=sinks, window=window), MIXED, 16)
    assert_close(case.run(attention), case.expected(), 2e-5)


@pytest.mark.parametrize("dim, v_dim", [(192, 128), (33, 17)])
def test_values_narrower_than_keys(attention, dim, v_dim):
    case = Case(spec(dim=dim, v_dim=v_dim), MIXED, 16)
    assert_close(case.run(attention), case.expected(), 2e-5)


def test_bfloat16_pages(attention):
    case = Case(spec(), MIXED, 16, dtype=torch.bfloat16)
    assert_close(case.run(attention), case.expected(), 2e-2)


@pytest.mark.parametrize("window", [None, 100])
def test_a_sequence_gets_the_same_bits_alone_and_in_company(attention, window):
    case = Case(spec(9, 3, window=window), MIXED, 16)
    together = case.run(attention)
    for chunk, out in zip(case.chunks, together, strict=True):
        (alone,) = case.run(attention, [chunk])
        assert torch.equal(alone, out)


def test_a_prompt_gets_the_same_bits_however_it_is_cut(attention):
    case = Case(spec(9, 3), [(0, 600)], 16)
    (whole,) = case.run(attention)
    table = case.chunks[0].block_table
    for size in (1, 16, 37, 512):
        starts = range(0, 600, size) if size > 1 else range(250, 264)
        for start in starts:
            n = min(size, 600 - start)
            (part,) = case.run(attention, [Chunk(0, [0] * n, start, table)])
            assert torch.equal(part, whole[start : start + n]), (size, start)


def test_order_of_the_batch_changes_nothing(attention):
    case = Case(spec(9, 3), MIXED, 16)
    together = case.run(attention)
    order = list(range(len(MIXED)))
    random.Random(3).shuffle(order)
    for i, out in zip(order, case.run(attention, [case.chunks[i] for i in order]), strict=True):
        assert torch.equal(out, together[i])


def test_a_layer_that_shares_keys_and_values_writes_nothing(attention):
    case = Case(spec(), [(0, 20)], 16)
    case.run(attention)
    before = case.pages.k.clone()
    plan = StepPlan(case.chunks)
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 12)) for x in case.sequences[0])
    out = attention(16).prepare(plan, 32).attend(q, k * 0, v * 0, case.layer, case.pages, write=False)
    assert torch.equal(case.pages.k, before)
    assert_close([out[:20]], case.expected(), 2e-5)
