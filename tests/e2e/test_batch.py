"""`anyrig batch` with the real model: from files to files, and through kills, Ctrl-C and a full disk."""

import contextlib
import csv
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anyrig.cli import batch as command
from anyrig.cli.main import run
from anyrig.core.config import EngineConfig
from anyrig.engine.engine import Engine

MODEL = "smollm2-135m"
SMALL = ["--threads", "1", "--max-num-seqs", "8", "--max-batch-tokens", "256", "--kv-cache-memory", "256MB"]
ADDED = ["output", "finish_reason", "error", "prompt_tokens", "output_tokens"]
_engines: dict[EngineConfig, Engine] = {}


@pytest.fixture(autouse=True)
def one_engine_per_configuration(monkeypatch):
    """Loading is tested elsewhere; here the same real engine serves all commands."""

    def engine(model: str, config: EngineConfig) -> Engine:
        return _engines.get(config) or _engines.setdefault(config, Engine(model, config))

    monkeypatch.setattr(command, "_engine", engine)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "words.csv"
    path.write_text('id,text\n1,"Hello, you"\n2,"two\nlines"\n3,ragged,row\n4,Paris\n')
    return path


def batch(*args: object, small: bool = True) -> int:
    return run(["batch", MODEL, *map(str, args), *(SMALL if small else [])])


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_keep_their_columns_and_order_and_a_bad_one_costs_itself(words, tmp_path, capsys):
    code = batch(
        "-i",
        words,
        "-o",
        tmp_path / "out.jsonl",
        "--prompt",
        "Repeat: {{ text }}",
        "--temperature",
        0,
        "--max-tokens",
        8,
    )
    assert code == 3
    out = rows(tmp_path / "out.jsonl")
    assert [list(r) for r in out] == [["id", "text", *ADDED]] * 4
    assert [(r["id"], r["text"]) for r in out if r["id"] != "3"] == [
        ("1", "Hello, you"),
        ("2", "two\nlines"),
        ("4", "Paris"),
    ]
    assert out[2]["error"] == f"{words}, line 5: 3 cells, the header has 2"
    assert (out[2]["output"], out[2]["finish_reason"]) == (None, "error")
    engine = next(iter(_engines.values()))
    for row in (r for r in out if r["error"] is None):
        ids = engine.tokenizer.encode_chat([{"role": "user", "content": f"Repeat: {row['text']}"}])
        engine.add_request("alone", ids, engine.default_params(temperature=0.0, max_tokens=8))
        while not (done := engine.step()):
            pass
        assert (row["output"], row["prompt_tokens"]) == (done[0].outputs[0].text, len(ids))
        assert row["output_tokens"] == len(done[0].outputs[0].token_ids)
    said = capsys.readouterr().err
    assert "4 rows, 1 failed" in said
    assert "line 5: 3 cells" in said
    assert not list(tmp_path.glob(".*"))


def test_choices_give_one_of_them_and_the_likeliest_without_being_asked(tmp_path):
    (tmp_path / "in.txt").write_text("The cat sleeps.\nBuy now!\nThe cat sleeps.\n")
    args = ["-i", tmp_path / "in.txt", "--prompt", "Is this spam? {{ text }}", "--choices", "yes,no"]
    assert batch(*args, "-o", tmp_path / "out.parquet") == 0
    out = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert {r["output"] for r in out} <= {"yes", "no"}
    assert out[0]["output"] == out[2]["output"]
    assert {r["finish_reason"] for r in out} == {"stop"}


def test_a_schema_gives_parsed_values_and_a_cut_one_is_an_error_row(tmp_path):
    (tmp_path / "in.txt").write_text("Berlin\n")
    schema = {
        "type": "object",
        "properties": {"big": {"type": "boolean"}},
        "required": ["big"],
        "additionalProperties": False,
    }
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    args = ["-i", tmp_path / "in.txt", "--prompt", "Is {{ text }} big?", "--schema", tmp_path / "schema.json"]
    assert batch(*args, "-o", tmp_path / "out.jsonl") == 0
    assert set(rows(tmp_path / "out.jsonl")[0]["output"]) == {"big"}
    assert batch(*args, "-o", tmp_path / "cut.jsonl", "--max-tokens", 2) == 3
    (cut,) = rows(tmp_path / "cut.jsonl")
    assert cut["output"] is None
    assert "cut after 2 tokens, before it was complete" in cut["error"]
    assert "raise --max-tokens" in cut["error"]


def test_several_outputs_are_lists_and_sampling_repeats_itself(tmp_path):
    (tmp_path / "in.txt").write_text("A story.\nA story.\n")
    args = [
        "-i",
        tmp_path / "in.txt",
        "--prompt",
        "{{ text }}",
        "--n",
        2,
        "--temperature",
        1,
        "--max-tokens",
        6,
        "--logprobs",
        1,
    ]
    assert batch(*args, "-o", tmp_path / "a.jsonl") == batch(*args, "-o", tmp_path / "b.jsonl") == 0
    first, second = rows(tmp_path / "a.jsonl")
    assert len(first["output"]) == len(first["finish_reason"]) == len(first["output_tokens"]) == 2
    assert isinstance(first["prompt_tokens"], int)
    assert [len(tokens) for tokens in first["logprobs"]] == first["output_tokens"]
    assert first["output"] != second["output"]  # rows have seeds of their own
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert batch(*args, "-o", tmp_path / "c.jsonl", "--seed", 1) == 0
    assert rows(tmp_path / "c.jsonl")[0]["output"] != first["output"]


def test_long_prompts_follow_the_policy(tmp_path):
    text = " ".join(f"word{i}" for i in range(300))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"t": t}) + "\n" for t in ("short", text)))
    args = ["-i", tmp_path / "in.jsonl", "--prompt", "Sum up: {{ t }}", "--max-model-len", 128, "--max-tokens", 8]
    results = {}
    for policy, code in (("error", 3), ("skip", 0), ("truncate-left", 0), ("truncate-right", 0)):
        assert batch(*args, "-o", tmp_path / f"{policy}.jsonl", "--on-long", policy) == code
        short, results[policy] = rows(tmp_path / f"{policy}.jsonl")
        assert short["error"] is None
    assert "line 2: the prompt has" in results["error"]["error"]
    assert "120 fit" in results["error"]["error"]
    assert (results["skip"]["finish_reason"], results["skip"]["error"], results["skip"]["output"]) == (
        "skipped",
        None,
        None,
    )
    for policy in ("truncate-left", "truncate-right"):
        assert 110 < results[policy]["prompt_tokens"] <= 120
        assert results[policy]["t"] == text  # the column itself stays whole


def test_stdin_goes_to_stdout_in_order(capsysbinary, monkeypatch, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"t": str(i)}) + "\n" for i in range(20)))
    with (tmp_path / "in.jsonl").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert batch("-i", "-", "--format", "jsonl", "-o", "-", "--prompt", "{{ t }}", "--max-tokens", 2) == 0
    out = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
    assert [r["t"] for r in out] == [str(i) for i in range(20)]
    assert [r["error"] for r in out] == [None] * 20


def test_messages_system_and_raw_make_the_prompts_they_say(tmp_path, capsys):
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Bye"},
    ]
    pq.write_table(pa.table({"m": [messages], "who": ["a pirate"]}), tmp_path / "in.parquet")
    source = ["-i", tmp_path / "in.parquet", "--dry-run", "1"]
    assert batch(*source, "--messages-column", "m", "--system", "You are {{ who }}.") == 0
    shown = capsys.readouterr().out
    parts = [
        f"<|im_start|>{r}\n{t}<|im_end|>"
        for r, t in (("system", "You are a pirate."), ("user", "Hi"), ("assistant", "Yes?"), ("user", "Bye"))
    ]
    assert "\n".join(parts) in shown
    assert f"{tmp_path}/in.parquet, row 1: " in shown and " tokens" in shown
    assert batch(*source, "--prompt", "{{ m[0].content }}, {{ who }}", "--raw") == 0
    assert "tokens\nHi, a pirate\n" in capsys.readouterr().out
    assert not (tmp_path / "out.jsonl").exists()
    assert (
        batch("-i", tmp_path / "in.parquet", "-o", tmp_path / "out.jsonl", "--messages-column", "m", "--max-tokens", 2)
        == 0
    )
    assert rows(tmp_path / "out.jsonl")[0]["m"] == messages


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["-i", "words.csv", "-o", "o.jsonl", "--prompt", "{{ txt }}"], 2, "no column `txt`: did you mean `text`?"),
        (["-i", "words.csv", "-o", "o.jsonl", "--prompt", "{{ text"], 2, "--prompt is not a template"),
        (["-i", "words.csv", "-o", "o.jsonl", "--prompt", "{text}"], 2, "a column is written {{ text }}"),
        (["-i", "words.csv", "-o", "o.jsonl"], 2, "no prompt"),
        (["-o", "o.jsonl", "--prompt", "x"], 2, "no input"),
        (["-i", "words.csv", "--prompt", "x"], 2, "no output"),
        (["-i", "none.csv", "-o", "o.jsonl", "--prompt", "x"], 2, "input none.csv does not exist"),
        (["-i", "words.csv", "-o", "o.xlsx", "--prompt", "x"], 2, "supported are .jsonl .csv .parquet"),
        (["-i", "words.csv", "-o", "none/o.jsonl", "--prompt", "x"], 2, "mkdir -p"),
        (["-i", "empty.jsonl", "-o", "o.jsonl", "--prompt", "x"], 1, "no rows in empty.jsonl"),
        (["-i", "header.csv", "-o", "o.jsonl", "--prompt", "x"], 1, "no rows in header.csv"),
        (["-i", "-", "-o", "o.jsonl", "--prompt", "x"], 2, "stdin has no name that tells its format"),
        (["-i", "again.csv", "-o", "o.jsonl", "--prompt", "{{ text }}"], 2, "--output-prefix model_"),
        (["-i", "words.csv", "-o", "words.csv", "--prompt", "x", "--overwrite"], 2, "is the input and the output"),
        (["-i", "words.csv", "-o", "done.jsonl", "--prompt", "x"], 2, "done.jsonl exists"),
        (["-i", "words.csv", "-o", "o.jsonl", "--prompt", "x", "--schema", "nope.json"], 2, "nope.json (No such file"),
        (["-i", "words.csv", "-o", "o.jsonl", "--prompt", "x", "--temperature", "-1"], 2, "`temperature` must be"),
        (["-i", "words.csv", "-o", "o.jsonl", "--promt", "x"], 2, "did you mean --prompt?"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_a_model_is_looked_for(words, tmp_path, capsys, monkeypatch, args, code, message):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "header.csv").write_text("a,b\n")
    (tmp_path / "again.csv").write_text("text,output\nx,y\n")
    (tmp_path / "done.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    before = sorted(p.name for p in tmp_path.iterdir())
    assert run(["batch", "no-such-model", *args]) == code
    assert message in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_column_that_only_some_json_rows_lack_is_their_own_error(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"txt": "a"}\n{"text": "b"}\n{"text": "c", "output": 1}\n')
    assert (
        batch("-i", tmp_path / "in.jsonl", "-o", tmp_path / "o.jsonl", "--prompt", "{{ text }}", "--max-tokens", 2) == 2
    )
    (tmp_path / "in.jsonl").write_text('{"txt": "a"}\n' + '{"text": "b"}\n' * 30 + '{"text": "c", "output": 1}\n')
    assert (
        batch("-i", tmp_path / "in.jsonl", "-o", tmp_path / "o.jsonl", "--prompt", "{{ text }}", "--max-tokens", 2) == 3
    )
    first, *rest, last = rows(tmp_path / "o.jsonl")
    assert "line 1: no column `text`: did you mean `txt`?" in first["error"]
    assert {r["error"] for r in rest} == {None}
    assert "line 32: the input has a column named output" in last["error"]
    assert (last["text"], last["output"]) == ("c", None)


def test_a_grammar_that_cannot_be_compiled_fails_the_job_and_not_every_row(words, tmp_path, capsys):
    assert batch("-i", words, "-o", tmp_path / "o.jsonl", "--prompt", "x", "--regex", "(") == 1
    assert "regex" in capsys.readouterr().err
    assert not list(tmp_path.glob("*o.jsonl*"))


def test_the_summary_is_json_for_programs(words, tmp_path, capsys):
    args = ["-i", words, "--prompt", "{{ text }}", "--max-tokens", 2, "--json", "-q", "--output-prefix", "m_"]
    assert batch(*args, "-o", tmp_path / "o.csv") == 3
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert (summary["rows"], summary["failed"], summary["finished"]) == (4, 1, True)
    assert summary["output_tokens"] > 0
    assert err == ""
    with (tmp_path / "o.csv").open(newline="") as file:
        assert list(next(csv.DictReader(file))) == ["id", "text", *(f"m_{c}" for c in ADDED)]


# Processes that end before their work does


@pytest.fixture
def story(tmp_path: Path) -> Path:
    path = tmp_path / "story.jsonl"
    path.write_text("".join(json.dumps({"id": i, "text": f"Tell me about the number {i}."}) + "\n" for i in range(20)))
    return path


def story_args(story: Path, out: Path) -> list[str]:
    prompt = ["--prompt", "{{ text }}", "--temperature", "1", "--max-tokens", "10"]
    return ["batch", MODEL, "-i", str(story), "-o", str(out), *prompt, *SMALL]


@contextlib.contextmanager
def process(args: list[str], **options: object) -> Iterator[subprocess.Popen]:
    # The real command, except that finished rows are saved after every step rather than every two seconds: however
    # fast the machine, there is a moment at which some rows are saved and others aren't.
    code = "import anyrig.batch.sink as sink; sink.JOURNAL_SECONDS = 0; from anyrig.cli.main import main; main()"
    child = subprocess.Popen([sys.executable, "-c", code, *args], stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def saved(work: Path) -> int:
    """Rows that the job has on disk."""
    kept = 0
    with contextlib.suppress(FileNotFoundError):
        kept += sum(p.read_bytes().count(b"\n") for p in (work / "journal").iterdir())
        kept += sum(r["tally"]["rows"] for r in rows(work / "ledger.jsonl"))
    return kept


def wait_until(condition, child: subprocess.Popen) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert child.poll() is None, child.stderr and child.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.05)


def test_after_kill_9_the_same_command_goes_on_and_the_output_is_that_of_an_undisturbed_run(story, tmp_path, capsys):
    out, work = tmp_path / "out.jsonl", tmp_path / ".out.jsonl.anyrig"
    with process(story_args(story, out)) as child:
        wait_until(lambda: saved(work) >= 8, child)
        child.kill()
    kept = saved(work)
    assert not out.exists()
    changed = story_args(story, out)
    changed[changed.index("{{ text }}")] = "Other: {{ text }}"
    assert run(changed) == 2
    assert "was begun with another prompt ('{{ text }}', now 'Other: {{ text }}')" in capsys.readouterr().err
    assert run([*story_args(story, out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows_done_earlier"] == kept
    assert not work.exists()
    assert run(story_args(story, tmp_path / "undisturbed.jsonl")) == 0
    assert out.read_bytes() == (tmp_path / "undisturbed.jsonl").read_bytes()
    assert [r["id"] for r in rows(out)] == list(range(20))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_lets_running_rows_finish_and_says_how_to_go_on(story, tmp_path, number):
    out, work = tmp_path / "out.jsonl", tmp_path / ".out.jsonl.anyrig"
    with process(story_args(story, out)) as child:
        wait_until(lambda: saved(work) >= 1, child)
        child.send_signal(number)
        said = child.communicate(timeout=60)[1]
        assert child.returncode == 130, said
    assert "the same command goes on from here" in said
    assert not out.exists()
    kept = saved(work)
    assert kept >= 1
    assert f"{kept} rows" in said


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[tuple[Path, dict, Callable[[], None]]]:
    """A directory on a disk with 12 kB of room, what a process on it needs, and what makes room.

    Where nothing can be mounted, a limit on the size of files stands in for the disk's end.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk]
    if os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0:
        (disk / "filler").write_bytes(bytes(13 * 4096))
        yield disk, {}, lambda: (disk / "filler").unlink()
        subprocess.run(["umount", disk], check=True)
    else:
        yield disk, {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))}, lambda: None


def test_a_full_disk_ends_the_run_with_its_name_and_loses_nothing_that_was_saved(story, full_disk, capsys):
    disk, limits, make_room = full_disk
    out = disk / "out.jsonl"
    with process(story_args(story, out), **limits) as child:
        said = child.communicate(timeout=200)[1]
        assert child.returncode == 1, said
    assert "while writing" in said and f"{disk}/" in said
    assert "MB free" in said and "run the same command again" in said
    assert not out.exists()
    kept = saved(disk / ".out.jsonl.anyrig")
    make_room()
    assert run([*story_args(story, out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows_done_earlier"] == kept > 0
    assert [r["id"] for r in rows(out)] == list(range(20))
