"""From every input format to every output format: input columns untouched, added ones typed, files whole."""

import csv
import datetime
import decimal
import errno
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pipeline import process

from anyrig.batch.config import BatchConfig
from anyrig.batch.inputs import open_inputs
from anyrig.batch.result import Columns
from anyrig.batch.row import Row, RowResult
from anyrig.batch.target import target_of
from anyrig.core.errors import DataError, UsageError
from anyrig.core.params import SamplingParams

ADDED = ["output", "finish_reason", "error", "prompt_tokens", "output_tokens"]


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r, ensure_ascii=False)) + "\n" for r in rows))
    return path


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_jsonl_to_jsonl_keeps_the_text_of_every_number_and_string(tmp_path):
    source = jsonl(
        tmp_path / "in.jsonl", '{"a": 1.10, "b": 12345678901234567890123, "s": "\\u00e9\u2028", "k": {"x": 1e2}}'
    )
    process([source], f"{tmp_path}/out.jsonl")
    (line,) = (tmp_path / "out.jsonl").read_bytes().decode().split("\n")[:-1]
    assert line.startswith(
        '{"a": 1.10, "b": 12345678901234567890123, "s": "\\u00e9\u2028", "k": {"x": 1e2}, "output": '
    )
    assert list(json.loads(line))[-5:] == ADDED


def test_jsonl_to_csv_has_all_columns_of_all_rows(tmp_path):
    source = jsonl(
        tmp_path / "in.jsonl", {"a": 1}, {"b": 'x\n"y"', "a": None}, '{"c": [1, 2.50], "d": 3.10, "e": true}', "{broken"
    )
    process([source], f"{tmp_path}/out.csv")
    first, second, third, broken = read_csv(tmp_path / "out.csv")
    assert list(first) == ["a", "b", "c", "d", "e", *ADDED]
    assert (first["a"], second["a"], second["b"]) == ("1", "", 'x\n"y"')
    assert (third["c"], third["d"], third["e"]) == ("[1, 2.5]", "3.10", "true")
    assert "line 4: not JSON" in broken["error"]


@pytest.mark.parametrize(
    ("values", "kind", "out"),
    [
        ([None, "a"], pa.string(), [None, "a"]),
        ([1, "a"], pa.string(), ["1", "a"]),
        ([1, 2.5], pa.float64(), [1.0, 2.5]),
        ([None, None], pa.string(), [None, None]),
        ([2**70, 1], pa.string(), [str(2**70), "1"]),
        ([[1], [], None, [None]], pa.list_(pa.int64()), [[1], [], None, [None]]),
        ([[1], ["a"]], pa.list_(pa.string()), [["1"], ["a"]]),
        (
            [{"x": 1}, {"y": "b"}],
            pa.struct([("x", pa.int64()), ("y", pa.string())]),
            [{"x": 1, "y": None}, {"x": None, "y": "b"}],
        ),
        ([{}, {}], pa.string(), ["{}", "{}"]),
        ([{"x": 1}, [1], "s"], pa.string(), ['{"x": 1}', "[1]", "s"]),
        ([True, False], pa.bool_(), [True, False]),
        ([True, 1], pa.string(), ["true", "1"]),
    ],
)
def test_jsonl_to_parquet_finds_a_type_that_holds_every_row(tmp_path, values, kind, out):
    source = jsonl(tmp_path / "in.jsonl", *({"v": v} for v in values))
    process([source], f"{tmp_path}/out.parquet", range_rows=1)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.schema.field("v").type == kind
    assert table.column("v").to_pylist() == out
    assert [str(table.schema.field(c).type) for c in ADDED] == ["string", "string", "string", "int64", "int64"]


def test_csv_cells_stay_text_everywhere(tmp_path):
    (tmp_path / "in.csv").write_text('id,text\n007,"a\nb"\n1e5,\n')
    for suffix in ("csv", "jsonl", "parquet"):
        process([tmp_path / "in.csv"], f"{tmp_path}/out.{suffix}")
    expected = [{"id": "007", "text": "a\nb"}, {"id": "1e5", "text": ""}]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for rows in (read_csv(tmp_path / "out.csv"), lines, pq.read_table(tmp_path / "out.parquet").to_pylist()):
        assert [{k: r[k] for k in ("id", "text")} for r in rows] == expected


def test_parquet_to_parquet_keeps_every_arrow_type(tmp_path):
    table = pa.table(
        {
            "when": pa.array([datetime.datetime(2026, 1, 2, 3, 4, 5, 678), None], pa.timestamp("us", tz="UTC")),
            "price": pa.array([decimal.Decimal("1.10"), None], pa.decimal128(10, 2)),
            "tags": pa.array([["a", None], None], pa.large_list(pa.string())),
            "meta": pa.array(
                [{"x": 1, "y": [1.5]}, None], pa.struct([("x", pa.int8()), ("y", pa.list_(pa.float32()))])
            ),
            "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int32())),
            "blob": pa.array([b"\x00\xff", None], pa.binary()),
            "label": pa.array(["x", "y"]).dictionary_encode(),
            "none": pa.nulls(2),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    read_back = pq.read_table(tmp_path / "in.parquet")
    process([tmp_path / "in.parquet"], f"{tmp_path}/out.parquet", range_rows=1)
    out = pq.read_table(tmp_path / "out.parquet")
    assert out.column_names == [*table.column_names, *ADDED]
    assert out.select(table.column_names).schema.types == read_back.schema.types
    assert out.select(table.column_names).to_pylist() == read_back.to_pylist()
    process([tmp_path / "in.parquet"], f"{tmp_path}/out.jsonl")
    first = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    assert (first["when"], first["price"], first["blob"]) == ("2026-01-02T03:04:05.000678+00:00", "1.10", "AP8=")


def test_parquet_files_with_other_columns_are_joined_and_with_other_types_refused(tmp_path):
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": [3], "b": ["x"]}), tmp_path / "2.parquet")
    process([tmp_path / "1.parquet", tmp_path / "2.parquet"], f"{tmp_path}/out.parquet")
    assert pq.read_table(tmp_path / "out.parquet").select(["a", "b"]).to_pylist() == [
        {"a": 1, "b": None},
        {"a": 2, "b": None},
        {"a": 3, "b": "x"},
    ]
    pq.write_table(pa.table({"a": ["x"]}), tmp_path / "3.parquet")
    with pytest.raises(UsageError, match=r'column "a" is int64 in .*1\.parquet and string in .*3\.parquet'):
        process([tmp_path / "1.parquet", tmp_path / "3.parquet"], f"{tmp_path}/other.parquet")


def test_inputs_of_all_formats_go_into_one_output(tmp_path):
    jsonl(tmp_path / "a.jsonl", {"text": "one"})
    (tmp_path / "b.csv").write_text("text\ntwo\n")
    (tmp_path / "c.txt").write_text("three\n")
    pq.write_table(pa.table({"text": ["four"]}), tmp_path / "d.parquet")
    inputs = [tmp_path / n for n in ("a.jsonl", "b.csv", "c.txt", "d.parquet")]
    for suffix in ("csv", "parquet"):
        process(inputs, f"{tmp_path}/out.{suffix}")
    expected = ["one", "two", "three", "four"]
    assert [r["text"] for r in read_csv(tmp_path / "out.csv")] == expected
    assert pq.read_table(tmp_path / "out.parquet").column("text").to_pylist() == expected


def test_a_directory_gets_part_files_of_one_schema(tmp_path, monkeypatch):
    monkeypatch.setattr("anyrig.batch.assemble._FILE_ROWS", 10)
    source = jsonl(tmp_path / "in.jsonl", *({"a": i} for i in range(20)), *({"b": str(i)} for i in range(15)))
    process([source], f"{tmp_path}/out/", output_format="parquet")
    files = sorted((tmp_path / "out").iterdir())
    assert [f.name for f in files] == [f"part-{i:05}.parquet" for i in range(len(files))]
    assert len(files) == 3
    assert len({str(pq.read_schema(f)) for f in files}) == 1
    assert pq.read_table(tmp_path / "out").num_rows == 35
    process([source], f"{tmp_path}/out/", output_format="csv", overwrite=True)
    assert {f.suffix for f in (tmp_path / "out").iterdir()} == {".csv"}


def test_parsed_outputs_become_nested_columns(tmp_path):
    def parsed(row: Row, columns: Columns) -> RowResult:
        n = row.position.number
        output = {"name": f"n{n}", "tags": ["t"] * n} if n else None
        return RowResult(dict(zip(ADDED, [output, "stop", None, 1, 1], strict=True)))

    source = jsonl(tmp_path / "in.jsonl", {"a": 1}, {"a": 2}, {"a": 3})
    process([source], f"{tmp_path}/out.parquet", results=parsed, params=SamplingParams(json_schema={}))
    column = pq.read_table(tmp_path / "out.parquet").column("output")
    assert column.to_pylist() == [None, {"name": "n1", "tags": ["t"]}, {"name": "n2", "tags": ["t", "t"]}]


def test_wide_rows_are_not_held_in_memory(tmp_path):
    import tracemalloc

    source = tmp_path / "in.jsonl"
    with source.open("w") as file:
        for i in range(200):
            file.write(json.dumps({"i": i, "wide": "x" * 500_000}) + "\n")
    tracemalloc.start()
    try:
        process([source], f"{tmp_path}/out.jsonl", range_rows=1000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40e6, f"{peak / 1e6:.0f} MB for 100 MB of rows"
    assert sum(1 for _ in (tmp_path / "out.jsonl").open()) == 200


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        ("none/out.jsonl", UsageError, r"directory does not exist.*mkdir -p"),
        ("out.xlsx", UsageError, r"'.xlsx'.*supported are .jsonl .csv .parquet"),
        ("out", UsageError, "'without extension'"),
        ("old.jsonl", UsageError, r"exists: --overwrite replaces it"),
        ("old.jsonl/", UsageError, "is a file"),
        ("full/", UsageError, r"holds other files \(mine.txt\)"),
        ("/proc/out.jsonl", DataError, r"can't be written: /proc"),
    ],
)
def test_an_output_that_cannot_be_is_refused_before_anything_is_spent(tmp_path, output, error, message):
    (tmp_path / "old.jsonl").write_text("{}\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("")
    given = output if output.startswith("/") else f"{tmp_path}/{output}"
    with pytest.raises(error, match=message):
        target_of(BatchConfig(output=given))


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """Unlike `tmp_path`, other users may look into it."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


# Root may read and write everything, so the test becomes somebody else, which only root can do. CI runs it as root.
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try it as somebody else")
def test_an_ordinary_user_is_told_what_may_not_be_read_or_written(open_directory):
    tmp_path = open_directory
    (tmp_path / "out").mkdir()
    (tmp_path / "closed").mkdir(mode=0o700)
    (tmp_path / "in.txt").write_text("x\n")
    (tmp_path / "in.txt").chmod(0o600)
    os.seteuid(65534)
    try:
        with pytest.raises(DataError, match=r"the output's directory can't be written: .*/out \(Permission denied\)"):
            target_of(BatchConfig(output=f"{tmp_path}/out/o.jsonl"))
        with pytest.raises(DataError, match=r"the output can't be written: .*/closed/.* \(Permission denied\)"):
            target_of(BatchConfig(output=f"{tmp_path}/closed/in/o.jsonl"))
        with pytest.raises(UsageError, match=r"in\.txt \(Permission denied\)"):
            open_inputs(BatchConfig(input=[f"{tmp_path}/in.txt"]), None, tmp_path)
        with pytest.raises(UsageError, match=r"closed/in\.txt can't be read \(Permission denied\)"):
            open_inputs(BatchConfig(input=[f"{tmp_path}/closed/in.txt"]), None, tmp_path)
    finally:
        os.seteuid(0)


def test_a_full_disk_says_where_and_how_full_and_the_next_run_goes_on(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "in.jsonl", *({"a": i} for i in range(60)))
    synced = os.fsync
    left = 5

    def full(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        synced(descriptor)

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match=r"no space left while writing .*\(.* MB free\).*run the same command again"):
        process([source], f"{tmp_path}/out.jsonl")
    monkeypatch.undo()
    assert 0 < process([source], f"{tmp_path}/out.jsonl") < 60
    assert [json.loads(line)["a"] for line in (tmp_path / "out.jsonl").open()] == list(range(60))
