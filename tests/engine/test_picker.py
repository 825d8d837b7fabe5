"""The picker: the shortest way to a token gives the same one as the longest, and bad logits reach nobody."""

import math

import numpy as np
import pytest
import torch

from anyrig.core.params import SamplingParams
from anyrig.core.spec import StepResult
from anyrig.engine.picker import Picker
from anyrig.engine.rows import NOT_FINITE, SampleRow
from anyrig.engine.sampler import Sampler
from anyrig.ops.cpu import native

VOCAB = 1003
KINDS: list[dict[str, object]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0, "banned_token_ids": [1, 2], "logprobs": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 0.9, "presence_penalty": 0.5},
]

needs_kernels = pytest.mark.skipif(native.module() is None, reason=f"CPU kernels: {native.why_not()}")


def rows() -> list[SampleRow]:
    return [SampleRow(SamplingParams(**kind), [4, 8], [], seed) for seed, kind in enumerate(KINDS)]  # type: ignore[arg-type]


def result(logits: torch.Tensor) -> StepResult:
    """As the fused decoder gives it."""
    best, values = [], []
    for row in logits:
        best.append(int(row.nan_to_num(-math.inf).argmax()))
        values.append(math.nan if bool(row.isnan().any()) else float(row.max()))
    return StepResult(logits.numpy().copy(), best, values)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
def test_every_row_gets_what_the_sampler_gives_it(threads: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2 * len(KINDS), VOCAB) * 3
    at = list(range(1, 2 * len(KINDS), 2))  # some rows of the step belong to nobody
    got = Picker(VOCAB, threads=threads).sample(result(logits), at, rows())
    assert got == Sampler(VOCAB).sample(logits[at], rows())
    assert got == Picker(VOCAB).sample(StepResult(logits), at, rows())


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("kind", range(len(KINDS)), ids=lambda k: ",".join(KINDS[k]))
def test_a_row_of_logits_that_are_not_finite_gets_no_token_whatever_it_needs(kind: int, poison: float) -> None:
    torch.manual_seed(1)
    logits = torch.randn(len(KINDS), VOCAB)
    good = Picker(VOCAB).sample(result(logits), range(len(KINDS)), rows())
    logits[kind, 77] = poison
    got = Picker(VOCAB).sample(result(logits), range(len(KINDS)), rows())
    assert (got[kind].token_id, got[kind].error) == (-1, NOT_FINITE)
    assert (got[kind].logprob, got[kind].logprobs) == (None, None)
    assert got[:kind] + got[kind + 1 :] == good[:kind] + good[kind + 1 :]


def test_a_best_logit_that_is_not_finite_is_enough() -> None:
    """Where the runner saw it, the logits need not show it: a value that a ban or a grammar would hide."""
    logits = torch.randn(len(KINDS), VOCAB)
    step = StepResult(logits.numpy(), [0] * len(KINDS), [math.nan] * len(KINDS))
    assert {s.error for s in Picker(VOCAB).sample(step, range(len(KINDS)), rows())} == {NOT_FINITE}


def test_best_tokens_need_no_logits() -> None:
    plain = [SampleRow(SamplingParams(temperature=0), [4], [], 0) for _ in range(3)]
    got = Picker(VOCAB).sample(StepResult(None, [5, 6, 7], [1.0, math.inf, 2.0]), [2, 1, 0], plain)
    assert [(s.token_id, s.error) for s in got] == [(7, None), (-1, NOT_FINITE), (5, None)]


@needs_kernels
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_torch_works_on_one_thread_and_has_its_own_number_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for name in ("sample", "prompt_logprobs"):
        original = getattr(Sampler, name)

        def noted(*args: object, original: object = original) -> object:
            seen.append(torch.get_num_threads())
            return original(*args)  # type: ignore[operator]

        monkeypatch.setattr(Sampler, name, noted)
    logits = torch.randn(len(KINDS), VOCAB)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        picker = Picker(VOCAB)
        given = logits.numpy() if kind == "numpy" else logits
        picker.sample(StepResult(given), range(len(KINDS)), rows())
        scores = picker.prompt_logprobs(given, [3] * len(KINDS), 1)
        assert len(scores) == len(KINDS)
        assert seen == [1, 1]
        with pytest.raises(ValueError, match="logits must be"):
            picker.prompt_logprobs(given, [3], 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_prompt_log_probabilities_of_arrays_are_those_of_tensors() -> None:
    logits = np.random.default_rng(0).normal(size=(5, VOCAB)).astype(np.float32)
    ids = [1, 2, 3, 4, 1002]
    assert Picker(VOCAB).prompt_logprobs(logits, ids, 3) == Sampler(VOCAB).prompt_logprobs(
        torch.from_numpy(logits), ids, 3
    )
