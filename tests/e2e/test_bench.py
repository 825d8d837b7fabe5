"""`anyrig bench` on a tiny model with random weights: what a person or a script gets from it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from bench_models import tiny_shape

from anyrig.cli.main import run
from anyrig.core import env

WORK = ["--prompt", "12", "--gen", "5"]
# What ../shared/peers/compare.py and the other programs' runners agree on
PEER_KEYS = {
    *("peer", "version", "model", "variant", "n", "prompt", "gen", "load_s", "e2e_s"),
    *("tokens_per_s", "prefill_tokens_per_s", "ttft_mean_s", "peak_rss_mb"),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_shape(tmp_path_factory.mktemp("bench") / "tiny")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, cache: Path, tiny: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("ANYRIG_HOME", str(cache))
    monkeypatch.setenv("ANYRIG_THREADS", "1")
    monkeypatch.setenv("ANYRIG_DTYPE", "float32")
    monkeypatch.chdir(tmp_path)


def measured(capsys: pytest.CaptureFixture[str], *line: str) -> dict[str, Any]:
    """The result of `anyrig bench LINE --json`."""
    capsys.readouterr()
    assert run(["bench", *line, "--json"]) == 0
    [printed] = capsys.readouterr().out.splitlines()
    return json.loads(printed)


def failed(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    capsys.readouterr()
    assert run(["bench", *line]) in (1, 2)
    return capsys.readouterr().err


def test_throughput_prints_the_keys_of_every_program_and_how_far_passes_lie_apart(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    got = measured(capsys, "throughput", str(tiny), "--random-weights", "--n", "3", *WORK, "--repeats", "3")
    assert set(got) >= PEER_KEYS
    assert (got["n"], got["prompt"], got["gen"]) == (3, 12, 5)
    passes = got["tokens_per_s_passes"]
    assert len(passes) == 3
    assert got["tokens_per_s"] == max(passes) >= got["tokens_per_s_median"]
    assert got["e2e_s"] == pytest.approx(15 / got["tokens_per_s"], abs=1e-4)
    assert got["gb_per_s"] > 0
    assert got["gflop_per_s"] > 0
    assert "ceilings" not in got


def test_throughput_of_transformers_is_measured_on_the_same_work(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["throughput", str(tiny), "--random-weights", "--n", "2", *WORK, "--repeats", "1"]
    ours, theirs = (measured(capsys, *line, "--engine", engine) for engine in ("anyrig", "transformers"))
    assert set(theirs) >= PEER_KEYS
    assert [ours[k] for k in ("work", "n", "prompt", "gen", "parameters", "model")] == [
        theirs[k] for k in ("work", "n", "prompt", "gen", "parameters", "model")
    ]


def test_prompts_come_from_a_file(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("p.jsonl").write_text('{"prompt": "Why is the sky blue?"}\n{"prompt": "Name a colour."}\n')
    line = ["throughput", str(tiny), "--random-weights", "--prompts", "p.jsonl", "--gen", "4"]
    got = measured(capsys, *line)
    assert got["n"] == 2
    assert got["prompt"] in (5, 6), "the mean of 6 and 4 or so tokens"
    assert got["work"].startswith("texts ")
    assert measured(capsys, *line, "--engine", "transformers", "--repeats", "1")["prompt"] == got["prompt"]


def test_latency_tells_quantiles_at_a_concurrency(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    got = measured(capsys, "latency", str(tiny), "--random-weights", "--n", "5", "--concurrency", "2", *WORK)
    assert (got["n"], got["concurrency"]) == (5, 2)
    for wait in ("ttft", "itl"):
        p50, p90, p99 = (got[f"{wait}_{q}_s"] for q in ("p50", "p90", "p99"))
        assert 0 < p50 <= p90 <= p99
        assert 0 < got[f"{wait}_mean_s"] <= p99
    # Two at a time: the third begins when the first ends, and each request takes 5 steps of its own.
    assert got["steps"] == 15


def test_latency_is_shown_as_a_table(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "latency", str(tiny), "--random-weights", "--n", "2", *WORK, "--ceilings"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"time to first token +[\d.,]+ ms( +[\d.,]+ ms){3} +[\d.]+%", shown)
    assert "between tokens" in shown
    assert re.search(r"ceilings \(.+, 1 threads?\): memory read", shown)


def test_a_sweep_is_written_drawn_and_compared(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["sweep", str(tiny), "--random-weights", *WORK]
    first = measured(capsys, *line, "--n", "1,2,4", "-o", "a.json", "--plot", "a.png")
    assert [p["n"] for p in first["points"]] == [1, 2, 4]
    assert json.loads(Path("a.json").read_text()) == first
    assert all(p["roofline_share"] > 0 for p in first["points"])
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    measured(capsys, *line, "--n", "2,4,8", "--repeats", "1", "-o", "b.json")
    compared = measured(capsys, "compare", "a.json", "b.json", "--plot", "c.svg")
    assert {row["n"] for row in compared["rows"]} == {2, 4, None}
    row = next(r for r in compared["rows"] if r["measure"] == "tokens_per_s")
    assert row["ratio"] == pytest.approx(row["b"] / row["a"], abs=1e-3)
    assert "<svg" in Path("c.svg").read_text()


def test_different_work_is_not_compared(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["throughput", str(tiny), "--random-weights", "--n", "1", "--prompt", "4", "--repeats", "1"]
    measured(capsys, *line, "--gen", "2", "-o", "a.json")
    measured(capsys, *line, "--gen", "3", "-o", "b.json")
    assert "a and b did different work: `gen` is 2 in one, 3 in the other" in failed(
        capsys, "compare", "a.json", "b.json"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["throughput", "TINY", "--n", "0"], "--n must be at least 1. Given: 0"),
        (["sweep", "TINY", "--n", "1,x"], "--n must be batch sizes of at least 1, separated by commas. Given: 1,x"),
        (["sweep", "TINY", "--plot", "a.pdf"], ".png or .svg. Given: a.pdf"),
        (["sweep", "TINY", "--plot", "nowhere/a.png"], "there is no directory nowhere"),
        (["latency", "TINY", "--n", "2", "--concurrency", "3"], "--concurrency is 3, but there are only 2 requests"),
        (["throughput", "TINY", "-o", "nowhere/a.json"], "there is no directory nowhere"),
        (["throughput", "TINY", "--prompts", "none.txt"], "cannot read the prompts from none.txt"),
        (["throughput", "TINY", "--prompt", "300", "--n", "1"], "the prompt has 300 tokens"),
        (["throughput", "llama-9b"], "no shape for --random-weights: 'llama-9b'"),
        (["compare", "a.json", "b.json"], "cannot read the result a.json"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_mistakes_are_named(tiny: Path, capsys: pytest.CaptureFixture[str], line: list[str], message: str) -> None:
    options = [] if line[0] == "compare" else ["--random-weights"]
    assert message in failed(capsys, *(str(tiny) if word == "TINY" else word for word in line), *options)


def test_ceilings_stand_alone(capsys: pytest.CaptureFixture[str]) -> None:
    got = measured(capsys, "ceilings")
    assert got["threads"] == 1
    assert got["memory_read_gb_s"] > 0
    assert got["float32_gflop_s"] > 0


def test_random_models_live_in_the_cache_of_models(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured(capsys, "throughput", str(tiny), "--random-weights", "--n", "1", *WORK, "--repeats", "1")
    assert run(["models"]) == 0
    assert re.search(rf"^random-tiny-[0-9a-f]+\t\d+\t{re.escape(str(env.home()))}", capsys.readouterr().out, re.M)
