"""Products with packed weights, against numpy: values, and the same bits whatever the company and the threads."""

import numpy as np
import pytest
from kernel_reference import activations, bf16, product

# (kind, group, minimum)
FORMS = [
    ("float32", 0, False),
    ("bfloat16", 0, False),
    ("int8", 0, False),
    *(("int4", group, minimum) for group in (32, 64, 128) for minimum in (False, True)),
]
FORM_NAMES = [f"{kind}{f'-{group}' if group else ''}{'-minimum' if minimum else ''}" for kind, group, minimum in FORMS]
# Rows that fill tiles, leave remainders, and cross the number from which int4 is unpacked once for all.
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 31, 40)
# (n, k): multiples of the block (16) and the unit (64), and neither.
SHAPES = [(16, 64), (1, 1), (5, 7), (49, 200), (96, 576), (130, 65), (100, 63), (33, 128), (17, 321)]


@pytest.fixture
def random():
    return np.random.default_rng(7)


def weights(random, n, k):
    return (random.standard_normal((n, k)) * random.uniform(0.01, 0.2, (n, 1))).astype(np.float32)


def pack(kernels, form, w):
    kind, group, minimum = form
    data = np.zeros(kernels.packed_size(kind, *w.shape, group, minimum), np.uint8)
    kernels.pack(kind, w, data, 0, len(w), group, minimum)
    return data


def unpack(kernels, form, data, shape):
    kind, group, minimum = form
    out = np.full(shape, np.nan, np.float32)
    kernels.unpack(kind, data, out, 0, shape[0], group, minimum)
    return out


def linear(kernels, form, data, shape, threads=1):
    kind, group, minimum = form
    return kernels.Linear(data, kind, *shape, group, minimum, threads)


def run(op, x, n):
    """The product, with a look at what lies around the output."""
    around = np.full(x.shape[0] * n + 64, 1e30, np.float32)
    out = around[32:-32].reshape(x.shape[0], n)
    op.run(x, out)
    assert (around[:32] == 1e30).all() and (around[-32:] == 1e30).all(), "written beyond the output"
    return out


@pytest.mark.parametrize("form", FORMS, ids=FORM_NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_the_product_is_numpys(kernels, random, form, shape):
    w = weights(random, *shape)
    data = pack(kernels, form, w)
    left = unpack(kernels, form, data, shape)
    op = linear(kernels, form, data, shape)
    for m in (1, 3, 6, 40):
        x = activations(random, m, shape[1])
        want, size = product(form[0], x, left)
        error = np.abs(run(op, x, shape[0]) - want)
        assert (error <= 2e-6 * size + 1e-30).all(), f"{m} rows: {(error / size).max():.1e} of the terms' size"


@pytest.mark.parametrize("form", FORMS, ids=FORM_NAMES)
@pytest.mark.parametrize("shape", [(49, 200), (130, 321)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_a_row_has_the_same_bits_alone_in_any_company_and_with_any_threads(kernels, random, form, shape):
    data = pack(kernels, form, weights(random, *shape))
    x = random.standard_normal((max(ROWS), shape[1])).astype(np.float32)
    one, two = (linear(kernels, form, data, shape, threads) for threads in (1, 2))
    alone = np.concatenate([run(one, x[i : i + 1], shape[0]) for i in range(len(x))])
    for m in ROWS:
        for op in (one, two):
            first = random.integers(0, len(x) - m + 1)
            assert np.array_equal(run(op, x[first : first + m].copy(), shape[0]), alone[first : first + m]), f"{m} rows"


@pytest.mark.parametrize("form", FORMS, ids=FORM_NAMES)
def test_packing_keeps_the_weights_to_half_a_step(kernels, random, form):
    kind, group, minimum = form
    w = weights(random, 49, 200)
    left = unpack(kernels, form, pack(kernels, form, w), w.shape)
    if kind == "float32":
        assert np.array_equal(left, w)
    elif kind == "bfloat16":
        assert np.array_equal(left, bf16(w))
    elif kind == "int8":
        step = np.abs(w).max(axis=1, keepdims=True) / 127
        assert (np.abs(left - w) <= 0.5001 * step).all()
        assert np.abs(left).max(axis=1) == pytest.approx(np.abs(w).max(axis=1), rel=1e-6)
    else:
        for first in range(0, w.shape[1], group):
            part, kept = w[:, first : first + group], left[:, first : first + group]
            low, high = part.min(axis=1, keepdims=True), part.max(axis=1, keepdims=True)
            step = (high - low) / 15 if minimum else np.maximum(-low / 8, high / 7)
            # The scale and the minimum are half-precision numbers themselves.
            slack = np.abs(part).max(axis=1, keepdims=True) * 2.0**-9
            assert (np.abs(kept - part) <= 0.5 * step + slack).all()


@pytest.mark.parametrize("form", FORMS, ids=FORM_NAMES)
def test_packing_piece_by_piece_gives_the_same_bytes(kernels, random, form):
    kind, group, minimum = form
    w = weights(random, 49, 200)
    whole, pieces = pack(kernels, form, w), np.zeros_like(pack(kernels, form, w))
    for first, last in ((32, 49), (0, 16), (16, 32)):
        kernels.pack(kind, w[first:last].copy(), pieces, first, len(w), group, minimum)
    assert np.array_equal(pieces, whole)


@pytest.mark.parametrize("form", FORMS, ids=FORM_NAMES)
def test_zeros_stay_zeros(kernels, random, form):
    shape = (20, 130)
    w = weights(random, *shape)
    w[3] = 0
    op = linear(kernels, form, pack(kernels, form, w), shape)
    x = activations(random, 3, shape[1])
    x[1] = 0
    out = run(op, x, shape[0])
    assert (out[1] == 0).all() and (out[:, 3] == 0).all() and np.isfinite(out).all()
    assert (out[0] != 0).sum() == shape[0] - 1


@pytest.mark.parametrize("form", FORMS, ids=FORM_NAMES)
def test_a_row_that_overflows_spoils_no_other(kernels, random, form):
    shape = (49, 200)
    op = linear(kernels, form, pack(kernels, form, weights(random, *shape)), shape)
    x = random.standard_normal((9, shape[1])).astype(np.float32)
    clean = run(op, x, shape[0])
    x[4, 10] = np.nan
    x[6, 70] = np.inf
    spoilt = run(op, x, shape[0])
    others = [0, 1, 2, 3, 5, 7, 8]
    assert np.array_equal(spoilt[others], clean[others])


def test_arrays_of_another_kind_are_refused_rather_than_copied(kernels, random):
    form, shape = ("float32", 0, False), (16, 64)
    w = weights(random, *shape)
    op = linear(kernels, form, pack(kernels, form, w), shape)
    x, out = np.zeros((4, 64), np.float32), np.zeros((4, 16), np.float32)
    op.run(x, out)
    wrong = [
        (x.astype(np.float64), out),
        (x, out.astype(np.float64)),
        (np.zeros((4, 128), np.float32)[:, ::2], out),
        (x, np.zeros((16, 4), np.float32).T),
    ]
    for a, b in wrong:
        with pytest.raises(TypeError):
            op.run(a, b)


def test_sizes_that_do_not_fit_are_refused(kernels, random):
    w = weights(random, 16, 64)
    data = pack(kernels, ("int8", 0, False), w)
    op = linear(kernels, ("int8", 0, False), data, (16, 64))
    for x, out in [((4, 63), (4, 16)), ((4, 64), (3, 16)), ((4, 64), (4, 15))]:
        with pytest.raises(ValueError, match=r"\[m, k\]"):
            op.run(np.zeros(x, np.float32), np.zeros(out, np.float32))
    with pytest.raises(ValueError, match="bytes"):
        kernels.Linear(data[:-1].copy(), "int8", 16, 64, 0, False, 1)
    with pytest.raises(ValueError, match="bytes"):
        kernels.pack("int8", w, data[:-1].copy(), 0, 16)
    with pytest.raises(ValueError, match="kind"):
        kernels.packed_size("int5", 16, 64)
    with pytest.raises(ValueError, match="group"):
        kernels.packed_size("int4", 16, 64, 48, True)
    with pytest.raises(ValueError, match="sixteens"):
        kernels.pack("int8", w[:8].copy(), data, 0, 16)
