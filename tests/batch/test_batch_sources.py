"""Reading rows: what is data stays data, what is broken becomes that row's error, and any row can be started from."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anyrig.batch.config import BatchConfig
from anyrig.batch.inputs import open_inputs
from anyrig.batch.lines import JsonLines, TextLines
from anyrig.batch.parquet import ParquetFile
from anyrig.batch.row import Row
from anyrig.batch.source import Source
from anyrig.batch.table import CsvFile
from anyrig.core.errors import DataError, UsageError


def write(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def all_rows(source: Source) -> list[Row]:
    return list(source.rows(source.start))


def values(source: Source) -> list[dict]:
    return [dict(row.values) for row in all_rows(source)]


def errors(source: Source) -> list[str | None]:
    return [row.error for row in all_rows(source)]


# JSON Lines


def test_jsonl_splits_at_newlines_only(tmp_path):
    texts = ["a\u2028b", "c\u0085d", "e\u2029f", "g\x1eh", "i\rj"]
    lines = "".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts)
    assert [v["text"] for v in values(JsonLines(0, write(tmp_path / "a.jsonl", lines)))] == texts


def test_jsonl_takes_bom_crlf_blank_lines_and_a_last_line_without_newline(tmp_path):
    source = JsonLines(0, write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": 2}'))
    assert values(source) == [{"a": 1}, {"a": 2}]
    assert [row.position.line for row in all_rows(source)] == [1, 4]


def test_jsonl_text_passes_through_as_it_was_written(tmp_path):
    line = '{"a": 1.10, "b": 1e400, "c": 12345678901234567890123, "d": "\\u00e9\\ud83d\\ude00", "a": -0.0 }'
    (row,) = all_rows(JsonLines(0, write(tmp_path / "a.jsonl", line)))
    assert b"{" + row.payload + b"}" == line.replace(" }", "}").encode()


def test_a_number_renders_as_it_was_written(tmp_path):
    (row,) = all_rows(JsonLines(0, write(tmp_path / "a.jsonl", '{"price": 1.10}')))
    assert str(row.values["price"]) == "1.10"
    assert row.values["price"] == 1.1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"a": 1', "not JSON (Expecting ',' delimiter at column 8)"),
        ("[1, 2]", "a row must be a JSON object, this is a list"),
        ("12", "this is a number"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_broken_json_line_is_one_error_row_with_its_line(tmp_path, line, why):
    source = JsonLines(0, write(tmp_path / "a.jsonl", f'{{"a": 1}}\n\n{line}\n{{"a": 3}}\n'))
    first, broken, last = all_rows(source)
    assert (first.values["a"], last.values["a"]) == (1, 3)
    assert broken.error is not None
    assert broken.error.startswith(f"{source.name}, line 3: ")
    assert why in broken.error
    assert broken.payload == b""


def test_bytes_that_are_no_utf8_are_one_error_row_and_readable_with_their_encoding(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"a": "caf\xe9"}\n{"a": "ok"}\n')
    bad, good = all_rows(JsonLines(0, path))
    assert bad.error is not None and "byte 11 is 0xe9" in bad.error and "--encoding" in bad.error
    assert good.values == {"a": "ok"}
    assert values(JsonLines(0, path, encoding="latin-1"))[0] == {"a": "café"}


@pytest.mark.parametrize("text", ['[{"a": 1}, {"a": 2}]', '[\n  {"a": 1}\n]\n'])
def test_a_json_array_is_refused_with_the_command_that_converts_it(tmp_path, text):
    with pytest.raises(DataError, match=r"one JSON array.*jq -c"):
        all_rows(JsonLines(0, write(tmp_path / "a.jsonl", text)))


def test_an_endless_line_is_an_error_row_and_not_a_full_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("anyrig.batch.lines.MAX_LINE", 1000)
    source = JsonLines(0, write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": "' + "x" * 5000 + '"}\n{"a": 3}\n'))
    rows = all_rows(source)
    assert [r.error is None for r in rows] == [True, False, True]
    assert "longer than" in str(rows[1].error)
    assert rows[2].values == {"a": 3}


# CSV


def test_csv_cells_are_text_and_may_hold_newlines_and_quotes(tmp_path):
    source = CsvFile(0, write(tmp_path / "a.csv", '\ufeffid,text\r\n007,"a\nb, ""c"""\r\n\r\n8,\r\n'))
    assert values(source) == [{"id": "007", "text": 'a\nb, "c"'}, {"id": "8", "text": ""}]
    assert [row.position.line for row in all_rows(source)] == [2, 5]


def test_a_ragged_csv_row_is_an_error_row(tmp_path):
    source = CsvFile(0, write(tmp_path / "a.csv", "id,text\n1,a\n2\n3,b,c\n4,d\n"))
    assert errors(source) == [
        None,
        f"{source.name}, line 3: 1 cell, the header has 2",
        f"{source.name}, line 4: 3 cells, the header has 2",
        None,
    ]


def test_an_unclosed_quote_costs_one_row_and_not_the_rest_of_the_file(tmp_path):
    source = CsvFile(0, write(tmp_path / "a.csv", 'id,text\n1,a\n2,"open\n3,c\n4,d\n'))
    assert errors(source)[1] == f"{source.name}, line 3: a quote is never closed"
    assert [v.get("id") for v in values(source)] == ["1", None, "3", "4"]


def test_csv_cells_beyond_the_csv_modules_own_limit_are_read(tmp_path):
    big = "x" * 300_000
    assert values(CsvFile(0, write(tmp_path / "a.csv", f"text\n{big}\n"))) == [{"text": big}]


def test_a_bad_byte_in_csv_is_one_error_row(tmp_path):
    source = CsvFile(0, write(tmp_path / "a.csv", b"id,text\n1,a\n2,\xff\n3,c\n"))
    assert [e is None for e in errors(source)] == [True, False, True]


def test_semicolons_are_noticed_before_anything_runs(tmp_path):
    path = write(tmp_path / "a.csv", "id;text\n1;a\n")
    with pytest.raises(UsageError, match="--delimiter ';'"):
        CsvFile(0, path)
    assert values(CsvFile(0, path, delimiter=";")) == [{"id": "1", "text": "a"}]


def test_two_columns_of_one_name_are_refused(tmp_path):
    with pytest.raises(DataError, match='two columns named "a"'):
        CsvFile(0, write(tmp_path / "a.csv", "a,b,a\n1,2,3\n"))


# Text and Parquet


def test_a_text_file_has_a_row_per_line_that_is_not_blank(tmp_path):
    assert values(TextLines(0, write(tmp_path / "a.txt", "one\n\n  two \r\n"))) == [{"text": "one"}, {"text": "  two "}]


def test_parquet_rows_have_their_nested_values(tmp_path):
    table = pa.table(
        {"tags": [["a", "b"], None], "meta": [{"x": 1}, {"x": None}], "when": pa.array([0, 1], pa.date32())}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    assert values(ParquetFile(0, tmp_path / "a.parquet")) == table.to_pylist()


def test_a_damaged_parquet_file_is_refused_by_name(tmp_path):
    with pytest.raises(DataError, match="not a Parquet file, or damaged"):
        ParquetFile(0, write(tmp_path / "a.parquet", b"PAR1 no PAR1"))


def test_reading_can_start_at_every_row_of_every_format(tmp_path):
    csv = CsvFile(0, write(tmp_path / "a.csv", 'id,text\n1,"a\nb"\n\n2\n3,"open\n4,d\n5,"e"\n'))
    jsonl = JsonLines(
        0, write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}\r\n\n{"a": \n{"a": "\xe2\x80\xa8"}\n{"a": 4}')
    )
    text = TextLines(0, write(tmp_path / "a.txt", "one\n\ntwo\nthree"))
    pq.write_table(pa.table({"n": list(range(23))}), tmp_path / "a.parquet", row_group_size=5)
    parquet = ParquetFile(0, tmp_path / "a.parquet")
    for source in (csv, jsonl, text, parquet):
        rows = all_rows(source)
        assert len(rows) >= 3
        for i, row in enumerate(rows):
            again = list(source.rows(row.position))
            assert [(r.position, r.payload, r.error) for r in again] == [
                (r.position, r.payload, r.error) for r in rows[i:]
            ]
            after = list(source.rows(row.next))
            assert [r.payload for r in after] == [r.payload for r in rows[i + 1 :]]


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": 2}\n')
    rows = JsonLines(0, path).rows(JsonLines(0, path).start)
    next(rows)
    with path.open("a") as file:
        file.write('{"a": 3}\n')
    with pytest.raises(DataError, match="changed while it was read"):
        list(rows)


# Which files


def names(config: BatchConfig, tmp_path: Path) -> list[str]:
    return [s.path.name for s in open_inputs(config, tmp_path / "out.jsonl", tmp_path)]


def test_directories_and_globs_give_their_supported_files_in_order_but_never_the_output(tmp_path):
    for name in ("b.jsonl", "a.csv", "c.md", "out.jsonl", "_tmp.jsonl"):
        write(tmp_path / name, "a\n1\n")
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "d.txt", "x\n")
    assert names(BatchConfig(input=[str(tmp_path)]), tmp_path) == ["a.csv", "b.jsonl", "d.txt"]
    assert names(BatchConfig(input=[f"{tmp_path}/*.jsonl"]), tmp_path) == ["_tmp.jsonl", "b.jsonl"]
    given_twice = BatchConfig(input=[f"{tmp_path}/b.jsonl", f"{tmp_path}/**/*.jsonl"])
    assert names(given_twice, tmp_path) == ["b.jsonl", "_tmp.jsonl"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("none.jsonl", "none.jsonl does not exist"),
        ("*.csv", "matches no file"),
        ("a.xlsx", r"'.xlsx'.*supported are .jsonl"),
        ("a.jsonl.gz", "decompress it first"),
        ("a.json", r"jq -c"),
        ("empty", "no input in directory"),
        ("out.jsonl", "is the input and the output"),
    ],
)
def test_inputs_that_cannot_be_are_refused_with_the_way_out(tmp_path, given, message):
    (tmp_path / "empty").mkdir()
    for name in ("a.xlsx", "a.jsonl.gz", "a.json", "out.jsonl"):
        write(tmp_path / name, "x")
    with pytest.raises(UsageError, match=message):
        open_inputs(BatchConfig(input=[str(tmp_path / given)]), tmp_path / "out.jsonl", tmp_path)
