"""MODEL as users type it, right and wrong, and a model hub that answers on this machine."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from anyrig.core.errors import ModelError
from anyrig.models.load import load_random
from anyrig.models.locate import resolve


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model directory: a tiny Llama with the default model's tokenizer."""
    import torch

    path = tmp_path_factory.mktemp("small") / "small"
    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 49152,
    }
    model: Any = load_random(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    source = resolve("smollm2-135m").path
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, path)
    return path


@pytest.fixture
def copy(small: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small, tmp_path / "copy"))


def test_a_directory_is_taken_as_it_is(small: Path) -> None:
    found = resolve(str(small))
    assert (found.name, found.path) == ("small", small)


def test_a_known_name_wins_over_a_directory_unless_written_as_a_path(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(small, "smollm2-135m")
    assert resolve("smollm2-135m").path.is_absolute()
    assert resolve("./smollm2-135m").path == Path("smollm2-135m")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("", "No model was given.*known name"),
        ("smolm2-135m", "Unknown model: 'smolm2-135m': did you mean smollm2-135m[?].*directory or a .gguf file"),
        ("completely-else", "Unknown model: 'completely-else': MODEL is a known name"),
        ("/no/such/dir", "No such file or directory: /no/such/dir"),
        ("./nothing", "No such file or directory"),
        ("missing.gguf", "No such file or directory: missing.gguf"),
    ],
)
def test_what_is_not_there_is_told_with_what_could_be(model: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve(model)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    with pytest.raises(ModelError, match=r"model\.onnx is a file, but not a \.gguf"):
        resolve(str(tmp_path / "model.onnx"))
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" + b"\0" * 100)
    with pytest.raises(ModelError, match=r"x\.gguf is not a GGUF file"):
        resolve(str(tmp_path / "x.gguf"))


def test_a_directory_lacking_something_is_told_what(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer.*AutoTokenizer"):
        resolve(str(copy))
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no weights \(\*\.safetensors\)"):
        resolve(str(copy))
    (copy / "config.json").write_text("{not json")
    with pytest.raises(ModelError, match=r"Cannot read .*config\.json"):
        resolve(str(copy))
    (copy / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve(str(copy))
    (copy / "weights.gguf").touch()
    with pytest.raises(ModelError, match=r"give the file itself: .*weights\.gguf"):
        resolve(str(copy))


def test_truncated_safetensors_are_found_before_anything_is_loaded(copy: Path) -> None:
    data = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(data[:-10])
    with pytest.raises(ModelError, match=f"cut short: {len(data) - 10:,} bytes, expected {len(data):,}"):
        resolve(str(copy))


class Hub(BaseHTTPRequestHandler):
    """The part of a model hub that `snapshot_download` uses: a repository's file list, and its files."""

    commit = "0123456789abcdef0123456789abcdef01234567"
    root: Path
    asked: list[str]

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/gated"):
            self.send(403, b"{}", {"X-Error-Code": "GatedRepo"}, body)
        elif path.startswith("/api/models/org/small/revision/") or path == "/api/models/org/small":
            files = [{"rfilename": file.name} for file in sorted(self.root.iterdir())]
            listing = {"_id": "1", "id": "org/small", "sha": self.commit, "siblings": files, "private": False}
            self.send(200, json.dumps(listing).encode(), {"Content-Type": "application/json"}, body)
        elif path.startswith("/api/models/org/small/tree/"):
            entries = [
                {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0" * 40}
                for f in sorted(self.root.iterdir())
            ]
            self.send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"}, body)
        elif path.startswith("/org/small/resolve/") and (file := self.root / path.rsplit("/", 1)[1]).is_file():
            data = file.read_bytes()
            if body:
                self.asked.append(file.name)
            etag = hashlib.sha256(data).hexdigest()
            self.send(200, data, {"X-Repo-Commit": self.commit, "ETag": f'"{etag}"'}, body)
        else:
            self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

    def send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(copy: Path) -> Iterator[str]:
    (copy / "pytorch_model.bin").write_bytes(b"a pickle")
    (copy / "photo.png").write_bytes(b"a picture")
    Hub.root, Hub.asked = copy, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def pull(model: str, home: Path, **env: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", "from anyrig.cli.main import main; main()", "pull", model],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HF_HOME": str(home), "ANYRIG_HOME": str(home / "anyrig"), "HF_HUB_OFFLINE": "0", **env},
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout.strip(), done.stderr


def test_a_hub_id_is_fetched_once_and_only_what_is_needed(hub: str, tmp_path: Path) -> None:
    code, out, err = pull("org/small", tmp_path / "hf", HF_ENDPOINT=hub)
    assert (code, "fetching org/small" in err) == (0, True), err
    assert sorted(Hub.asked) == sorted(p.name for p in Path(out).iterdir())
    assert "model.safetensors" in Hub.asked
    assert not {"pytorch_model.bin", "photo.png"} & set(Hub.asked)
    # From here on the cache is enough, with a dead hub or when told to be offline.
    assert pull("org/small", tmp_path / "hf", HF_ENDPOINT="http://127.0.0.1:9") == (0, out, "")
    assert pull("org/small", tmp_path / "hf", HF_HUB_OFFLINE="1") == (0, out, "")


@pytest.mark.parametrize(
    ("model", "env", "message"),
    [
        ("org/other", {}, "The hub knows no model org/other"),
        ("org/gated", {}, "org/gated is gated"),
        ("org/small", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "Cannot fetch org/small from the hub"),
        ("org/small", {"HF_HUB_OFFLINE": "1"}, "org/small is not whole in the hub cache, and fetching is off"),
    ],
)
def test_a_hub_id_that_cannot_be_had(hub: str, tmp_path: Path, model: str, env: dict[str, str], message: str) -> None:
    code, out, err = pull(model, tmp_path / "hf", **{"HF_ENDPOINT": hub, **env})
    assert (code, out) == (1, "")
    assert message in err


def test_a_hub_model_with_pickles_only_is_refused(hub: str, copy: Path, tmp_path: Path) -> None:
    (copy / "model.safetensors").unlink()
    code, _, err = pull("org/small", tmp_path / "hf", HF_ENDPOINT=hub)
    assert code == 1
    assert "org/small has no safetensors" in err
    assert "pickle" in err
    assert "pytorch_model.bin" not in Hub.asked
