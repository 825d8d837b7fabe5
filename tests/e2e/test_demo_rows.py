"""The demo: where its rows come from, how it counts, and that it runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import demo  # noqa: E402
import demo_report as report  # noqa: E402
from demo_rows import TOPICS, NoSources, collect, first_sentence, split  # noqa: E402


def package(folder: Path, docstrings: dict[str, list[str]]) -> Path:
    """A library with one module per topic."""
    for topic, texts in docstrings.items():
        lines = [f"def f{i}():\n    {text!r}\n" for i, text in enumerate(texts)]
        (folder / f"{TOPICS[topic][0]}.py").write_text("\n".join(lines))
    return folder


def test_this_python_gives_enough_rows_and_none_is_used_twice():
    data = split(demo.DEVELOPMENT, demo.ROWS)
    texts = [d.text for d in data.development + data.rows]
    assert len(data.rows) >= 300
    assert len(set(texts)) == len(texts)
    counts = [sum(d.topic == topic for d in data.rows) for topic in TOPICS]
    assert max(counts) == demo.ROWS and max(counts) / len(data.rows) < 0.25


def test_the_same_rows_come_every_time():
    assert split(10, 10) == split(10, 10)


def test_more_rows_of_a_topic_leave_the_others_in_their_order(tmp_path):
    texts = [f"Return number {i} of the list." for i in range(50)]
    few = collect(package(tmp_path, {"dates": texts[:40]}))["dates"]
    many = collect(package(tmp_path, {"dates": texts}))["dates"]
    assert [d for d in many if d in few] == few


def test_a_sentence_said_in_two_places_is_taken_once(tmp_path):
    found = collect(package(tmp_path, {"dates": ["Close the thing for good."], "email": ["Close the thing for good."]}))
    assert [d.topic for docs in found.values() for d in docs] == ["dates"]


def test_private_things_and_test_folders_are_left_out(tmp_path):
    (tmp_path / "email" / "test").mkdir(parents=True)
    (tmp_path / "email" / "test" / "a.py").write_text("def f():\n    'Return what a test needs.'\n")
    (tmp_path / "email" / "b.py").write_text(
        "class Box:\n    'Hold a number of messages.'\n"
        "    def _hidden(self):\n        'Not for anybody to see.'\n"
        "    async def fetch(self):\n        'Fetch the next message.'\n"
    )
    assert {d.id: d.name for d in collect(tmp_path)["email"]} == {"email.b.Box": "Box", "email.b.Box.fetch": "fetch"}


@pytest.mark.parametrize(
    "docstring, text",
    [
        ("Return the mean of data. Then more.", "Return the mean of data."),
        ("Return the\n    mean of data\n\n    More.", "Return the mean of data"),
        ("Return a new :class:`~email.message.Message` object.", "Return a new email.message.Message object."),
        ("Too short.", None),
        ("word " * 31, None),
        ("Return the naïve mean of data.", None),
        ("Print it with >>> before it.", None),
    ],
)
def test_first_sentence(docstring, text):
    assert first_sentence(docstring) == text


def test_a_library_without_sources_is_named(tmp_path):
    with pytest.raises(NoSources, match=rf"{tmp_path} has 0 usable docstrings about dates, 30 are needed"):
        split(10, 5, tmp_path)


def scores(*rows: dict[str, float | None]) -> list[dict]:
    return [
        {
            "error": None,
            "logprobs": [{"top": [{"token": t, "token_id": len(t), "logprob": v} for t, v in row.items()]}],
        }
        for row in rows
    ]


def test_bias_levels_the_topics_and_rules_out_half_words(monkeypatch):
    monkeypatch.setattr(demo, "TOPICS", {"a": (), "bb": ()})
    bias = demo.balancing_bias(scores({"a": -1.0, "bb": -3.0, "bbb": -2.0}, {"a": -3.0, "bb": -5.0, "other": None}))
    assert bias == {1: -1.0, 2: 1.0, 3: demo.NEVER}


def test_a_topic_of_several_tokens_cannot_be_calibrated(monkeypatch):
    monkeypatch.setattr(demo, "TOPICS", {"a": (), "bb": ()})
    with pytest.raises(demo.DemoError, match="no single token for bb"):
        demo.balancing_bias(scores({"a": -1.0, "b": -1.0}))


@pytest.mark.parametrize(
    "made, real, same",
    [
        ("is_leap_year", "isleap", False),
        ("is_leap_year", "isLeap", True),
        ("HTTPServer", "http", True),
        ("", "x", False),
    ],
)
def test_names_are_alike_when_they_share_a_word(made, real, same):
    assert report.alike(made, real) is same


def test_guessing_is_measured_on_the_same_rows():
    rows = [{"topic": t, "label_output": "dates"} for t in ("dates", "dates", "files", "email")]
    assert report.majority(rows) == report.accuracy(rows) == 0.5
    assert report.chance([("get_a", "a"), ("get_b", "b"), ("get_a", "get_c")]) == pytest.approx(3 / 6)


def test_an_output_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, EXAMPLES / "demo.py", "--out", tmp_path / "file"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "can't write" in done.stdout and "Traceback" not in done.stderr


def test_the_demo_labels_better_than_guessing_and_shows_what_it_ran(tmp_path, monkeypatch):
    monkeypatch.setenv("ANYRIG_KV_CACHE_MEMORY", "256MB")
    for stale in ("labels.jsonl", "results.jsonl"):  # of an earlier run
        (tmp_path / stale).write_text("{}\n")
    done = subprocess.run(
        [sys.executable, EXAMPLES / "demo.py", "--out", tmp_path, "--rows", "4"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"-m anyrig batch {demo.MODEL} -i") == 4  # three that were run, one to try next
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(rows) == 4 * len(TOPICS) and all(row["name_output"] for row in rows)
    assert report.accuracy(rows) > 0.5 > 0.3 > report.majority(rows)
