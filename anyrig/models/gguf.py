"""GGUF file -> Transformers directory, by Transformers' own reader, with what that reader leaves wrong put right."""

import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anyrig.core.errors import ModelError
from anyrig.models.cache import no_space

MAGIC = b"GGUF"

# `tokenizer.ggml.pre` names that Transformers 5.24 does not know, as tokenizers' JSON. Without them the text is split
# as GPT-2 does: numbers in one piece, where SmolLM's merges were learned digit by digit.
# Source: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct/blob/main/tokenizer.json
_DIGITS_THEN_BYTES: dict[str, Any] = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {"smollm": _DIGITS_THEN_BYTES}


def convert(gguf: Path, directory: Path) -> None:
    """Write the model in `gguf` to `directory` (there, empty): bfloat16 safetensors, tokenizer, configuration.

    Takes seconds and twice the model's size in memory; done once per file, see cache.py.

    Raises:
        ModelError: not a GGUF file, cut short, or an architecture that Transformers cannot read from GGUF.
    """
    check(gguf)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    shown, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with _no_accelerate_needed():
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
    except (ValueError, KeyError, NotImplementedError, RuntimeError, AttributeError, TypeError) as error:
        if "No space left on device" in str(error) or "os error 28" in str(error):
            raise no_space(directory) from error
        raise ModelError(
            f"Transformers cannot read {gguf}: {error}",
            "its architecture or quantization is not supported from GGUF; use the model's safetensors if it has them",
        ) from error
    finally:
        logging.set_verbosity(shown)
        if bars:
            logging.enable_progress_bar()
    metadata = _tokenizer_metadata(gguf)
    _complete_config(directory)
    _complete_tokenizer(directory, metadata)


def check(gguf: Path) -> None:
    """Read the header and compare the file's length with what its tensor table needs.

    Raises:
        ModelError: naming the file and, when it is cut short, expected and actual bytes.
    """
    actual = gguf.stat().st_size
    with gguf.open("rb") as file:
        start = file.read(24)
    if start[:4] != MAGIC:
        raise ModelError(f"{gguf} is not a GGUF file: it does not start with {MAGIC.decode()}")
    if len(start) < 24 or struct.unpack("<I", start[4:8])[0] not in (2, 3):
        raise ModelError(f"{gguf} is cut short, or of a GGUF version other than 2 and 3")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf)
    except Exception as error:  # the reader walks a memory map and fails in as many ways as there are broken bytes
        raise ModelError(
            f"{gguf} is broken or cut short ({actual:,} bytes): {error}", "fetch the file again"
        ) from error
    expected = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
    if actual < expected:
        raise ModelError(
            f"{gguf} is cut short: {actual:,} bytes, expected {expected:,} at least", "fetch the file again"
        )


def _tokenizer_metadata(gguf: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    wanted = ("tokenizer.ggml.pre", "tokenizer.ggml.add_bos_token", "tokenizer.chat_template")
    return {name: fields[name].contents() for name in wanted if name in fields}


def _unpacked() -> dict[str, Any]:
    """Ask for plain weights where Transformers could keep the blocks packed (newer architectures and readers)."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


@contextmanager
def _no_accelerate_needed() -> Iterator[None]:
    """Transformers asks for accelerate before it reads a GGUF file, but uses it only when a device map is given."""
    from transformers import modeling_utils

    asks = getattr(modeling_utils, "is_accelerate_available", None)
    if asks is None or asks():
        yield
        return
    modeling_utils.is_accelerate_available = lambda *_: True
    try:
        yield
    finally:
        modeling_utils.is_accelerate_available = asks


def _complete_config(directory: Path) -> None:
    """Add the names that readers before Transformers 5 look for."""
    path = directory / "config.json"
    config = json.loads(path.read_text("utf-8"))
    config.pop("quantization_config", None)
    config.pop("_name_or_path", None)
    config["torch_dtype"] = config["dtype"] = "bfloat16"
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def _complete_tokenizer(directory: Path, metadata: dict[str, Any]) -> None:
    """Put in the pre-tokenizer that the file names, a class that every reader knows, and the chat template."""
    path = directory / "tokenizer.json"
    if (right := PRE_TOKENIZERS.get(metadata.get("tokenizer.ggml.pre", ""))) is not None:
        tokenizer = json.loads(path.read_text("utf-8"))
        tokenizer["pre_tokenizer"] = right
        path.write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8"))
    for name in ("is_local", "local_files_only", "backend", "name_or_path"):
        config.pop(name, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
