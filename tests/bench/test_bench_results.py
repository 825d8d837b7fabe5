"""Work, statistics, comparisons and pictures: no engine needed."""

import json
import statistics
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anyrig.bench import ceilings, plot, report
from anyrig.bench.compare import compare, read
from anyrig.bench.spread import quantile, spread, summary
from anyrig.bench.work import Work, read_texts
from anyrig.core.errors import DataError, UsageError

THROUGHPUT = {
    "what": "throughput",
    "peer": "anyrig",
    "version": "1",
    "model": "m",
    "variant": "v",
    "work": "random ids",
    "n": 4,
    "prompt": 8,
    "gen": 8,
    "parameters": 100,
    "tokens_per_s": 50.0,
    "tokens_per_s_median": 45.0,
    "prefill_tokens_per_s": 500.0,
    "ttft_mean_s": 0.2,
    "load_s": 2.0,
    "peak_rss_mb": 300,
}


def sweep_result(*speeds: float, ceiling: bool = False) -> dict[str, Any]:
    points = []
    for i, speed in enumerate(speeds):
        point = {
            "n": 2**i,
            "tokens_per_s": speed,
            "tokens_per_s_median": speed,
            "tokens_per_s_spread": 0.1,
            "tokens_per_s_passes": [speed, 0.9 * speed],
            "prefill_tokens_per_s": 10 * speed,
            "ttft_mean_s": 0.1,
            "gb_per_s": 1.0,
            "gflop_per_s": 10.0,
        }
        if ceiling:
            point |= {"memory_tokens_per_s": 9 * speed, "compute_tokens_per_s": 500, "roofline_tokens_per_s": 400}
            point |= {"roofline_share": 0.4, "memory_share": 0.2, "compute_share": 0.3}
        points.append(point)
    limits = ceilings.Ceilings(20, 400, 800, 100, 2, "made up").to_dict() if ceiling else None
    head = {k: THROUGHPUT[k] for k in ("peer", "version", "model", "variant", "work", "prompt", "gen", "load_s")}
    return {"what": "sweep", **head, "weights": "bfloat16", "peak_rss_mb": 9, "ceilings": limits, "points": points}


def png_size(file: Path) -> tuple[int, int]:
    """Width and height of a PNG, every chunk's checksum tested."""
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, kinds = 8, []
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        assert (
            zlib.crc32(data[at + 4 : at + 8 + length])
            == struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0]
        )
        kinds.append(kind)
        at += 12 + length
    assert kinds[0] == b"IHDR"
    assert kinds[-1] == b"IEND"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_random_work_is_the_same_for_the_same_seed_only() -> None:
    work = Work(3, 5, 7)
    assert work.prompts(1, 50_000) == work.prompts(1, 50_000) != work.prompts(2, 50_000)
    assert [len(p) for p in work.prompts(1, 50_000)] == [5, 5, 5]
    assert all(t < 300 for p in work.prompts(1, 300) for t in p)


def test_prompts_of_a_file_start_again_when_there_are_too_few(tmp_path: Path) -> None:
    lines, jsonl = tmp_path / "p.txt", tmp_path / "p.jsonl"
    lines.write_text("one\n\ntwo\n")
    jsonl.write_text('{"prompt": "one", "id": 1}\n{"prompt": "two"}\n')
    assert read_texts(lines) == read_texts(jsonl) == ("one", "two")
    work = Work(3, gen=4, texts=read_texts(lines))
    assert work.prompts(0, 300, lambda text: list(text.encode())) == [[111, 110, 101], [116, 119, 111], [111, 110, 101]]
    assert work.name != Work(3, gen=4, texts=("one", "three")).name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "x"}\n{"text": "y"}\n', "line 2 of .* has no `prompt`"),
        ("{prompt}\n", "line 1 of .* is not JSON"),
        ("\n\n", "holds no prompts"),
    ],
)
def test_a_broken_file_of_prompts_is_named_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(content)
    with pytest.raises(DataError, match=message):
        read_texts(file)


def test_quantiles_are_numpys() -> None:
    values = np.random.default_rng(0).exponential(size=37).tolist()
    for q in (0.0, 0.5, 0.9, 0.99, 1.0):
        assert quantile(values, q) == pytest.approx(np.quantile(values, q))
    assert summary(values, "itl")["itl_mean_s"] == pytest.approx(statistics.fmean(values), abs=1e-5)
    assert spread([10.0, 12.0, 11.0]) == pytest.approx(2 / 11)
    assert spread([10.0]) == 0


def test_ratios_are_of_the_second_to_the_first_and_less_time_is_better() -> None:
    other = {**THROUGHPUT, "tokens_per_s": 75.0, "ttft_mean_s": 0.1, "prefill_tokens_per_s": None}
    rows = {row.key: row for row in compare(THROUGHPUT, other).rows}
    assert "prefill_tokens_per_s" not in rows, "one of them does not know it"
    assert rows["tokens_per_s"].ratio == rows["tokens_per_s"].gain == 1.5
    assert rows["ttft_mean_s"].ratio == 0.5
    assert rows["ttft_mean_s"].gain == 2.0
    assert "better" in report.compare(compare(THROUGHPUT, other))


@pytest.mark.parametrize(
    ("change", "word"), [({"n": 8}, "`n` is 4 in one, 8"), ({"gen": 9}, "`gen`"), ({"work": "texts ab"}, "`work`")]
)
def test_different_work_is_refused_by_name(change: dict[str, Any], word: str) -> None:
    with pytest.raises(DataError, match=f"A and B did different work: {word}"):
        compare(THROUGHPUT, {**THROUGHPUT, **change})


def test_another_model_is_different_work_but_another_name_of_it_is_not() -> None:
    assert compare(THROUGHPUT, {**THROUGHPUT, "model": "/models/m"}).rows
    with pytest.raises(DataError, match="`parameters`"):
        compare(THROUGHPUT, {**THROUGHPUT, "parameters": 200})


def test_another_programs_line_can_be_compared(tmp_path: Path) -> None:
    file = tmp_path / "vllm.out"
    line = {k: v for k, v in THROUGHPUT.items() if k not in ("what", "work", "parameters", "tokens_per_s_median")}
    file.write_text(f"loading ...\n{json.dumps({**line, 'peer': 'vllm'})}\n")
    assert [row.ratio for row in compare(read(file), THROUGHPUT).rows] == [1.0] * 5


def test_sweeps_are_compared_for_the_sizes_that_both_have() -> None:
    first, second = sweep_result(10, 20, 30), sweep_result(20, 30)
    comparison = compare(first, second)
    assert comparison.sizes == [1, 2]
    assert [r.ratio for r in comparison.rows if r.key == "tokens_per_s"] == [2.0, 1.5]
    second["points"] = [{**second["points"][0], "n": 64}]
    with pytest.raises(DataError, match="no batch size in common"):
        compare(first, second)


@pytest.mark.parametrize("content", ["", "[1, 2]", '{"a": 1}', "\x00\xff"])
def test_what_is_no_result_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match="is not a result"):
        read(file)


@pytest.mark.parametrize("ceiling", [True, False])
def test_a_sweep_is_drawn_and_shown(tmp_path: Path, ceiling: bool) -> None:
    result = sweep_result(10, 20, 30, ceiling=ceiling)
    plot.plot_sweep(result, tmp_path / "s.png")
    width, height = png_size(tmp_path / "s.png")
    assert width > 800
    assert height > 400
    plot.plot_sweep(result, tmp_path / "s.svg")
    assert "<svg" in (tmp_path / "s.svg").read_text()
    assert ("of memory" in report.sweep(result)) == ceiling


def test_comparisons_are_drawn(tmp_path: Path) -> None:
    plot.plot_compare(compare(sweep_result(10, 20), sweep_result(5, 40)), tmp_path / "sweeps.png")
    plot.plot_compare(compare(THROUGHPUT, {**THROUGHPUT, "tokens_per_s": 1.0}), tmp_path / "single.png")
    assert png_size(tmp_path / "sweeps.png")
    assert png_size(tmp_path / "single.png")


def test_a_picture_that_cannot_be_drawn_is_found_out_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"\.png or \.svg"):
        plot.check_plot(tmp_path / "x.pdf")
    with pytest.raises(UsageError, match="no directory"):
        plot.check_plot(tmp_path / "nowhere" / "x.png")
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'anyrig\[bench\]'"):
        plot.check_plot(tmp_path / "x.png")


def test_ceilings_say_something_without_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "native_module", lambda: None)
    monkeypatch.setattr(ceilings, "READ_BYTES", 1 << 22)
    monkeypatch.setattr(ceilings, "GEMM", (64, 64, 64))
    monkeypatch.setattr(ceilings, "TRY_FOR", 0.0)
    limits = ceilings.measure(threads=1)
    assert limits.memory_read_gb_s > 0
    assert limits.gemm("float32") and limits.gemm("bfloat16") == limits.gemm("float16")
    assert limits.method.startswith("torch ")
    assert "memory read" in report.ceilings(limits)


@pytest.mark.skipif(ceilings.native_module() is None, reason="the kernels are not built, or do not measure themselves")
def test_our_kernels_measure_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "READ_BYTES", 1 << 22)
    monkeypatch.setattr(ceilings, "GEMM", (64, 256, 256))
    monkeypatch.setattr(ceilings, "TRY_FOR", 0.0)
    limits = ceilings.measure(threads=1)
    assert limits.method == "native"
    assert limits.memory_read_gb_s > 0
    assert limits.gemm("float32")


@pytest.mark.parametrize(
    "line", [["bench", "--help"], ["bench", "sweep", "--help"], ["bench", "compare", "a", "b"], ["eval", "--help"]]
)
def test_what_measures_nothing_loads_no_heavy_library(line: list[str]) -> None:
    program = (
        "import sys; from anyrig.cli.main import run; run(sys.argv[1:]);"
        "print('LOADED', *sorted({'torch', 'transformers', 'matplotlib'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program, *line], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "LOADED", done.stderr
