"""Models with random weights of a given configuration, so that a shape's speed can be measured without a download.

A Transformers directory (config.json, bf16 safetensors, tokenizer) is written once into the model cache and found there
by what it was made from; `anyrig models` lists and removes it. Weights are drawn and written piece by piece: memory
stays small whatever the size.
"""

import hashlib
import json
import shutil
import struct
import tomllib
from collections.abc import Callable, Mapping
from functools import cache as once
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any

from anyrig.core.errors import ModelError
from anyrig.models import cache, checkpoint, locate

SHARD_BYTES = 2 << 30
PIECE = 1 << 22  # weights drawn at once: 16 MiB as float32
LENDER = "smollm2-135m"  # whose tokenizer is taken where the shape brings none
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

Progress = Callable[[str], None]


@once
def shapes() -> Mapping[str, Mapping[str, Any]]:
    """The known shapes (`shapes.toml`): name -> configuration."""
    return tomllib.loads(resources.files("anyrig.bench").joinpath("shapes.toml").read_text("utf-8"))


def random_model(model: str, *, seed: int = 0, progress: Progress | None = None) -> Path:
    """The directory of a model of this shape, written if it is not there yet.

    Args:
        model: a known shape, a config.json, or a directory that has one (its tokenizer is then taken, if it has one).
        seed: of the weights.
        progress: told the size before anything is written.

    Raises:
        ModelError: no such shape or configuration, an unknown architecture, or too little room on the disk.
    """
    say = progress or (lambda _: None)
    label, config, source = read_config(model)
    lender = source if source and (source / "tokenizer.json").is_file() else None
    made_of = json.dumps([config, seed, str(lender), 1], sort_keys=True)
    name = f"random-{label}-{hashlib.sha256(made_of.encode()).hexdigest()[:8]}"
    if (done := cache.find(name)) is not None:
        return done
    tensors, constants = _tensors(config)
    size = 2 * sum(prod(shape) for shape in tensors.values())
    _check_room(name, size)
    lender = lender or locate.resolve(LENDER, progress=say).path
    say(f"writing {name}: {size / 1e9:.2f} GB of random weights (once)")
    return cache.install(
        name,
        lambda to: _write(to, config, tensors, constants, lender, seed, say),
        source=f"random weights of the shape {model}, seed {seed}",
        progress=say,
    )


def read_config(model: str) -> tuple[str, dict[str, Any], Path | None]:
    """Short name, configuration and directory (None for a known shape) of what stands for MODEL.

    Raises:
        ModelError: when it is none of these.
    """
    path = Path(model).expanduser()
    if model in shapes():
        return model, dict(shapes()[model]), None
    if path.is_file() and path.suffix == ".json":
        config, label, source = checkpoint.read_json(path), path.stem, path.parent
        label = path.resolve().parent.name if label == "config" else label
    elif path.is_dir():
        config, label, source = checkpoint.read_config(path), path.resolve().name, path
    else:
        raise ModelError(
            f"no shape for --random-weights: {model!r}",
            f"give a config.json, a directory with one, or a known shape ({', '.join(shapes())})",
        )
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} states no model_type", "it must be a Transformers configuration")
    dropped = ("quantization_config", "auto_map", "torch_dtype", "dtype", "_name_or_path", "transformers_version")
    return label.lower(), {key: value for key, value in config.items() if key not in dropped}, source


def _tensors(config: Mapping[str, Any]) -> tuple[dict[str, tuple[int, ...]], dict[str, float]]:
    """Names and shapes of what a checkpoint of this configuration holds, and the values of those that are constant."""
    import torch

    from anyrig.models import load

    with torch.device("meta"):
        model: Any = load.load_random(config, dtype=torch.bfloat16, device="meta")
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    parameters = dict(model.named_parameters())
    tensors = {name: tuple(t.shape) for name, t in model.state_dict().items() if name not in tied}
    constants = {}
    for name, shape in tensors.items():
        if name not in parameters:
            constants[name] = 1.0 if prod(shape) == 1 else 0.0  # buffers: scales, corrections
        elif len(shape) <= 1:
            constants[name] = 0.0 if name.endswith("bias") else 1.0
    return tensors, constants


def _check_room(name: str, size: int) -> None:
    root = cache.models_dir()
    while not root.exists():
        root = root.parent
    free = shutil.disk_usage(root).free
    if size * 1.02 + (64 << 20) > free:
        raise ModelError(
            f"{name} takes {size / 1e9:.2f} GB, but the disk of {cache.models_dir()} has {free / 1e9:.2f} GB free",
            "free some (`anyrig models rm NAME`), or set ANYRIG_HOME to a directory on a larger disk",
        )


def _write(
    to: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    constants: Mapping[str, float],
    lender: Path,
    seed: int,
    say: Progress,
) -> None:
    import torch

    (to / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2) + "\n")
    for name in _TOKENIZER:
        if (lender / name).is_file():
            shutil.copy(lender / name, to / name)
    generator = torch.Generator().manual_seed(seed)
    deviation = float(config.get("initializer_range", 0.02))
    shards = _shards(tensors)
    total = sum(2 * prod(shape) for shape in tensors.values())
    written = 0
    for number, names in enumerate(shards, 1):
        file = to / ("model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors")
        with file.open("wb") as out:
            out.write(_header({name: tensors[name] for name in names}))
            for name in names:
                left = prod(tensors[name])
                while left:
                    piece = torch.empty(min(left, PIECE))
                    if name in constants:
                        piece.fill_(constants[name])
                    else:
                        piece.normal_(0.0, deviation, generator=generator)
                    out.write(piece.to(torch.bfloat16).view(torch.uint8).numpy().tobytes())
                    left -= len(piece)
                    written += 2 * len(piece)
                say(f"writing random weights: {written / total:.0%} of {total / 1e9:.2f} GB")
    if len(shards) > 1:
        where = {
            name: f"model-{i:05}-of-{len(shards):05}.safetensors" for i, names in enumerate(shards, 1) for name in names
        }
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (to / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _shards(tensors: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
    """Names in order, cut where a file would grow beyond `SHARD_BYTES`."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in tensors.items():
        size = 2 * prod(shape)
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _header(tensors: Mapping[str, tuple[int, ...]]) -> bytes:
    """Of a safetensors file whose bf16 tensors follow each other in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors.items():
        end = at + 2 * prod(shape)
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
