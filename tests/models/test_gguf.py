"""A GGUF file becomes a Transformers directory with the same weights and the text split as the file says."""

import json
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from anyrig.core.errors import ModelError
from anyrig.models.gguf import convert
from anyrig.models.gguf_header import read_gguf_header
from anyrig.models.locate import resolve

HIDDEN, HEADS, KV_HEADS, FFN = 32, 4, 2, 48


def write_tiny_llama(path: Path, pre: str = "smollm", architecture: str = "llama") -> dict[str, np.ndarray]:
    """One-layer model with a byte vocabulary and merges for digits; returns its float32 tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    tokens = ["<|endoftext|>", *sorted(ByteLevel.alphabet()), "12", "ab"]
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (len(tokens) - 1)])
    writer.add_token_merges(["1 2", "a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "token_embd.weight": (len(tokens), HIDDEN),
        "output.weight": (len(tokens), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (kv, HIDDEN),
        "blk.0.attn_v.weight": (kv, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (FFN, HIDDEN),
        "blk.0.ffn_up.weight": (FFN, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FFN),
    }
    rng = np.random.default_rng(0)
    # Multiples of 1/64 below 1: exact in bfloat16, so that the conversion must give them back bit for bit.
    tensors = {name: (rng.integers(-63, 64, shape) / 64).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_llama(path)
    return path


@pytest.fixture(scope="module")
def converted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("converted")
    convert(tiny, directory)
    return directory


def test_weights_come_out_bit_for_bit(tiny: Path, converted: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file as load_torch

    truth = write_tiny_llama(tmp_path / "again.gguf")
    weights = load_torch(converted / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights.values())
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "lm_head.weight": "output.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }.items():
        np.testing.assert_array_equal(weights[ours].float().numpy(), truth[theirs])
    # llama.cpp stores query rows in another order (pairs of the rotation side by side): undone here.
    rows = HIDDEN // HEADS
    q = truth["blk.0.attn_q.weight"].reshape(HEADS, rows // 2, 2, HIDDEN).swapaxes(1, 2).reshape(HIDDEN, HIDDEN)
    np.testing.assert_array_equal(weights["model.layers.0.self_attn.q_proj.weight"].float().numpy(), q)


def test_config_has_the_names_that_older_readers_want(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    assert config["rope_theta"] == 50000.0
    assert config["torch_dtype"] == "bfloat16"
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    tokenizer = json.loads((converted / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tokenizer["chat_template"].startswith("{% for m in messages %}")


def test_the_pre_tokenizer_that_the_file_names_is_used(converted: Path) -> None:
    from anyrig.models.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_dir(converted)
    # "1 2" is a merge of this vocabulary, but smollm cuts numbers into digits first.
    assert [tokenizer.token_text(i) for i in tokenizer.encode("ab12")] == ["ab", "1", "2"]


def test_an_unknown_pre_tokenizer_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tiny_llama(tmp_path / "odd.gguf", pre="from-next-year")
    (tmp_path / "out").mkdir()
    convert(tmp_path / "odd.gguf", tmp_path / "out")
    assert "from-next-year" in caplog.text


def test_conversion_leaves_transformers_and_gguf_as_they_were(converted: Path) -> None:
    from transformers import modeling_utils
    from transformers.utils import is_accelerate_available

    assert modeling_utils.is_accelerate_available is is_accelerate_available
    assert isinstance(gguf.GGUFReader, type)


def test_a_converted_file_is_found_again_and_a_changed_one_is_not(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYRIG_HOME", str(tmp_path / "home"))
    file = shutil.copy(tiny, tmp_path / "mine.gguf")
    said: list[str] = []
    first = resolve(str(file), progress=said.append)
    assert said == ["converting mine.gguf (once)"]
    assert resolve(str(file), progress=said.append) == first
    assert len(said) == 1
    assert resolve(first.name).path == first.path
    Path(file).touch()
    assert resolve(str(file)).path != first.path


def test_header_agrees_with_the_gguf_package(tiny: Path) -> None:
    header = read_gguf_header(tiny)
    reader = gguf.GGUFReader(tiny)
    assert header.metadata["tokenizer.ggml.pre"] == "smollm"
    assert header.metadata["llama.rope.freq_base"] == 50000.0
    assert header.metadata["tokenizer.ggml.tokens"] == len(reader.fields["tokenizer.ggml.tokens"].data)
    last = reader.tensors[-1]
    assert header.expected_bytes == last.data_offset + last.n_bytes


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 24, 300, 4000, -1])
def test_a_file_cut_anywhere_is_refused(tiny: Path, tmp_path: Path, keep: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"cut\.gguf.* (cut short|not a GGUF file)"):
        resolve(str(cut))


def test_cut_short_names_expected_and_actual_bytes(tiny: Path, tmp_path: Path) -> None:
    size = tiny.stat().st_size
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[: size - 1000])
    with pytest.raises(ModelError, match=f"cut short: {size - 1000:,} bytes, expected "):
        read_gguf_header(cut)


def test_flipped_bytes_in_the_head_never_end_in_a_traceback(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for at in rng.integers(4, 4000, 3):
            data[at] = int(rng.integers(256))
        broken = tmp_path / "flipped.gguf"
        broken.write_bytes(data)
        try:
            read_gguf_header(broken)
        except ModelError:
            refused += 1
    assert refused > 30  # most flips hit token text, where no reader could notice


def test_an_architecture_that_transformers_cannot_read_is_named(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "odd.gguf", architecture="martian")
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="martian"):
        convert(tmp_path / "odd.gguf", tmp_path / "out")


def test_other_versions_and_split_files_are_refused(tiny: Path, tmp_path: Path) -> None:
    data = bytearray(tiny.read_bytes())
    data[4:8] = struct.pack("<I", 1)
    (tmp_path / "old.gguf").write_bytes(data)
    with pytest.raises(ModelError, match="version 1"):
        read_gguf_header(tmp_path / "old.gguf")
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"one of 3 parts.*llama-gguf-split"):
        read_gguf_header(tmp_path / "part.gguf")


def test_the_default_model_was_converted_with_its_tied_head_stored_once() -> None:
    weights = load_file_names(resolve("smollm2-135m").path / "model.safetensors")
    assert "model.embed_tokens.weight" in weights
    assert "lm_head.weight" not in weights


def load_file_names(file: Path) -> set[str]:
    from anyrig.models.checkpoint import read_header

    return set(read_header(file))
