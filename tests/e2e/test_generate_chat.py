"""`anyrig generate` and `anyrig chat` with the real engine and the real model, as a person or a program uses them."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anyrig import LLM, SamplingParams
from anyrig.cli.main import run
from anyrig.core import env
from anyrig.core.config import EngineConfig
from anyrig.models.locate import resolve

MODEL = "smollm2-135m"
QUESTION = "Name three colours."
QUICK = ["--temperature", "0", "--max-tokens", "12"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, config=EngineConfig(max_model_len=1024, threads=1))


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ANYRIG_MAX_MODEL_LEN", "1024")
    monkeypatch.setenv("ANYRIG_THREADS", "1")
    monkeypatch.chdir(tmp_path)


def rows(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))


def test_generate_says_what_the_python_interface_says(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    [expected] = llm.chat([messages], SamplingParams(temperature=0, max_tokens=12))
    assert run(["generate", MODEL, QUESTION, *QUICK]) == 0
    shown = capsys.readouterr()
    assert shown.out == expected.outputs[0].text + "\n"
    assert re.search(r"prompt tokens · 12 output tokens · first after [\d.]+ s · [\d.]+ tokens/s", shown.err)
    assert MODEL in shown.err.splitlines()[-1], "the last line says what ran"


def test_json_has_the_shape_of_a_request_output_in_the_order_of_the_prompts(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["generate", MODEL, "Once upon", "-p", "The capital of France is", "-p", "1 2 3", "--raw", "--json", "-q"]
    assert run([*line, "--temperature", "0", "--max-tokens", "5", "--logprobs", "2"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    got = [json.loads(text) for text in shown.out.splitlines()]
    assert [row["prompt"] for row in got] == ["Once upon", "The capital of France is", "1 2 3"]
    assert [row["prompt_token_ids"] for row in got] == [llm.engine.tokenizer.encode(row["prompt"]) for row in got]
    for row in got:
        [completion] = row["outputs"]
        assert len(completion["token_ids"]) == 5 == len(completion["logprobs"])
        assert completion["finish_reason"] == "length"
        assert completion["text"] == llm.engine.tokenizer.decode(completion["token_ids"])
        assert row["usage"]["prompt_tokens"] == len(row["prompt_token_ids"])
        assert row["usage"]["output_tokens"] == 5
    assert "Paris" in got[1]["outputs"][0]["text"]


def test_the_prompt_may_come_from_stdin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pipe(monkeypatch, "The capital of France is\n")
    assert run(["generate", MODEL, "--raw", "--json", *QUICK]) == 0
    [row] = rows(capsys)
    assert row["prompt"] == "The capital of France is"


def test_a_seed_makes_sampling_repeatable(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        assert run(["generate", MODEL, QUESTION, "--seed", seed, "--max-tokens", "16", "-q", "--n", "2"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_choices_bind_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", MODEL, "Is snow white?", "--choices", "yes,no", "-q"]) == 0
    assert capsys.readouterr().out in ("yes\n", "no\n")


def test_a_prompt_longer_than_the_context_is_an_error_with_both_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", MODEL, "word " * 2000, "--raw"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "1024" in error and "Traceback" not in error


@pytest.fixture(scope="module")
def without_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a base model: the same files, no chat template."""
    directory = tmp_path_factory.mktemp("base")
    for file in resolve(MODEL).path.iterdir():
        if file.name == "tokenizer_config.json":
            config = json.loads(file.read_text())
            config.pop("chat_template", None)
            (directory / file.name).write_text(json.dumps(config))
        elif file.name != "chat_template.jinja":
            (directory / file.name).symlink_to(file)
    return directory


def test_a_model_without_chat_template_gets_the_prompt_as_it_is(
    without_template: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", str(without_template), "Once upon", "--json", *QUICK]) == 0
    [row] = rows(capsys)
    assert row["prompt_token_ids"] == llm.engine.tokenizer.encode("Once upon")


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (["generate", "--chat", "hello"], 2, "has no chat template"),
        (["generate", "--system", "Be brief.", "hello"], 2, "`--system` needs the chat template"),
        (["chat"], 1, "has no chat template"),
    ],
)
def test_what_needs_a_chat_template_says_so(
    line: list[str], code: int, message: str, without_template: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([line[0], str(without_template), *line[1:]]) == code
    assert message in capsys.readouterr().err


def test_piped_turns_are_answered_in_turn_and_remembered(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pipe(monkeypatch, f"{QUESTION}\n/set temprature 1\n/save talk.json\nAnd one more?\n/retry\n/save more.jsonl\n")
    assert run(["chat", MODEL, "--system", "Be brief.", *QUICK]) == 1, "the mistyped command counts as a failure"
    shown = capsys.readouterr()
    assert "error: no parameter `temprature`" in shown.err and "did you mean `temperature`" in shown.err
    first = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [m["role"] for m in first] == ["system", "user", "assistant"]
    [expected] = llm.chat([first[:2]], SamplingParams(temperature=0, max_tokens=12))
    assert first[2]["content"] == expected.outputs[0].text
    whole = json.loads((tmp_path / "more.jsonl").read_text())["messages"]
    assert whole[:3] == first and [m["role"] for m in whole[3:]] == ["user", "assistant"], "retry replaces an answer"
    assert shown.out == f"{first[2]['content']}\n{whole[4]['content']}\n{whole[4]['content']}\n"


def test_a_long_conversation_leaves_out_its_oldest_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("ANYRIG_MAX_MODEL_LEN", "256")
    old = {"role": "user", "content": "word " * 60}
    (tmp_path / "old.json").write_text(json.dumps([old, {"role": "assistant", "content": "Yes."}] * 4))
    pipe(monkeypatch, f"{QUESTION}\n")
    assert run(["chat", MODEL, "--load", "old.json", "--system", "Be brief.", *QUICK]) == 0
    shown = capsys.readouterr()
    assert re.search(r"the oldest (turn was|\d turns were) left out", shown.err)
    assert shown.out.strip()


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, *line: str) -> None:
        environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a suite that runs in the background has it ignored
            os.execvpe(sys.executable, [sys.executable, "-m", "anyrig", *line], environ)
        self.screen = ""

    def wait_for(self, pattern: str, seconds: float = 120) -> str:
        """Read until the pattern appears in what came since the last wait; returns the text up to its end."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.screen)):
            assert time.monotonic() < deadline, f"{pattern!r} did not appear in: {self.screen!r}"
            if select.select([self.fd], [], [], 1)[0]:
                self.screen += os.read(self.fd, 65536).decode(errors="replace")
        before, self.screen = self.screen[: found.end()], self.screen[found.end() :]
        return before

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def end(self) -> int:
        while True:
            try:
                if not os.read(self.fd, 65536):
                    break
            except OSError:  # Linux reports the end of a pseudo-terminal this way
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Terminal]:
    home = tmp_path / "home"  # the same models, but another history of typed lines than the user's own
    home.mkdir()
    (home / "models").symlink_to(env.home() / "models")
    monkeypatch.setenv("ANYRIG_HOME", str(home))
    terminal = Terminal("chat", MODEL, "--temperature", "0", "--ignore-eos")
    yield terminal
    os.close(terminal.fd)


def test_a_person_can_stop_an_answer_and_go_on(terminal: Terminal, tmp_path: Path) -> None:
    terminal.wait_for("Ctrl-D leaves")
    terminal.wait_for("> ")
    terminal.type("Write a long story.\n")
    terminal.wait_for(r"\w+ \w+ \w+ \w+ \w+")  # the answer has begun
    terminal.type("\x03")
    assert "stopped" in terminal.wait_for(r"stopped")
    terminal.wait_for("> ")
    terminal.type("/save said.json\n")
    terminal.wait_for("saved 2 messages")
    said = json.loads((tmp_path / "said.json").read_text())["messages"][1]["content"]
    assert len(said.split()) >= 3, "what was said before Ctrl-C stays"
    terminal.type("/set max_tokens 5\n")
    terminal.wait_for("max_tokens = 5")
    terminal.type("And then?\n")
    terminal.wait_for(r"5 tokens · .*context \d+/1024 · cut at its longest")
    terminal.wait_for("> ")
    time.sleep(0.5)
    terminal.type("\x04")
    assert terminal.end() == 0
    history = tmp_path / "home" / "chat_history"
    assert "Write a long story." in history.read_text() and history.stat().st_mode & 0o077 == 0


def test_ctrl_c_twice_leaves(terminal: Terminal) -> None:
    terminal.wait_for("Ctrl-D leaves")
    for answer in ("Ctrl-C again", ""):
        terminal.wait_for("> ")
        time.sleep(0.5)  # readline notices a signal only once it waits for a key
        terminal.type("\x03")
        terminal.wait_for(answer)
    assert terminal.end() == 130


def test_an_interrupted_generate_keeps_what_there_is(tmp_path: Path) -> None:
    line = ["generate", MODEL, QUESTION, "--stream", "--ignore-eos", "--max-tokens", "900", "--temperature", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "anyrig", *line], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    first = process.stdout.read(8)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert first.strip() and rest.endswith("\n")
    assert "output tokens" in err and "Traceback" not in err
