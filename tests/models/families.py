"""Tiny random models, one per family of Transformers, and the check that makes the table of support.

    python -m tests.models.families > docs/support.md

runs every check and writes what came out; `test_families.py` runs them again and compares with the table.
"""

import random
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from anyrig.core.config import EngineConfig
from anyrig.core.errors import Unsupported
from anyrig.core.spec import Chunk, StepPlan
from anyrig.engine.fused import FusedRunner, pack
from anyrig.engine.paged import FallbackRunner, PagedRunner
from anyrig.models.adapter import Decoder
from anyrig.models.describe import describe
from anyrig.models.fallback import Fallback
from anyrig.models.load import load_random
from anyrig.models.prepared import InMemory
from anyrig.ops.cpu import native

VOCAB = 160
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD = {"head_dim": 16}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Family:
    model_type: str
    why: str  # what is special about it
    config: dict[str, Any] = field(default_factory=dict)

    def configuration(self) -> dict[str, Any]:
        return {**SMALL, **self.config, "model_type": self.model_type}


FAMILIES = [
    Family("llama", "grouped queries"),
    Family("mistral", "sliding window on every layer", {"sliding_window": 20}),
    Family("qwen2", "biases on q, k, v"),
    Family("qwen3", "norms on q and k", HEAD),
    Family("qwen3_moe", "mixture of experts", {**HEAD, **MOE}),
    Family("mixtral", "mixture of experts", MOE),
    Family("olmo2", "norms after the blocks"),
    Family("smollm3", "layers without rope", {"no_rope_layer_interval": 2}),
    Family("phi3", "fused q, k, v", {"pad_token_id": 0}),
    Family("gemma", "scaled embeddings", HEAD),
    Family("gemma2", "softcap, sliding and full layers", {**HEAD, "sliding_window": 20, "query_pre_attn_scalar": 16}),
    Family(
        "gemma3_text",
        "sliding and full layers, two rope bases",
        {
            **HEAD,
            "sliding_window": 20,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        },
    ),
    Family(
        "gpt_oss",
        "attention sinks, mixture of experts",
        {
            **HEAD,
            **MOE,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    Family("granite", "multipliers", {"attention_multiplier": 0.2, "logits_scaling": 2.0}),
    Family("cohere", "parallel attention and MLP"),
    Family("glm4", "partial rope", HEAD),
    Family("gpt_neox", "one projection for q, k, v", {"num_key_value_heads": 4}),
    Family("gpt2", "learned positions", {"n_positions": 512, "n_embd": 64, "n_layer": 3, "n_head": 4}),
    Family("opt", "learned positions with an offset", {"word_embed_proj_dim": 64, "ffn_dim": 96}),
    Family("starcoder2", "biases, plain MLP"),
    Family("stablelm", "no backend flag: Transformers' own forward"),
    Family(
        "deepseek_v3",
        "latent attention: values narrower than keys",
        {
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
            "num_key_value_heads": 4,
        },
    ),
    Family("mamba", "recurrent: Transformers' own forward", {"state_size": 8, "conv_kernel": 4, "expand": 2}),
    Family(
        "falcon",
        "attention of its own: Transformers' own forward",
        {"new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    Family("bloom", "ALiBi: Transformers' own forward", {"n_layer": 3, "n_head": 4}),
]


@dataclass(frozen=True)
class Verdict:
    tier: str  # "fused", "paged" or "transformers"
    reason: str  # why not a better one
    difference: float  # greatest difference of logits from an eager forward, relative to the greatest logit


def fused_runner(config: dict[str, Any], name: str, options: EngineConfig) -> FusedRunner:
    """The CPU kernels' decoder of a random model.

    Raises:
        Unsupported: when the kernels aren't built, or don't cover it.
    """
    module = native.module()
    if module is None:
        raise Unsupported(native.why_not() or "")
    description = describe(load_random(config, dtype=torch.float32, seed=1), name, 256, kind="float32")
    memory = InMemory(description.spec, module.packed_size)
    pack(description, memory, module)
    return FusedRunner(memory.commit(), module, options, 256)


def make_runner(family: Family, config: dict[str, Any], options: EngineConfig, fused: bool) -> tuple[Any, str]:
    """The first tier that takes it, and why the one before did not."""
    reason = ""
    if fused:
        try:
            return fused_runner(config, family.model_type, options), ""
        except Unsupported as error:
            reason = str(error)
    try:
        model = load_random(config, dtype=torch.float32, seed=1)
        return PagedRunner(Decoder(model, family.model_type, 256), options, 256), reason
    except Unsupported as error:
        reason = str(error)
    model = load_random(config, dtype=torch.float32, seed=1)
    return FallbackRunner(Fallback(model), options, 256, reason), reason


@torch.inference_mode()
def check(family: Family, fused: bool = True) -> Verdict:
    """Ragged prefill in chunks, then decode together, against one eager forward per sequence (float32).

    Args:
        fused: let the CPU kernels' whole decoder have it where it can; else the paged tier is the best.
    """
    config = family.configuration()
    eager = load_random(config, dtype=torch.float32, seed=1)
    options = EngineConfig(kv_cache_memory="16MiB", max_model_len=256)
    runner, reason = make_runner(family, config, options, fused)
    rng = random.Random(0)
    sequences = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (1, 9, 40, 70)]
    tables = [list(range(1 + 8 * i, 9 + 8 * i)) for i in range(len(sequences))]
    got: list[list[torch.Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
        chunks = []
        for i, tokens in enumerate(sequences):
            # Chunks of uneven size; the last five tokens one by one, as decoding does.
            left = len(tokens) - done[i]
            n = min(left, 1 if left <= 5 else min(23 if runner.chunked else left, left - 5))
            if n:
                chunks.append(Chunk(i, tokens[done[i] : done[i] + n], done[i], tables[i], rows=n))
        logits = torch.as_tensor(runner.run(StepPlan(chunks)).logits).clone().split([c.rows for c in chunks])
        for chunk, rows in zip(chunks, logits, strict=True):
            got[chunk.seq_id].append(rows)
            done[chunk.seq_id] += chunk.length
    worst = 0.0
    for tokens, rows in zip(sequences, got, strict=True):
        expected = eager(input_ids=torch.tensor([tokens])).logits[0]
        worst = max(worst, float((torch.cat(rows) - expected).abs().max() / expected.abs().max()))
    tiers = {FusedRunner: "fused", PagedRunner: "paged", FallbackRunner: "transformers"}
    return Verdict(tiers[type(runner)], reason, worst)


def table() -> str:
    lines = [
        "# Which models run, and how",
        "",
        f"Made by `python -m tests.models.families` with Transformers {transformers.__version__}; not typed by hand.",
        "Each row is a tiny random model of the family: prompts of 1 to 70 tokens, computed in chunks and token by",
        "token in one ragged batch, agree with an eager forward in float32.",
        "",
        "- **fused**: on a CPU, the whole decoder in our kernels; paged elsewhere, and where they aren't built.",
        "- **paged**: the model's own module on our paged attention; everything in these docs applies.",
        "- **transformers**: Transformers' own forward and cache, one sequence after the other; slower, same results.",
        "",
        "Other decoders are fused when they are made of the same parts, and paged when they use Transformers'",
        "attention interface; the probe at load decides, and says why when it is not so.",
        "",
        "| family | what is special | runs as | why not better |",
        "|---|---|---|---|",
    ]
    for family in FAMILIES:
        verdict = check(family)
        if verdict.difference > 1e-4:
            sys.exit(f"{family.model_type}: logits differ by {verdict.difference:.1e}")
        print(f"{family.model_type}: {verdict}", file=sys.stderr)
        lines.append(f"| {family.model_type} | {family.why} | {verdict.tier} | {verdict.reason} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
