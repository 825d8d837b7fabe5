"""Random models: written in small pieces, whole, found again, and what Transformers would have written."""

import json
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from anyrig.bench import random_model
from anyrig.bench.random_model import shapes
from anyrig.core.errors import ModelError
from anyrig.models import cache, checkpoint, load

CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.03,
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANYRIG_HOME", str(tmp_path / "home"))
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps(CONFIG))
    (shape / "tokenizer.json").write_text("{}")
    return tmp_path


def test_the_directory_loads_and_its_weights_are_spread_as_the_configuration_says(home: Path) -> None:
    said: list[str] = []
    path = random_model.random_model(str(home / "shape"), progress=said.append)
    assert "0.00 GB of random weights (once)" in said[0]
    assert (path / "tokenizer.json").read_text() == "{}"
    model = load.load(path, dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        if "norm" in name:
            assert (weight == 1).all()
        else:
            assert float(weight.float().std()) == pytest.approx(0.03, rel=0.1), name
    assert checkpoint.read_config(path)["dtype"] == "bfloat16"


def test_it_is_made_once_for_each_shape_and_seed(home: Path) -> None:
    first = random_model.random_model(str(home / "shape"))
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert random_model.random_model(str(home / "shape" / "config.json")) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    second = random_model.random_model(str(home / "shape"), seed=1)
    assert second != first
    assert (second / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()
    assert {m.name for m in cache.cached_models()} == {first.name, second.name}


def test_large_models_come_in_shards_and_pieces(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = random_model.random_model(str(home / "shape"))
    monkeypatch.setenv("ANYRIG_HOME", str(home / "other"))
    monkeypatch.setattr(random_model, "SHARD_BYTES", 50_000)
    monkeypatch.setattr(random_model, "PIECE", 1000)
    parts = random_model.random_model(str(home / "shape"))
    files = checkpoint.weight_files(parts)
    assert len(files) > 2
    names = {n for f in files for n in checkpoint.read_header(f)}
    assert names == set(checkpoint.read_header(whole / "model.safetensors"))
    with safe_open(files[-1], "pt") as shard:
        assert all(torch.isfinite(shard.get_tensor(name)).all() for name in shard.keys())  # noqa: SIM118
    load.load(parts, dtype=torch.bfloat16)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_model.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 5_000_000_000}))
    with pytest.raises(ModelError, match=r"takes 16\.06 GB, but the disk of .* has 5\.00 GB free"):
        random_model.random_model("llama-8b")
    assert not (home / "home").exists()


def test_what_is_no_shape_is_refused_with_the_known_ones(home: Path) -> None:
    with pytest.raises(ModelError, match=r"'llama-9b'.*known shape \(.*llama-1\.1b"):
        random_model.random_model("llama-9b")


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-1b", 1.24), ("llama-1.1b", 1.17), ("llama-8b", 8.03), ("qwen3-8b", 8.19)]
)
def test_known_shapes_have_the_size_of_their_models(name: str, billions: float) -> None:
    tensors, _ = random_model._tensors(shapes()[name])
    assert sum(prod(shape) for shape in tensors.values()) / 1e9 == pytest.approx(billions, abs=0.006)
