"""A tiny shape for measurements, with the tokenizer of the default model."""

import json
import shutil
from pathlib import Path

from anyrig.models.locate import resolve

VOCABULARY = 49152


def tiny_shape(directory: Path) -> Path:
    """A directory with config.json and tokenizer, without weights: `--random-weights` makes them."""
    directory.mkdir()
    config = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve("smollm2-135m").path / name, directory / name)
    return directory
