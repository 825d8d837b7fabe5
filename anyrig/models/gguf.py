"""GGUF file -> Transformers directory, by Transformers' own reader, with what that reader leaves wrong put right."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from anyrig.core.errors import ModelError
from anyrig.models.cache import models_dir, no_space
from anyrig.models.gguf_header import read_gguf_header

_log = logging.getLogger(__name__)

# Byte-level vocabularies whose merges were learned with numbers cut into single digits, by `tokenizer.ggml.pre`.
# Transformers 5.24 knows none of these names and would split their text as GPT-2 does.
# Source: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp (LLAMA_VOCAB_PRE_TYPE_SMOLLM),
# https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct/blob/main/tokenizer.json
DIGIT_PRE_TOKENIZERS = frozenset(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"))
# Names whose text GPT-2's own rule splits rightly (same source).
GPT2_PRE_TOKENIZERS = frozenset(("gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "phi-2"))

_DIGITS_THEN_BYTES: dict[str, Any] = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


def convert(gguf: Path, directory: Path) -> None:
    """Write the model in `gguf` to `directory` (there, empty): bfloat16 safetensors, tokenizer, configuration.

    Takes seconds and twice the model's size in memory; done once per file, see cache.py.

    Raises:
        ModelError: not a GGUF file, cut short, or an architecture that Transformers cannot read from GGUF.
    """
    header = read_gguf_header(gguf)
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as verbosity

    shown, bars = verbosity.get_verbosity(), verbosity.is_progress_bar_enabled()
    verbosity.set_verbosity_error()
    verbosity.disable_progress_bar()
    try:
        with _lenient_reading():
            model = AutoModelForCausalLM.from_pretrained(
                str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16, **_unpacked()
            )
            tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        # Transformers refuses to save a model that came from GGUF while it believes it to be quantized.
        model.hf_quantizer = None
        model.is_quantized = False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    except OSError as error:
        if error.errno is not None:
            raise
        raise ModelError(f"Transformers cannot read {gguf}: {error}") from error
    except SafetensorError as error:
        if "os error 28" in str(error):
            raise no_space(models_dir()) from error
        raise ModelError(f"Cannot write the weights of {gguf}: {error}") from error
    except (ValueError, KeyError, RuntimeError, AttributeError, TypeError) as error:
        # Transformers' reader has no error of its own: an unknown architecture or block format ends in any of these.
        raise ModelError(
            f"Transformers cannot read {gguf}: {error}",
            "its architecture or quantization is not supported from GGUF; use the model's safetensors if it has them",
        ) from error
    finally:
        verbosity.set_verbosity(shown)
        if bars:
            verbosity.enable_progress_bar()
    _complete_config(directory)
    _complete_generation_config(directory)
    _complete_tokenizer(directory, header.metadata)


def _unpacked() -> dict[str, Any]:
    """Ask for plain weights where Transformers could keep the blocks packed (newer architectures and readers)."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


@contextmanager
def _lenient_reading() -> Iterator[None]:
    """Take out of Transformers' GGUF path what costs or asks for too much; all is as before afterwards.

    It asks for accelerate, but uses it only when a device map is given. And it parses the file three times and makes
    the same table of names once per module: three times the work. And it draws a bar that no setting turns off.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils, modeling_utils

    stand_ins: list[tuple[Any, str, Any]] = [
        (modeling_utils, "is_accelerate_available", lambda *_: True),
        (modeling_gguf_pytorch_utils, "tqdm", lambda items, **_: items),
        (gguf, "GGUFReader", cache(gguf.GGUFReader)),
        (gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in stand_ins if hasattr(owner, name)]
    for owner, name, stand_in in stand_ins:
        setattr(owner, name, stand_in)
    try:
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


def _complete_config(directory: Path) -> None:
    """Add the names that readers before Transformers 5 look for."""
    path = directory / "config.json"
    config = json.loads(path.read_text("utf-8"))
    config.pop("quantization_config", None)
    config.pop("_model_name_or_path", None)
    config["torch_dtype"] = config["dtype"] = "bfloat16"
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
    elif "rope_theta" in rope.get("full_attention", {}):  # one set per kind of layer, as Gemma 3 has
        config["rope_theta"] = rope["full_attention"]["rope_theta"]
        config["rope_local_base_freq"] = rope.get("sliding_attention", {}).get("rope_theta", config["rope_theta"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def _complete_generation_config(directory: Path) -> None:
    """Make it a file that stands for itself: Transformers rewrites one that it believes to be derived."""
    path = directory / "generation_config.json"
    config = json.loads(path.read_text("utf-8"))
    config.pop("_from_model_config", None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def _complete_tokenizer(directory: Path, metadata: dict[str, Any]) -> None:
    """Put in the pre-tokenizer that the file names, a class that every reader knows, and the chat template."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre in DIGIT_PRE_TOKENIZERS:
        path = directory / "tokenizer.json"
        tokenizer = json.loads(path.read_text("utf-8"))
        tokenizer["pre_tokenizer"] = _DIGITS_THEN_BYTES
        path.write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")
    elif metadata.get("tokenizer.ggml.model") == "gpt2" and pre not in GPT2_PRE_TOKENIZERS | _known_to_transformers():
        _log.warning("the GGUF file names the pre-tokenizer %r, which is not known: text may be split wrongly", pre)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8"))
    for name in ("is_local", "local_files_only", "backend", "name_or_path"):
        config.pop(name, None)
    # The class that Transformers 5 writes here is unknown to version 4, which vLLM and others still use.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _known_to_transformers() -> frozenset[str]:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # it moves between versions; then only the warning is less exact
        return frozenset()
    return frozenset(GGUF_PRE_TOKENIZER_SPLITS)
