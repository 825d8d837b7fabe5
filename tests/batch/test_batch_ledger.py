"""What is done stays done: ranges, journal, lock and fingerprint, whatever moment the process dies at."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pipeline import process

from anyrig.batch.journal import Journal
from anyrig.batch.ledger import Ledger
from anyrig.batch.row import RowResult
from anyrig.core.errors import DataError, UsageError


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    """Two files, 60 rows, three of them broken."""
    (tmp_path / "in").mkdir()
    lines = [json.dumps({"id": i}) if i % 15 != 7 else f'{{"id": {i}' for i in range(40)]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "in" / "b.csv").write_text("id\n" + "".join(f"{i}\n" for i in range(40, 60)))
    return sorted((tmp_path / "in").iterdir())


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def done_so_far(output: Path) -> int:
    ledger = Ledger(output)
    ledger.close()
    return ledger.resumed


def test_every_row_comes_out_once_in_input_order_whatever_order_they_finish_in(inputs, tmp_path):
    process(inputs, f"{tmp_path}/one.jsonl", shuffle=1)
    process(inputs, f"{tmp_path}/two.jsonl", shuffle=2, range_rows=1000)
    out = rows(tmp_path / "one.jsonl")
    assert [int(r["id"]) for r in out if "id" in r] == [i for i in range(60) if i not in (7, 22, 37)]
    assert [r["output"] for r in out if "id" in r][:2] == ["answer to a.jsonl, line 1", "answer to a.jsonl, line 2"]
    assert "line 8: not JSON" in out[7]["error"]
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()
    assert list(tmp_path.glob(".*")) == []


def test_any_number_of_crashes_changes_nothing_in_the_output(inputs, tmp_path):
    process(inputs, f"{tmp_path}/plain.jsonl")
    answered = crashes = 0
    while not (tmp_path / "out.jsonl").exists():
        assert done_so_far(tmp_path / "out.jsonl") <= min(answered, 60)
        answered += process(inputs, f"{tmp_path}/out.jsonl", shuffle=crashes, crash_after=5)
        crashes += 1
    assert crashes > 5
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "plain.jsonl").read_bytes()
    assert answered < 60 + 5 * crashes  # it does go on, rather than start again


def test_nothing_appears_under_the_outputs_name_before_it_is_whole(inputs, tmp_path):
    process(inputs, f"{tmp_path}/out.jsonl", crash_after=50)
    assert not (tmp_path / "out.jsonl").exists()
    assert (tmp_path / ".out.jsonl.anyrig" / "ledger.jsonl").exists()


def test_a_limit_counts_rows_that_earlier_runs_have_done(inputs, tmp_path):
    process(inputs, f"{tmp_path}/out.jsonl", crash_after=22, limit=45)
    process(inputs, f"{tmp_path}/out.jsonl", limit=45)
    assert len(rows(tmp_path / "out.jsonl")) == 45


def test_a_torn_last_line_in_ledger_or_journal_is_as_if_never_written(inputs, tmp_path):
    process(inputs, f"{tmp_path}/plain.jsonl")
    process(inputs, f"{tmp_path}/out.jsonl", crash_after=50)
    work = tmp_path / ".out.jsonl.anyrig"
    log = work / "ledger.jsonl"
    log.write_bytes(log.read_bytes()[:-9])
    for segment in (work / "journal").iterdir():
        segment.write_bytes(segment.read_bytes()[:-9])
    (work / "parts" / "00001-000000000014").write_bytes(b"half a par")
    process(inputs, f"{tmp_path}/out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "plain.jsonl").read_bytes()


def test_a_damaged_line_inside_the_ledger_is_named(inputs, tmp_path):
    process(inputs, f"{tmp_path}/out.jsonl", crash_after=50)
    log = tmp_path / ".out.jsonl.anyrig" / "ledger.jsonl"
    log.write_bytes(b"{}\n" + log.read_bytes())
    with pytest.raises(DataError, match=r"ledger\.jsonl, line 1 is damaged.*--fresh"):
        process(inputs, f"{tmp_path}/out.jsonl")


def test_inputs_that_changed_since_are_refused_by_name(inputs, tmp_path):
    process(inputs, f"{tmp_path}/out.jsonl", crash_after=50)
    inputs[1].write_text("id\n1\n")
    with pytest.raises(UsageError, match=r"begun with another input \(.*b\.csv changed\).*--fresh"):
        process(inputs, f"{tmp_path}/out.jsonl")
    (tmp_path / "in" / "c.csv").write_text("id\n1\n")
    with pytest.raises(UsageError, match=r"b\.csv changed; .*c\.csv new"):
        process([*inputs, tmp_path / "in" / "c.csv"], f"{tmp_path}/out.jsonl")


def test_an_input_is_the_same_under_another_name_but_not_in_another_order(inputs, tmp_path, monkeypatch):
    process(inputs, f"{tmp_path}/out.jsonl", crash_after=50)
    with pytest.raises(UsageError, match=r"another input \(another order\)"):
        process(inputs[::-1], f"{tmp_path}/out.jsonl")
    monkeypatch.chdir(tmp_path)
    process([Path("in/a.jsonl"), Path("in/../in/b.csv")], "out.jsonl")
    assert len(rows(tmp_path / "out.jsonl")) == 60


def test_a_fingerprint_may_grow_but_not_change(tmp_path):
    ledger = Ledger(tmp_path / "out.jsonl")
    ledger.begin({"prompt": {"prompt": "A", "system": None}})
    ledger.begin({"model": "m 1"})
    with pytest.raises(UsageError, match=r"another prompt \('A', now 'B'\): start anew with --fresh"):
        ledger.begin({"prompt": {"prompt": "B", "system": None}})
    with pytest.raises(UsageError, match=r"another model \('m 1', now 'm 2'\)"):
        ledger.begin({"model": "m 2"})


def test_fresh_throws_away_what_an_interrupted_run_left(inputs, tmp_path):
    process(inputs, f"{tmp_path}/out.jsonl", crash_after=50)
    ledger = Ledger(tmp_path / "out.jsonl", fresh=True)
    assert (ledger.resumed, ledger.committed) == (0, {})
    ledger.begin({"inputs": []})


def test_a_run_that_did_nothing_leaves_nothing(tmp_path):
    ledger = Ledger(tmp_path / "out.jsonl")
    ledger.begin({"prompt": "A"})
    ledger.close()
    assert list(tmp_path.iterdir()) == []


def test_a_second_live_run_on_one_output_is_refused(tmp_path):
    code = (
        "import sys, pathlib; from anyrig.batch.ledger import Ledger\n"
        "ledger = Ledger(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "out.jsonl")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        with pytest.raises(UsageError, match=rf"another run is writing .*out\.jsonl \(process {holder.pid}\)"):
            Ledger(tmp_path / "out.jsonl")
        Ledger(tmp_path / "other.jsonl").close()
    finally:
        holder.kill()
        holder.wait()
    Ledger(tmp_path / "out.jsonl").close()


def test_journal_segments_go_when_their_rows_are_committed(tmp_path, monkeypatch):
    monkeypatch.setattr("anyrig.batch.journal._SEGMENT_ROWS", 4)
    journal = Journal(tmp_path / "journal")
    for i in range(10):
        journal.append([((0, i), RowResult({"output": i}))])
    assert len(list((tmp_path / "journal").iterdir())) == 3
    journal.close()
    again = Journal(tmp_path / "journal")
    assert [again.take((0, i)) for i in range(2)] == [RowResult({"output": 0}), RowResult({"output": 1})]
    again.forget([(0, i) for i in range(10)])
    assert list((tmp_path / "journal").iterdir()) == []
