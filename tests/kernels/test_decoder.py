"""A whole decoder in one call, against numpy; and the same bits for a sequence alone, in company, cut and uncut."""

from copy import copy
from dataclasses import dataclass
from math import erf

import numpy as np
import pytest
from kernel_reference import attention

VOCAB, HIDDEN, LAYERS = 83, 72, 2


@dataclass(frozen=True)
class Config:
    """What the families differ in. The first is Llama's; each other one turns on what some family has."""

    name: str
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    v_dim: int = 32
    intermediate: int = 90
    activation: str = "silu"
    rotary: int = 16  # pairs
    interleaved: bool = False
    window: int = 0
    softcap: float = 0.0
    optional: tuple = ()
    multiplier: float = 1.0
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    final_softcap: float = 0.0

    def __str__(self):
        return self.name

    @property
    def width(self):
        return self.heads * self.dim + self.kv_heads * (self.dim + self.v_dim)

    @property
    def inner(self):
        return -(-self.intermediate // 16) * 16


CONFIGS = [
    Config("llama"),
    Config("biases", optional=("qkv_bias", "o_bias", "gate_up_bias", "down_bias"), activation="gelu"),
    Config("qwen3", optional=("q_norm", "k_norm"), dim=48, v_dim=48, rotary=24),
    Config(
        "gemma",
        optional=("attn_out_norm", "mlp_out_norm"),
        activation="gelu_tanh",
        window=9,
        softcap=2.0,
        embed_scale=3.0,
        final_softcap=5.0,
    ),
    Config("granite", multiplier=0.3, logit_scale=0.25, kv_heads=4),
    Config("partial", rotary=7, interleaved=True, optional=("sinks",), kv_heads=1, v_dim=16),
]


def rms(x, weight):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * weight


class Model:
    """Random float32 weights of a config, and what numpy makes of them."""

    def __init__(self, config):
        self.config = config
        random = np.random.default_rng(11)
        draw = lambda *shape: (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)  # noqa: E731
        c = config
        self.embed, self.head = draw(VOCAB, HIDDEN) * 4, draw(VOCAB, HIDDEN) * 3
        self.inv_freq = (1 / 100 ** (np.arange(c.rotary) / c.rotary)).astype(np.float32)
        near_one = lambda n: random.uniform(0.5, 1.5, n).astype(np.float32)  # noqa: E731
        self.final_norm = near_one(HIDDEN)
        self.layers = []
        for _ in range(LAYERS):
            gate, up, down = draw(c.inner, HIDDEN), draw(c.inner, HIDDEN), draw(HIDDEN, c.inner)
            gate[c.intermediate :] = up[c.intermediate :] = 0
            down[:, c.intermediate :] = 0
            lengths = {
                "q_norm": c.dim,
                "k_norm": c.dim,
                "qkv_bias": c.width,
                "gate_up_bias": 2 * c.inner,
                "sinks": c.heads,
            }
            names = ("attn_norm", "mlp_norm", *c.optional)
            vectors = {name: near_one(lengths.get(name, HIDDEN)) for name in names}
            matrices = {"qkv": draw(c.width, HIDDEN), "o": draw(HIDDEN, c.heads * c.v_dim), "down": down}
            # Blocks of 16 rows of gate and of up in turn.
            matrices["gate_up"] = np.stack([gate.reshape(-1, 16, HIDDEN), up.reshape(-1, 16, HIDDEN)], 1).reshape(
                -1, HIDDEN
            )
            self.layers.append((matrices, vectors))

    def through(self, change):
        """The same model with every matrix changed."""
        other = copy(self)
        other.embed, other.head = change(self.embed), change(self.head)
        other.layers = [({name: change(w) for name, w in m.items()}, v) for m, v in self.layers]
        return other

    def rotated(self, x, positions):
        """Rope on [tokens, heads, dim]."""
        n = len(self.inv_freq)
        angles = (positions[:, None].astype(np.float32) * self.inv_freq)[:, None]
        cos, sin, out = np.cos(angles), np.sin(angles), x.copy()
        first, second = (
            (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if self.config.interleaved else (slice(n), slice(n, 2 * n))
        )
        a, b = x[..., first], x[..., second]
        out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
        return out

    def logits(self, tokens):
        """[tokens, vocab] in float64, for one sequence from its beginning."""
        c, n = self.config, len(tokens)
        x = self.embed[tokens].astype(np.float64) * c.embed_scale
        act = {
            "silu": lambda x: x / (1 + np.exp(-x)),
            "gelu": lambda x: 0.5 * x * (1 + np.vectorize(erf)(x / 2**0.5)),
            "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))),
        }[c.activation]
        for w, v in self.layers:
            qkv = rms(x, v["attn_norm"]) @ w["qkv"].T + v.get("qkv_bias", 0)
            q, k, values = np.split(qkv, [c.heads * c.dim, (c.heads + c.kv_heads) * c.dim], axis=1)
            q, k = q.reshape(n, c.heads, c.dim), k.reshape(n, c.kv_heads, c.dim)
            if "q_norm" in v:
                q, k = rms(q, v["q_norm"]), rms(k, v["k_norm"])
            q, k = self.rotated(q, np.arange(n)), self.rotated(k, np.arange(n))
            options = {"window": c.window, "softcap": c.softcap, "sinks": v.get("sinks")}
            a = attention(q, k, values.reshape(n, c.kv_heads, c.v_dim), 0, scaling=c.dim**-0.5, **options)
            a = a.reshape(n, -1) @ w["o"].T + v.get("o_bias", 0)
            x = x + c.multiplier * (rms(a, v["attn_out_norm"]) if "attn_out_norm" in v else a)
            both = (rms(x, v["mlp_norm"]) @ w["gate_up"].T + v.get("gate_up_bias", 0)).reshape(n, -1, 2, 16)
            m = (act(both[:, :, 0]) * both[:, :, 1]).reshape(n, -1) @ w["down"].T + v.get("down_bias", 0)
            x = x + c.multiplier * (rms(m, v["mlp_out_norm"]) if "mlp_out_norm" in v else m)
        logits = rms(x, self.final_norm) @ self.head.T * c.logit_scale
        return c.final_softcap * np.tanh(logits / c.final_softcap) if c.final_softcap else logits


class Decoder:
    """The kernel's decoder of a model; sequences own pages in a shuffled order."""

    def __init__(
        self, kernels, model, kind="float32", pages="float32", threads=1, page_size=16, group=0, minimum=False
    ):
        c = model.config
        self.kernels, self.form, self.page_size = kernels, (kind, group, minimum), page_size
        scales = (c.embed_scale, c.logit_scale, c.final_softcap)
        self.op = kernels.Decoder(threads, VOCAB, HIDDEN, 1e-5, kind, group, minimum, *scales)
        self.op.set_ends(kind, self.packed(model.embed), self.packed(model.head), model.final_norm)
        self.op.add_rope(model.inv_freq, 1.0, c.interleaved)
        for matrices, vectors in model.layers:
            self.op.add_layer(
                heads=c.heads,
                kv_heads=c.kv_heads,
                dim=c.dim,
                v_dim=c.v_dim,
                scaling=c.dim**-0.5,
                window=c.window,
                softcap=c.softcap,
                rope=0,
                intermediate=c.intermediate,
                activation=c.activation,
                multiplier=c.multiplier,
                vectors=vectors,
                **{name: self.packed(w) for name, w in matrices.items()},
            )
        self.pages = list(np.random.default_rng(5).permutation(64).astype(np.int32))
        self.op.allocate(len(self.pages), page_size, pages, False)
        self.tables = {}

    def packed(self, w):
        kind, group, minimum = self.form
        data = np.zeros(self.kernels.packed_size(kind, *w.shape, group, minimum), np.uint8)
        self.kernels.pack(kind, w, data, 0, len(w), group, minimum)
        return data

    def rounded(self, w):
        """What is left of a matrix after packing."""
        kind, group, minimum = self.form
        out = np.zeros_like(w)
        self.kernels.unpack(kind, self.packed(w), out, 0, len(w), group, minimum)
        return out

    def step(self, *chunks, best_only=False):
        """Chunks (sequence, tokens, start); the logits of all rows, or the best tokens and their logits."""
        tables = []
        for name, tokens, start in chunks:
            table = self.tables.setdefault(name, [])
            while len(table) * self.page_size < start + len(tokens):
                table.append(self.pages.pop())
            tables.append(np.array(table, np.int32))
        tokens = np.concatenate([tokens for _, tokens, _ in chunks]).astype(np.int32)
        integers = lambda values: np.array(values, np.int32)  # noqa: E731
        best, best_logit = np.zeros(len(tokens), np.int32), np.zeros(len(tokens), np.float32)
        logits = None if best_only else np.full((len(tokens), VOCAB), np.nan, np.float32)
        self.op.step(
            tokens,
            integers([len(tokens) for _, tokens, _ in chunks]),
            integers([start for _, _, start in chunks]),
            np.concatenate(tables),
            integers(np.cumsum([0, *map(len, tables)])),
            np.arange(len(tokens), dtype=np.int32),
            best,
            best_logit,
            logits,
        )
        return (best, best_logit) if best_only else logits


TOKENS = np.random.default_rng(1).integers(0, VOCAB, 45)
# Kinds of weights with their group and minimum, and what keys and values are kept in.
FORMS = [
    ("float32", 0, False, "float32"),
    ("float32", 0, False, "int8"),
    ("bfloat16", 0, False, "bfloat16"),
    ("int8", 0, False, "bfloat16"),
    ("int8", 0, False, "int8"),
    ("int4", 32, True, "bfloat16"),
]
NAMES = [f"{form[0]}-{form[3]}" for form in FORMS]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_logits_are_numpys(kernels, config):
    model = Model(config)
    want = model.logits(TOKENS)
    decoder = Decoder(kernels, model)
    got = np.concatenate([decoder.step(("a", TOKENS[:30], 0)), decoder.step(("a", TOKENS[30:], 30))])
    assert np.abs(want).max() > 0.5
    assert np.abs(got - want).max() <= 3e-5 * np.abs(want).max()


@pytest.mark.parametrize(("kind", "group", "minimum", "pages"), FORMS, ids=NAMES)
def test_rounded_activations_and_pages_are_near_numpys_on_the_same_weights(kernels, kind, group, minimum, pages):
    model = Model(CONFIGS[0])
    decoder = Decoder(kernels, model, kind, pages, group=group, minimum=minimum)
    want, got = model.through(decoder.rounded).logits(TOKENS), decoder.step(("a", TOKENS, 0))
    share = {"float32": 1e-5, "bfloat16": 0.01, "int8": 0.03, "int4": 0.03}[kind]
    if pages == "int8":
        share = max(share, 0.02)
    assert np.sqrt(((got - want) ** 2).mean()) <= share * want.std()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(("kind", "group", "minimum", "pages"), FORMS, ids=NAMES)
def test_a_sequence_has_the_same_bits_in_any_company_and_however_it_is_cut(
    kernels, config, kind, group, minimum, pages
):
    model = Model(config)
    make = lambda threads: Decoder(kernels, model, kind, pages, threads, group=group, minimum=minimum)  # noqa: E731
    whole = make(1).step(("a", TOKENS, 0))
    for threads in (1, 2):
        decoder, at, other = make(threads), 0, 0
        for size in (1, 20, 1, 1, 5, 17):
            chunks = [("b", TOKENS[::-1][other : other + 3].copy(), other), ("a", TOKENS[at : at + size], at)]
            got = decoder.step(*chunks)[3:]
            assert np.array_equal(got, whole[at : at + size]), f"tokens {at} to {at + size}, {threads} threads"
            at, other = at + size, other + 3
        assert at == len(TOKENS)


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[3]], ids=str)
def test_the_best_token_is_that_of_the_logits(kernels, config):
    model = Model(config)
    logits = Decoder(kernels, model).step(("a", TOKENS, 0))
    for threads in (1, 2):
        best, best_logit = Decoder(kernels, model, threads=threads).step(("a", TOKENS, 0), best_only=True)
        assert np.array_equal(best, logits.argmax(axis=1))
        if not config.final_softcap:
            assert np.array_equal(best_logit, logits.max(axis=1))


def test_of_two_equal_logits_the_first_token_is_the_best(kernels):
    model = Model(CONFIGS[0])
    model.head[:] = np.abs(model.head[:1])
    for threads in (1, 2):
        best, _ = Decoder(kernels, model, threads=threads).step(("a", TOKENS, 0), best_only=True)
        assert (best == 0).all()


@pytest.mark.parametrize(
    ("tokens", "start", "message"),
    [([VOCAB], 0, "vocabulary"), ([-1], 0, "vocabulary"), ([1], -1, "pages"), ([1, 2], 16, "pages")],
)
def test_a_step_that_makes_no_sense_is_refused(kernels, tokens, start, message):
    decoder = Decoder(kernels, Model(CONFIGS[0]))
    integers = lambda *values: np.array(values, np.int32)  # noqa: E731
    flat, lengths, starts, table = np.array(tokens, np.int32), integers(len(tokens)), integers(start), integers(3)
    outputs = (integers(0), np.zeros(1, np.int32), np.zeros(1, np.float32), None)
    with pytest.raises(ValueError, match=message):
        decoder.op.step(flat, lengths, starts, table, integers(0, 1), *outputs)
