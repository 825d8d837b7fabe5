"""The truth comes from outside: our greedy tokens are those of Transformers' own eager `generate`, in float32."""

import random
from pathlib import Path

import pytest
import torch

from anyrig import LLM, SamplingParams
from anyrig.models import load, locate

NEW_TOKENS = 12
TIE = 1e-3  # where eager's two best logits are this close, rounding decides and the comparison ends
LENGTHS = [
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    32,
    33,
    48,
    63,
    64,
    65,
    100,
    127,
    128,
    129,
    200,
    255,
    256,
    257,
    511,
    1500,
]


def prompts(tokenizer, count=64, seed=0):
    """Token ids of real text (this package's own sources), of mixed length."""
    import anyrig.core.params
    import anyrig.engine.engine

    modules = (anyrig.core.params, anyrig.engine.engine)
    text = "".join(Path(module.__file__).read_text("utf-8") for module in modules)
    ids = tokenizer.encode(text)
    rng = random.Random(seed)
    lengths = LENGTHS + [rng.randrange(1, 120) for _ in range(count - len(LENGTHS))]
    rng.shuffle(lengths)
    starts = [rng.randrange(0, len(ids) - n) for n in lengths]
    return [ids[s : s + n] for s, n in zip(starts, lengths, strict=True)]


@torch.inference_mode()
def eager(model, prompt):
    """Greedy tokens of `generate`, and the distance of the two best logits at each of them."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.stack(out.logits)[:, 0].topk(2).values
    return out.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


def compare(model_name, count, allowed_ties):
    llm = LLM(model_name, dtype="float32", kv_cache_memory="2GiB")
    asked = prompts(llm.tokenizer, count)
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    ours = [out.outputs[0].token_ids for out in llm.generate(asked, greedy)]
    path = locate.resolve(model_name).path
    model = load.load(path, dtype=torch.float32, attn_implementation="eager")
    ties = 0
    for prompt, mine in zip(asked, ours, strict=True):
        theirs, margins = eager(model, prompt)
        for position, (a, b, margin) in enumerate(zip(mine, theirs, margins, strict=True)):
            if margin < TIE:
                ties += 1
                break
            assert a == b, f"prompt of {len(prompt)} tokens, output {position}: {a} instead of {b} ({margin:.4f} apart)"
    assert ties <= allowed_ties


def test_64_prompts_in_flight_together_give_the_tokens_of_eager_generate():
    compare("smollm2-135m", 64, allowed_ties=2)


@pytest.mark.parametrize("count", [16])
def test_gemma3_with_its_sliding_window_runs_through_the_same_adapter(count):
    compare("gemma3-270m", count, allowed_ties=2)
