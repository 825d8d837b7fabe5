"""`anyrig eval perplexity`, held against Transformers' own loss."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_models import tiny_shape

from anyrig.bench.perplexity import Window, read_text, windows
from anyrig.bench.random_model import random_model
from anyrig.cli.main import run
from anyrig.models.load import load
from anyrig.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights."""
    shape = tiny_shape(tmp_path_factory.mktemp("eval") / "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANYRIG_HOME", str(tmp_path_factory.mktemp("home")))
        return random_model(str(shape))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ANYRIG_THREADS", "1")
    monkeypatch.chdir(tmp_path)


def perplexity(capsys: pytest.CaptureFixture[str], model: Path, *options: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["eval", "perplexity", str(model), "--dtype", "float32", "--json", *options]) == 0
    [printed] = capsys.readouterr().out.splitlines()
    return json.loads(printed)


@torch.inference_mode()
def transformers_perplexity(path: Path, ids: Sequence[int], window: int, stride: int) -> float:
    """The sliding windows of Transformers' documentation, with its own loss: tokens before are context only."""
    model = load(path, dtype=torch.float32)
    total, count, before = 0.0, 0, 0
    for start in range(0, len(ids), stride):
        end = min(start + window, len(ids))
        part = torch.tensor([ids[start:end]])
        labels = part.clone()
        labels[:, : before - start] = -100
        scored = int((labels[:, 1:] != -100).sum())
        total += float(model(input_ids=part, labels=labels).loss) * scored
        count += scored
        before = end
        if end == len(ids):
            break
    return math.exp(total / count)


@pytest.mark.parametrize(("window", "stride"), [(64, 32), (100, 100), (200, 70)])
def test_perplexity_is_that_of_transformers(
    model: Path, capsys: pytest.CaptureFixture[str], window: int, stride: int
) -> None:
    _, text = read_text(None)
    ids = Tokenizer.from_dir(model).encode(text, add_special_tokens=False)[:500]
    got = perplexity(capsys, model, "--limit", "500", "--window", str(window), "--stride", str(stride))
    expected = transformers_perplexity(model, ids, window, stride)
    assert got["tokens"] == (499 if stride < window else 495), "5 windows that don't overlap start without context"
    assert got["results"][0]["perplexity"] == pytest.approx(expected, rel=1e-3)


def test_a_text_of_ones_own_and_a_file_for_the_result(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 8)
    got = perplexity(capsys, model, "--text", "text.txt", "--window", "32", "-o", "p.json")
    assert got["text"] == "text.txt"
    assert (got["window"], got["stride"]) == (32, 16)
    assert json.loads(Path("p.json").read_text()) == got
    assert got["results"][0]["change_percent"] is None


def test_whatever_this_build_can_do_is_compared_with_unquantised_weights(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    got = perplexity(capsys, model, "--limit", "200", "--window", "64", "--quantize", "all")
    first, *others = got["results"]
    assert first["weights"] == "float32"
    for other in others:
        change = 100 * (other["perplexity"] / first["perplexity"] - 1)
        assert other["change_percent"] == pytest.approx(change, abs=0.01)
        assert abs(change) < 50


def test_the_table_names_text_and_method(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["eval", "perplexity", str(model), "--limit", "100", "--window", "64", "--dtype", "float32"]
    assert run(line) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "on time_machine.txt: 99 tokens scored, windows of 64, stride 32" in shown[0]
    assert shown[2].split()[0] == "float32"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--window", "256"], "--window must be below 256"),
        (["--window", "1"], "--window must be at least 2. Given: 1"),
        (["--window", "64", "--stride", "65"], "--stride (65) must not exceed --window (64)"),
        (["--text", "none.txt"], "cannot read the text none.txt"),
        (["--quantize", "int3"], "--quantize knows no 'int3'"),
        (["-o", "nowhere/x.json"], "there is no directory nowhere"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_mistakes_are_named(model: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert run(["eval", "perplexity", str(model), "--limit", "50", *options]) in (1, 2)
    assert message in capsys.readouterr().err


def test_every_token_is_scored_once() -> None:
    assert windows(10, 6, 3, first=False) == [Window(0, 6, 1), Window(3, 9, 6), Window(6, 10, 9)]
    assert windows(6, 6, 3, first=True) == [Window(0, 6, 0)]
    for length in range(2, 40):
        parts = windows(length, 8, 3, first=False)
        assert [t for w in parts for t in range(w.scored, w.end)] == list(range(1, length))
        assert all(w.start < w.scored or w.start == 0 for w in parts)


def test_the_text_that_comes_along_is_prose_without_a_licence() -> None:
    name, text = read_text(None)
    assert name == "time_machine.txt"
    assert 50_000 < len(text) < 100_000
    assert "gutenberg" not in text.lower()
