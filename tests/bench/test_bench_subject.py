"""The bytes that a measurement divides by are those that are kept."""

from typing import Any

import pytest
import torch
from torch import nn

from anyrig.bench.subject import Subject
from anyrig.core.config import EngineConfig
from anyrig.engine.paged import PagedRunner
from anyrig.models.adapter import Decoder
from anyrig.models.load import load_random
from anyrig.models.replace import LinearChoice, choose_linear, pack_linear
from anyrig.ops.cpu import native
from tests.models.families import HEAD, MOE, SMALL

LLAMA: dict[str, Any] = {**SMALL, **HEAD, "model_type": "llama", "vocab_size": 300}
OPTIONS = EngineConfig(kv_cache_memory="16MiB", max_model_len=256, threads=1)

pytestmark = pytest.mark.skipif(native.module() is None, reason=f"CPU kernels: {native.why_not()}")


def runner(quantize: str = "none", **config: Any) -> tuple[PagedRunner, nn.Module]:
    model = load_random({**LLAMA, **config}, dtype=torch.bfloat16)
    before = load_random({**LLAMA, **config}, dtype=torch.bfloat16)
    linear = choose_linear("cpu", torch.bfloat16, quantize, 1)
    return PagedRunner(Decoder(model, "tiny", 256, linear=linear), OPTIONS, 256), before


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantize", ["int8", "int4", "none"])
def test_weights_of_the_paged_path_are_counted_as_they_are_packed(quantize: str, tied: bool) -> None:
    got, before = runner(quantize, tie_word_embeddings=tied)
    module = native.module()
    assert module is not None
    inner = {"int8": ("int8", 0, False), "int4": ("int4", 32, True), "none": ("bfloat16", 0, False)}[quantize]
    ends = ("bfloat16" if quantize == "none" else "int8", 0, False)
    expected = 0
    for name, child in before.named_modules():
        if type(child) is nn.Linear:
            kind, group, minimum = ends if name == "lm_head" else inner
            expected += module.packed_size(kind, child.out_features, child.in_features, group, minimum)
        elif not list(child.children()) and not (isinstance(child, nn.Embedding) and tied):
            expected += sum(p.nbytes for p in child.parameters())
    assert got.weight_bytes == expected
    assert got.torch_threads == 1
    assert ", 1 threads," in got.describe()


def test_routers_keep_the_dtype_and_fused_experts_keep_torchs_threads() -> None:
    got, before = runner("int8", model_type="qwen2_moe", shared_expert_intermediate_size=32, **MOE)
    layers: Any = got.decoder.model.model.layers  # type: ignore[union-attr]
    gate = layers[0].mlp.shared_expert_gate
    weight = dict(before.named_parameters())["model.layers.0.mlp.shared_expert_gate.weight"]
    rows = torch.randn(4, 64).bfloat16()
    module = native.module()
    assert module is not None
    assert gate.packed_bytes == module.packed_size("bfloat16", 1, 64, 0, False)
    assert torch.allclose(gate(rows), rows @ weight.T, rtol=2e-2, atol=1e-3)
    assert layers[0].self_attn.q_proj.packed_bytes == module.packed_size("int8", 64, 64, 0, False)
    assert layers[0].mlp.experts.gate_up_proj.dtype == torch.bfloat16
    assert got.torch_threads is None


def test_which_layers_are_routers() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(16, 4)
            self.router = nn.ModuleDict({"classifier": nn.Linear(16, 4)})
            self.gate_proj, self.gate_up_proj = nn.Linear(16, 32), nn.Linear(16, 64)
            self.output_gate = nn.Linear(16, 512)
            self.q_proj = nn.Linear(16, 16)

    class Made(nn.Identity):
        pass

    class Routed(nn.Identity):
        pass

    model = nn.ModuleDict({"block": Block(), "gate": nn.Linear(16, 8)})
    pack_linear(model, LinearChoice("", Made, Made, Routed))
    names = [n for n, m in model.named_modules() if type(m) is Routed]
    assert names == ["block.gate", "block.router.classifier", "gate"]
    assert sum(type(m) is Made for m in model.modules()) == 4


def test_a_measurement_uses_them() -> None:
    int8 = Subject("smollm2-135m", EngineConfig(runner="paged", quantize="int8", kv_cache_memory="64MiB"))
    assert int8.weight_bytes == int8.engine.runner.weight_bytes  # type: ignore[attr-defined]
    assert 1.0 < int8.weight_bytes / int8.shape.parameters < 1.1
