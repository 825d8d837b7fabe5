"""Loading gives the very module that Transformers' own `from_pretrained` gives: weights, buffers, logits."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from anyrig.core.errors import ModelError
from anyrig.models import checkpoint
from anyrig.models import load as loading
from anyrig.models.load import load, load_random
from anyrig.models.locate import resolve

# Small models of families that differ in what loading must get right.
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama, head of its own": {"model_type": "llama", "tie_word_embeddings": False, **SMALL},
    "llama3 rope scaling": {
        "model_type": "llama",
        **SMALL,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "gemma3: two ropes, scaled embeddings": {
        "model_type": "gemma3_text",
        **SMALL,
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3 mixture of experts: fused in memory": {
        "model_type": "qwen3_moe",
        **SMALL,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "gpt2: learned positions, tied": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 64,
        "n_positions": 128,
    },
    "opt: offset positions": {
        "model_type": "opt",
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "word_embed_proj_dim": 32,
    },
}
TOKENS = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3, 2, 38]])


@pytest.fixture(scope="module", params=list(FAMILIES))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model: Any = load_random(FAMILIES[request.param], dtype=torch.float32, seed=1)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_equals_from_pretrained(saved: Path, dtype: torch.dtype) -> None:
    ours = load(saved, dtype=dtype, attn_implementation="eager")
    theirs = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype, attn_implementation="eager").eval()
    same_module(ours, theirs)


def same_module(ours: Any, theirs: Any) -> None:
    same_tensors(ours, theirs)
    with torch.inference_mode():
        assert torch.equal(ours(TOKENS, use_cache=False).logits, theirs(TOKENS, use_cache=False).logits)


def same_tensors(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    assert not ours.training
    for kind in ("named_parameters", "named_buffers"):
        mine, other = dict(getattr(ours, kind)()), dict(getattr(theirs, kind)())
        assert mine.keys() == other.keys()
        for name, tensor in mine.items():
            assert not tensor.requires_grad
            assert tensor.dtype == other[name].dtype, name
            assert torch.equal(tensor, other[name]), name


def test_the_default_model_equals_from_pretrained_and_is_mapped_from_its_file() -> None:
    path = resolve("smollm2-135m").path
    ours: Any = load(path, dtype=torch.bfloat16, attn_implementation="eager")
    same_module(ours, AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager"))
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert ours.generation_config.eos_token_id == 2
    assert str(path / "model.safetensors") in Path("/proc/self/maps").read_text()


def test_gemma_equals_from_pretrained_and_continues_sensibly() -> None:
    from anyrig.models.tokenizer import Tokenizer

    path = gemma()
    ours: Any = load(path, dtype=torch.bfloat16, attn_implementation="eager")
    theirs: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager")
    same_tensors(ours, theirs)
    tokenizer = Tokenizer.from_dir(path)
    ids = tokenizer.encode("One, two, three, four, five, six, seven, eight")
    with torch.inference_mode():
        logits = ours(torch.tensor([ids]), use_cache=False, logits_to_keep=7).logits
    assert tokenizer.decode(logits[0].argmax(-1).tolist()) == ", six, seven, eight,"


def gemma() -> Path:
    try:
        return resolve("gemma3-270m", offline=True).path
    except ModelError:
        pytest.skip("gemma3-270m is not cached (`anyrig pull gemma3-270m`, 240 MB)")


def test_the_fast_way_is_taken_where_names_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_by_transformers", lambda *_: pytest.fail("fell back to from_pretrained"))
    load(resolve("smollm2-135m").path, dtype=torch.bfloat16)


def test_random_weights_depend_on_the_seed_only() -> None:
    config = FAMILIES["llama, head of its own"]
    torch.manual_seed(0)
    one = load_random(config, dtype=torch.float32, seed=5).state_dict()
    torch.manual_seed(1)
    two = load_random(config, dtype=torch.float32, seed=5).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    model: Any = load_random(FAMILIES["llama, head of its own"], dtype=torch.float32)
    model.save_pretrained(tmp_path / "llama", max_shard_size="20KB")
    return tmp_path / "llama"


def test_shards_are_put_together(llama: Path) -> None:
    assert len(list(llama.glob("*.safetensors"))) > 2
    same_module(
        load(llama, dtype=torch.float32, attn_implementation="eager"),
        AutoModelForCausalLM.from_pretrained(llama, attn_implementation="eager"),
    )


def test_a_missing_shard_is_named(llama: Path) -> None:
    lost = sorted(llama.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ModelError, match=rf"lacks 1 of \d+ weight files: {lost.name}"):
        load(llama, dtype=torch.float32)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_named_with_its_bytes(llama: Path, keep: int) -> None:
    file = sorted(llama.glob("*.safetensors"))[0]
    data = file.read_bytes()[:keep]
    file.write_bytes(data)
    with pytest.raises(ModelError, match=rf"{file.name} is cut short: {len(data):,} bytes, expected "):
        load(llama, dtype=torch.float32)


def test_a_file_that_is_not_safetensors_is_named(llama: Path) -> None:
    file = sorted(llama.glob("*.safetensors"))[0]
    file.write_bytes(struct.pack("<Q", 20) + b"this is no JSON text" + b"\0" * 100)
    with pytest.raises(ModelError, match=f"{file.name} is not a safetensors file"):
        load(llama, dtype=torch.float32)


def test_a_tensor_that_no_file_holds_is_named(llama: Path) -> None:
    index = json.loads((llama / "model.safetensors.index.json").read_text())
    lost = index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != lost}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"hold no .*model\.layers\.1\.mlp.* more"):
        load(llama, dtype=torch.float32)


def test_pickled_weights_are_refused(llama: Path) -> None:
    for file in llama.glob("model*"):
        file.unlink()
    torch.save({}, llama / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickles, which can run code.*convert them to safetensors"):
        load(llama, dtype=torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "martian"}, "does not know the architecture 'martian'.*newer Transformers"),
        ({"model_type": "martian", "auto_map": {"AutoModel": "x.Y"}}, "bring their own code are not run"),
        ({"model_type": "vit"}, "'vit' is not a causal language model"),
        ({"model_type": None}, "states no model_type"),
    ],
)
def test_an_architecture_that_cannot_run_is_named(llama: Path, change: dict[str, Any], message: str) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError, match=message):
        load(llama, dtype=torch.float32)


def test_info_of_the_default_model() -> None:
    info = checkpoint.read_info(resolve("smollm2-135m").path)
    assert (info.architecture, info.model_type) == ("LlamaForCausalLM", "llama")
    assert (info.max_model_len, info.vocab_size) == (8192, 49152)
    assert (info.eos_token_ids, info.bos_token_id) == ((2,), 1)
    assert info.generation == {}  # its generation_config.json states no sampling


def test_info_reads_what_generation_config_states(llama: Path) -> None:
    (llama / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 8], "temperature": 0.6, "top_p": 0.9, "top_k": None, "max_length": 20})
    )
    info = checkpoint.read_info(llama)
    assert info.eos_token_ids == (7, 8)
    assert info.generation == {"temperature": 0.6, "top_p": 0.9}


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default"}, 256),
        ({"rope_type": "linear", "factor": 4.0}, 256),  # gemma3 says so: its length is the stretched one already
        ({"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}, 256),
    ],
    ids=lambda v: v["rope_type"] if isinstance(v, dict) else str(v),
)
def test_info_knows_stretched_contexts(llama: Path, rope: dict[str, Any], length: int) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    assert checkpoint.read_info(llama).max_model_len == length


def test_the_version_follows_the_files(llama: Path, tmp_path: Path) -> None:
    before = checkpoint.read_info(llama).version
    assert checkpoint.read_info(llama).version == before
    file = sorted(llama.glob("*.safetensors"))[0]
    shutil.copy(file, tmp_path / "copy")  # a new time, the same bytes: a weight file was put there anew
    shutil.move(tmp_path / "copy", file)
    assert checkpoint.read_info(llama).version != before
