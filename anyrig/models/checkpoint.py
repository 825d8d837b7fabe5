"""What a model directory says about itself, without torch or Transformers: configuration, weight files, defaults."""

import hashlib
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anyrig.core.errors import ModelError

# Where configurations keep the context length, in the order in which they are believed.
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
_SAMPLING_KEYS = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


@dataclass(frozen=True)
class ModelInfo:
    """What an engine needs to know before (or without) loading a model."""

    architecture: str  # class name, such as LlamaForCausalLM; the model type when the configuration names none
    model_type: str
    max_model_len: int  # tokens
    vocab_size: int  # rows of the logits; the tokenizer may know fewer tokens
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    generation: dict[str, Any] = field(default_factory=dict)  # sampling defaults that generation_config.json states
    version: str = ""  # changes when a file of the model changes


def read_info(path: Path) -> ModelInfo:
    """Describe the model in directory `path` (only small files are read).

    Raises:
        ModelError: no or broken config.json, or one without a vocabulary size or model type.
    """
    config = read_config(path)
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else None
    merged = {**config, **text} if text else config
    generation = read_json(path / "generation_config.json", required=False)
    architectures = config.get("architectures") or []
    vocab_size = merged.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ModelError(f"{path / 'config.json'} states no vocab_size", "is this a language model's directory?")
    eos = generation.get("eos_token_id", merged.get("eos_token_id"))
    bos = generation.get("bos_token_id", merged.get("bos_token_id"))
    return ModelInfo(
        architecture=architectures[0] if architectures else config["model_type"],
        model_type=config["model_type"],
        max_model_len=_context_length(merged),
        vocab_size=vocab_size,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        bos_token_id=bos[0] if isinstance(bos, list) else bos,
        generation={key: generation[key] for key in _SAMPLING_KEYS if generation.get(key) is not None},
        version=_fingerprint(path),
    )


def read_config(path: Path) -> dict[str, Any]:
    """`config.json` of the directory, with a `model_type` for sure.

    Raises:
        ModelError: missing, not JSON, or without a model type.
    """
    config = read_json(path / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path / 'config.json'} states no model_type", "it must be a Transformers configuration")
    return config


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """A JSON object from a file; `{}` when it is missing and not required.

    Raises:
        ModelError: missing, unreadable, not JSON or not an object.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        if not required:
            return {}
        raise ModelError(
            f"{path.parent} has no {path.name}",
            "a model directory holds config.json, tokenizer.json and *.safetensors, as Transformers saves them",
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"Cannot read {path}: {error}", "fetch or save the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object", "fetch or save the file again")
    return value


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of directory `path`, each checked to be whole by its header (no weights are read).

    Raises:
        ModelError: no safetensors, a shard missing, or a file cut short (with expected and actual bytes).
    """
    index = path / "model.safetensors.index.json"
    if index.is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ModelError(f"{index} has no weight_map", "fetch or save the file again")
        files = [path / name for name in sorted(set(shards.values()))]
    elif (path / "model.safetensors").is_file():
        files = [path / "model.safetensors"]
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        if any(path.glob("pytorch_model*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
            raise ModelError(
                f"{path} holds its weights as Python pickles, which can run code when they are opened",
                "convert them to safetensors (`model.save_pretrained(...)` of Transformers does)",
            )
        raise ModelError(f"{path} has no weights (*.safetensors)", "fetch or save the model again")
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelError(f"{path} lacks {len(missing)} of {len(files)} weight files: {', '.join(missing[:5])}")
    for file in files:
        read_header(file)
    return files


def stored_dtype(path: Path) -> str:
    """The dtype that most of the weights are stored in, in safetensors' words: BF16, F16, F32, ..."""
    bytes_of: dict[str, int] = {}
    for file in weight_files(path):
        for entry in read_header(file).values():
            first, last = entry["data_offsets"]
            bytes_of[entry["dtype"]] = bytes_of.get(entry["dtype"], 0) + last - first
    return max(bytes_of, key=lambda dtype: bytes_of[dtype], default="F32")


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """Tensors of a safetensors file: name -> {dtype, shape, data_offsets} (format: huggingface.co/docs/safetensors).

    Raises:
        ModelError: when the file is not safetensors, or is shorter than its header says.
    """
    actual = file.stat().st_size
    with file.open("rb") as handle:
        start = handle.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if actual < 8 + length or length == 0:
            raise _cut_short(file, actual, 8 + length)
        try:
            header: dict[str, dict[str, Any]] = json.loads(handle.read(length))
            header.pop("__metadata__", None)
            expected = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelError(f"{file} is not a safetensors file ({error})", "fetch the file again") from error
    if actual < expected:
        raise _cut_short(file, actual, expected)
    return header


def _cut_short(file: Path, actual: int, expected: int) -> ModelError:
    return ModelError(f"{file} is cut short: {actual:,} bytes, expected {expected:,}", "fetch or save the file again")


def _context_length(config: dict[str, Any]) -> int:
    length = next((config[key] for key in _LENGTH_KEYS if isinstance(config.get(key), int)), 2048)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    # The factor stretches what the model was trained on; where that isn't stated, the length is the stretched one.
    if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("linear", "dynamic", "yarn"):
        trained = rope.get("original_max_position_embeddings") or 0
        length = max(length, int(trained * rope.get("factor", 1)))
    return length


def _fingerprint(path: Path) -> str:
    """Name, size and time of every file that shapes the output; contents are not read."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.suffix in (".json", ".safetensors", ".jinja", ".model"):
            stat = file.stat()
            digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
