"""Descriptions of decoders: what they say computes Transformers' logits, and what they can't say is refused by name."""

import types
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anyrig.core.decoder import DecoderSpec
from anyrig.core.errors import Unsupported
from anyrig.models.adapter import Decoder
from anyrig.models.describe import check, describe
from anyrig.models.load import load, load_random
from anyrig.models.locate import resolve
from anyrig.models.rows import Rows
from tests.models import fused_reference as reference
from tests.models.families import FAMILIES, HEAD, SMALL, VOCAB

COVERED = {"llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "gemma", "gemma2", "gemma3_text", "granite", "glm4"}
REFUSED = {
    "qwen3_moe": r"layers\.0\.mlp\.experts \(Qwen3MoeExperts\) is not a part of a dense gated block",
    "mixtral": r"layers\.0\.mlp\.gate \(MixtralTopKRouter\) is not a part",
    "olmo2": r"layers\.0\.self_attn is not given the norm of what the layer is given",
    "gpt_oss": r"layers\.0\.mlp\.router \(GptOssTopKRouter\) is not a part",
    "cohere": r"layers\.0\.input_layernorm \(CohereLayerNorm\) is not an RMSNorm",
    "gpt_neox": r"layers\.0\.input_layernorm \(LayerNorm\) is not a part",
    "gpt2": "the first layer is given more than scaled embeddings",
    "opt": "the first layer is given more than scaled embeddings",
    "starcoder2": r"layers\.0\.mlp\.c_fc \(Linear\) is not a part",
    "stablelm": "does not take another attention",
    "deepseek_v3": r"layers\.0\.self_attn\.q_a_proj \(Linear\) is not a part",
    "mamba": "does not take another attention",
    "falcon": "does not take another attention",
    "bloom": "does not take another attention",
}
# What families may be besides what `families.py` has of them, and relatives that nobody named.
VARIANTS = {
    "llama with all biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama of odd sizes": {"model_type": "llama", "intermediate_size": 72, "head_dim": 10, "vocab_size": 151},
    "llama with gelu": {"model_type": "llama", "hidden_act": "gelu"},
    "llama 3 rope": {
        "model_type": "llama",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "yarn": {"model_type": "qwen3", **HEAD, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "dynamic rope": {"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "partial rope": {"model_type": "phi3", "partial_rotary_factor": 0.5},
    "granite with every multiplier": {
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.2,
        "logits_scaling": 8.0,
    },
    "gemma 2 with softcaps": {
        "model_type": "gemma2",
        **HEAD,
        "sliding_window": 9,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 1.5,
    },
    "helium: rope on neighbours": {"model_type": "helium", **HEAD},
    "ernie 4.5": {"model_type": "ernie4_5", **HEAD},
    "glm": {"model_type": "glm", **HEAD},
    "seed_oss": {"model_type": "seed_oss", **HEAD},
    "arcee": {"model_type": "arcee"},
    "exaone 4": {"model_type": "exaone4", "sliding_window": 20},
    "hunyuan": {"model_type": "hunyuan_v1_dense", **HEAD},
    "nemotron": {"model_type": "nemotron"},
}
REFUSED_VARIANTS = {
    "arcee": "up_proj, down_proj rather than gate_proj, up_proj and down_proj",
    "exaone 4": "self_attn is not given the norm of what the layer is given",
    "hunyuan": "self_attn changes q and k in another way",
    "nemotron": "input_layernorm .* is not",
}


def module(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """A random model whose norms and biases are not the ones and zeros of an untrained one."""
    model = load_random({**SMALL, **config}, dtype=dtype, seed=1)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter += torch.randn(parameter.shape, generator=generator).to(dtype) * 0.3
    return model


def difference(model: Any, spec: DecoderSpec, tensors: dict[str, torch.Tensor], n: int = 70) -> float:
    ids = torch.randint(spec.vocab_size, (n,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = model(input_ids=ids[None]).logits[0].float().numpy()
    return float(np.abs(reference.logits(spec, tensors, ids.tolist()) - expected).max() / np.abs(expected).max())


def test_every_family_is_either_covered_or_refused() -> None:
    assert COVERED | REFUSED.keys() == {family.model_type for family in FAMILIES}
    assert not COVERED & REFUSED.keys()


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.model_type in COVERED], ids=lambda f: f.model_type)
def test_a_description_computes_the_logits_of_the_module(family: Any) -> None:
    model = module(family.configuration())
    found = describe(model, family.model_type, 256, kind="float32")
    tensors = reference.gather(found)
    assert difference(model, found.spec, tensors) < 1e-4
    assert DecoderSpec.from_dict(found.spec.to_dict()) == found.spec
    assert {n: tuple(t.shape) for n, t in tensors.items()} == {
        **found.spec.matrices(),
        **{n: (length,) for n, length in found.spec.vectors().items()},
    }


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.model_type in REFUSED], ids=lambda f: f.model_type)
def test_other_families_are_refused_with_a_reason(family: Any) -> None:
    with pytest.raises(Unsupported, match=f"{family.model_type}: .*{REFUSED[family.model_type]}"):
        describe(module(family.configuration()), family.model_type, 256, kind="float32")


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_computed_or_refused(name: str) -> None:
    model = module(VARIANTS[name])
    if name in REFUSED_VARIANTS:
        with pytest.raises(Unsupported, match=REFUSED_VARIANTS[name]):
            describe(model, name, 256, kind="float32")
        return
    found = describe(model, name, 256, kind="float32")
    assert difference(model, found.spec, reference.gather(found)) < 1e-4


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.model_type in COVERED], ids=lambda f: f.model_type)
def test_a_bfloat16_module_is_described_as_its_float32_twin(family: Any) -> None:
    # Roundings of a forward in bfloat16 must not be taken for another factor, rope or activation.
    coarse = describe(module(family.configuration(), torch.bfloat16), "coarse", 256, kind="int8").spec
    fine = describe(module(family.configuration()), "fine", 256, kind="int8").spec
    assert coarse == fine


def test_gemmas_embedding_scale_is_rounded_where_the_module_rounds_it() -> None:
    config = {"model_type": "gemma", **HEAD, "hidden_size": 80}
    assert describe(module(config), "x", 256, kind="float32").spec.embed_scale == pytest.approx(80**0.5, rel=1e-7)
    rounded = float(torch.tensor(80**0.5, dtype=torch.bfloat16))
    assert describe(module(config, torch.bfloat16), "x", 256, kind="float32").spec.embed_scale == rounded != 80**0.5


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_weights_are_described_and_checked(name: str) -> None:
    model = load(resolve(name).path, dtype=torch.float32)
    found = describe(model, name, 2048, kind="float32")
    tensors = reference.gather(found)
    assert check(found.spec, model, lambda ids: reference.logits(found.spec, tensors, ids)) < 1e-4


# What a module does counts, not what its parts are called.


def _double_attention(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        out, weights = forward(*args, **kwargs)
        return 2 * out, weights

    attention.forward = doubled


def _swap_gate(model: Any) -> None:
    mlp = model.model.layers[2].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.gate_proj(x) * mlp.act_fn(mlp.up_proj(x)))


def _layer_norm(model: Any) -> None:
    norm = model.model.layers[0].post_attention_layernorm
    norm.forward = types.MethodType(lambda self, x: nn.functional.layer_norm(x, (64,), self.weight), norm)


def _turn_twice(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 1.5  # what the buffers say no longer is what happens
    forward = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda *a, **k: tuple(2 * t for t in forward(*a, **k))


def _clamp_values(model: Any) -> None:
    v = model.model.layers[0].self_attn.v_proj
    v.register_forward_hook(lambda m, args, out: None)
    v.weight *= 100
    layer = model.model.layers[0].self_attn
    layer.o_proj.register_forward_pre_hook(lambda m, args: (args[0].clamp(-1, 1),))


def _other_logits(model: Any) -> None:
    head = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = head(*args, **kwargs)
        out.logits = out.logits.clamp(-10, 10)
        return out

    type(model).forward, model.forward = type(model).forward, forward


def _extra_weight(model: Any) -> None:
    model.model.layers[2].mlp.gain = nn.Parameter(torch.ones(1))


def _skip_a_layer(model: Any) -> None:
    # The second layer is given the embeddings once more.
    layers = model.model.layers
    layers[0].register_forward_hook(lambda m, args, out: setattr(layers[1], "first", args[0]))
    layers[1].register_forward_pre_hook(lambda m, args: (args[0] + m.first, *args[1:]))


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (_double_attention, "layers.1 adds something else than its attention|layers.1 adds its MLP"),
        (_swap_gate, r"layers.2 does not give down_proj silu\(gate\) \* up"),
        (_layer_norm, r"post_attention_layernorm \(LlamaRMSNorm\) is not an RMSNorm"),
        (_turn_twice, "layers.0.self_attn changes q and k in another way"),
        (_clamp_values, "layers.0.self_attn changes the result of attention before o_proj"),
        (_other_logits, "the output layer is followed by more than a scale and a softcap"),
        (_extra_weight, r"layers.2.mlp \(LlamaMLP\) is not a part"),
        (_skip_a_layer, "layers.1 is not given what the layer before it returned"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_module_that_does_something_else_is_refused(tamper: Any, reason: str) -> None:
    model = module({"model_type": "llama"})
    describe(model, "llama", 256, kind="float32")
    tamper(model)
    with pytest.raises(Unsupported, match=reason):
        describe(model, "llama", 256, kind="float32")


def test_packed_layers_are_refused_and_describing_leaves_the_module_as_it_was() -> None:
    model = module({"model_type": "llama"})
    ids = torch.arange(3, 40)[None]
    before = model(input_ids=ids).logits
    describe(model, "llama", 256, kind="float32")
    assert torch.equal(model(input_ids=ids).logits, before)
    assert not any(m._forward_hooks for m in model.modules())
    decoder = Decoder(model, "llama", 256)
    if decoder.linear.make is not None:
        with pytest.raises(Unsupported, match="Linear"):
            describe(model, "llama", 256, kind="float32")


def test_the_check_finds_what_a_description_says_wrongly() -> None:
    model = module({"model_type": "gemma2", **HEAD, "sliding_window": 20, "query_pre_attn_scalar": 16})
    found = describe(model, "gemma2", 256, kind="float32")
    tensors = reference.gather(found)
    layer = found.spec.layers[0]
    wrong = {
        "window": replace(layer, attention=replace(layer.attention, window=19)),
        "rope": replace(layer, rope=None),
        "activation": replace(layer, activation="silu"),
        "scaling": replace(layer, attention=replace(layer.attention, scaling=0.3)),
    }
    for name, other in wrong.items():
        spec = replace(found.spec, layers=(other, *found.spec.layers[1:]))
        with pytest.raises(Unsupported, match="logits"):
            print(name, check(spec, model, lambda ids, spec=spec: reference.logits(spec, tensors, ids)))
    with pytest.raises(Unsupported, match="logits"):
        check(found.spec, model, lambda ids: np.full((len(ids), VOCAB), np.nan))


@pytest.mark.parametrize("limit", [1, 64 * 4 * 16, 64 * 4 * 48, 1 << 20])
def test_pieces_are_small_and_make_up_the_matrix(limit: int) -> None:
    a, b, c = torch.randn(40, 64), torch.randn(24, 64).bfloat16().float(), torch.randn(7, 64)
    stacked = Rows((a, b, c), 64)
    pieces = list(stacked.pieces(limit))
    assert torch.equal(torch.cat(pieces), torch.cat([a, b, c]))
    assert all(len(p) % 16 == 0 for p in pieces[:-1])
    assert all(p.nbytes <= max(limit, 64 * 4 * 16) for p in pieces)
    gate, up = torch.randn(40, 64), torch.randn(40, 64)
    paired = Rows((gate, up), 64, interleaved=True)
    pieces = list(paired.pieces(limit))
    assert all(len(p) % 16 == 0 and p.nbytes <= max(limit, 64 * 4 * 32) for p in pieces)
    both = torch.cat(pieces)
    assert both.shape == (96, 64) == (paired.count, 64)
    blocks = both.view(3, 2, 16, 64)
    assert torch.equal(blocks[:, 0].reshape(48, 64)[:40], gate)
    assert torch.equal(blocks[:, 1].reshape(48, 64)[:40], up)
    assert not blocks[2, :, 8:].any()
    down = Rows((torch.randn(20, 40),), 48)
    assert not torch.cat(list(down.pieces(limit)))[:, 40:].any()


def test_pieces_of_a_whole_matrix_are_views() -> None:
    weight = torch.randn(128, 64, dtype=torch.bfloat16)
    piece = next(Rows((weight,), 64).pieces(64 * 4 * 32))
    assert piece.data_ptr() == weight.data_ptr()
    assert piece.dtype == torch.bfloat16
    half = next(Rows((weight.half(),), 64).pieces())
    assert half.dtype == torch.float32
