"""Prepared files: mapped when they are right, made anew when they are not, and never needed."""

import errno
import hashlib
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from anyrig.core.decoder import BlockSpec, DecoderSpec, Rope
from anyrig.core.spec import LayerSpec
from anyrig.models import cache, prepared, prepared_key
from anyrig.models.prepared import Prepared
from anyrig.models.prepared_key import Key

KEY = Key("mine", "0123456789abcdef", "int8", 0, False, layout=3)
ANYRIG = [sys.executable, "-c", "from anyrig.cli.main import main; main()"]


def spec(layers: int = 2) -> DecoderSpec:
    attention = LayerSpec(0, "layers.0", heads=4, kv_heads=2, dim=16, v_dim=16, scaling=0.25, window=20, kv_source=0)
    rope = Rope(tuple(1 / 10000 ** (i / 8) for i in range(8)), scaling=1.1)
    return DecoderSpec(
        vocab_size=160,
        hidden=64,
        eps=1e-6,
        kind="int8",
        layers=tuple(
            BlockSpec(replace(attention, index=i), 0, 72, "silu", ("q_norm", "qkv_bias")) for i in range(layers)
        ),
        ropes=(rope,),
        tied=True,
        final_softcap=30.0,
    )


def packed_size(kind: str, rows: int, columns: int, group: int, minimum: bool) -> int:
    return rows * columns + 4 * rows


def content(name: str, size: int) -> np.ndarray:
    return np.random.default_rng(len(name) + sum(name.encode())).integers(0, 256, size, np.uint8)


def make(key: Key, description: DecoderSpec | None = None) -> Prepared:
    with prepared.create(key, description or spec(), packed_size) as writer:
        for name in writer.spec.matrices():
            view = writer.matrix(name)
            view[:] = content(name, view.size)
            del view
            writer.release(name)
        for name, length in writer.spec.vectors().items():
            writer.vector(name, content(name, length).astype(np.float32))
        return writer.commit()


def is_whole(found: Prepared | None, description: DecoderSpec | None = None) -> bool:
    if found is None:
        return False
    description = description or spec()
    assert found.spec == description
    assert found.matrices.keys() == description.matrices().keys()
    assert all((view == content(name, view.size)).all() for name, view in found.matrices.items())
    assert found.vectors.keys() == description.vectors().keys()
    assert all((v == content(n, v.size).astype(np.float32)).all() for n, v in found.vectors.items())
    return True


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANYRIG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "home"


def test_what_was_written_is_found_again(home: Path) -> None:
    assert prepared.find(KEY) is None
    made = make(KEY)
    assert is_whole(made)
    assert made.path == KEY.path
    assert KEY.path.parent == home / "prepared"
    found = prepared.find(KEY)
    assert is_whole(found)
    assert found is not None
    assert found.bytes == sum(m.nbytes for m in found.matrices.values()) + sum(v.nbytes for v in found.vectors.values())
    with pytest.raises(ValueError, match="read-only"):
        found.matrices["head"][0] = 1
    # Aligned for the kernels, and as large as it says.
    assert all(m.ctypes.data % 4096 == 0 for m in found.matrices.values())
    assert [f.name for f in KEY.path.parent.iterdir() if f.is_file()] == [KEY.path.name]
    # The mapping lives as long as one of its arrays does, whatever becomes of the file.
    head = found.matrices["head"]
    KEY.path.unlink()
    del found, made
    assert (head == content("head", head.size)).all()


@pytest.mark.parametrize(
    "other",
    [
        {"version": "f" * 16},
        {"kind": "int4"},
        {"group": 32},
        {"minimum": True},
        {"layout": 4},
        {"length": 8192},
        {"anyrig": "9.9"},
        {"description": prepared_key.DESCRIPTION + 1},
        {"transformers": "9.9"},
        {"model": "yours"},
    ],
    ids=lambda o: next(iter(o)),
)
def test_another_key_finds_nothing_and_notices_a_file_in_its_place(
    other: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    make(KEY)
    key = replace(KEY, **other)  # type: ignore[arg-type]
    assert key.path != KEY.path
    assert prepared.find(key) is None
    assert not caplog.records
    shutil.copy(KEY.path, key.path)
    assert prepared.find(key) is None
    assert [r.getMessage() for r in caplog.records] == [f"{key.path} is made anew: it was made from something else"]


def test_a_file_that_is_cut_short_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    make(KEY)
    whole = KEY.path.read_bytes()
    for size in (0, 7, 47, 48, 100, 4096, len(whole) // 2, len(whole) - 1):
        KEY.path.write_bytes(whole[:size])
        caplog.clear()
        assert prepared.find(KEY) is None, size
        assert len(caplog.records) == 1, size
    KEY.path.write_bytes(whole + b"x")
    assert prepared.find(KEY) is None
    KEY.path.write_bytes(whole)
    assert is_whole(prepared.find(KEY))


def test_any_flipped_byte_of_the_header_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    make(KEY)
    whole = bytearray(KEY.path.read_bytes())
    length = int.from_bytes(whole[8:16], "little")
    for at in [*range(48), *range(48, 48 + length, 97), 48 + length - 1]:
        broken = bytearray(whole)
        broken[at] ^= 0x40
        KEY.path.write_bytes(broken)
        caplog.clear()
        assert prepared.find(KEY) is None, at
        assert len(caplog.records) == 1, at
    # And it is made anew in the same place.
    with prepared.exclusive(KEY) as found:
        assert found is None
        make(KEY)
    assert is_whole(prepared.find(KEY))


def test_foreign_files_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    prepared_key.directory().mkdir(parents=True)
    KEY.path.write_bytes(b"GGUF" + os.urandom(5000))
    assert prepared.find(KEY) is None
    assert "not a prepared model" in caplog.text
    KEY.path.unlink()
    KEY.path.mkdir()
    assert prepared.find(KEY) is None


def test_an_unfinished_file_leaves_nothing(home: Path) -> None:
    with pytest.raises(KeyError), prepared.create(KEY, spec(), packed_size) as writer:
        writer.matrix("head")[:] = 1
        raise KeyError("interrupted")
    assert prepared.find(KEY) is None
    assert not list((home / "prepared").glob("*"))
    # One of a process that was killed goes when the next one prepares the same.
    left = home / "prepared" / f".new-{KEY.path.stem}-00000000"
    left.touch()
    with prepared.exclusive(KEY):
        assert not left.exists()


def test_wrong_tensors_are_refused() -> None:
    with prepared.create(KEY, spec(), packed_size) as writer:
        with pytest.raises(ValueError, match=r"final_norm is float64\[64\]"):
            writer.vector("final_norm", np.zeros(64))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"float32\[65\]"):
            writer.vector("final_norm", np.zeros(65, np.float32))
        with pytest.raises(KeyError):
            writer.matrix("embed")
        with pytest.raises(ValueError, match="final_norm is float32, not packed"):
            writer.matrix("final_norm")


WORKER = """
import sys, time
sys.path.insert(0, {root!r})
from anyrig.models import prepared
from tests.models.test_prepared import KEY, is_whole, make
print("ready", flush=True)
sys.stdin.readline()
found = prepared.find(KEY)
if found is None:
    with prepared.exclusive(KEY, lambda text: print(text, flush=True)) as found:
        if found is None:
            time.sleep(1)
            found = make(KEY)
            print("made", flush=True)
print(is_whole(found))
"""


def test_three_processes_prepare_at_once_and_one_does_the_work(home: Path) -> None:
    program = WORKER.format(root=str(Path(__file__).parents[2]))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outs = [process.communicate(timeout=120)[0].splitlines() for process in processes]
    assert all(out[-1] == "True" for out in outs), outs
    assert sum("made" in out for out in outs) == 1
    waited = "another process is preparing mine: waiting for it"
    assert sum(waited in out for out in outs) == 2
    assert [f.name for f in (home / "prepared").iterdir() if f.is_file()] == [KEY.path.name]


def check_memory_only(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    caplog.clear()
    found = make(KEY)
    assert is_whole(found)
    assert found.path is None
    assert [(r.levelno, reason in r.getMessage()) for r in caplog.records] == [(logging.WARNING, True)]
    assert prepared.find(KEY) is None


def test_a_limit_on_file_sizes_only_costs_the_speed_up(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, before[1]))
    try:
        check_memory_only(caplog, os.strerror(errno.EFBIG))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [f for f in (home / "prepared").iterdir() if f.is_file()]


@pytest.fixture
def small_disk(home: Path) -> Iterator[Path]:
    home.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(home)], capture_output=True).returncode:
        pytest.skip("may not mount a small disk")
    yield home
    subprocess.run(["umount", "-l", str(home)], check=True)


def test_a_full_disk_only_costs_the_speed_up(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_memory_only(caplog, os.strerror(errno.ENOSPC))
    assert not [f for f in (small_disk / "prepared").iterdir() if f.is_file()]


@pytest.mark.parametrize("kind", ["a file in its place", "read-only"])
def test_a_home_that_cannot_be_written_only_costs_the_speed_up(
    kind: str, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "read-only":
        home.mkdir()
        if os.geteuid() == 0:  # permissions do not bind root, a read-only file system does
            mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(home)], capture_output=True)
            if mounted.returncode:
                pytest.skip("may not mount a read-only disk")
        else:
            home.chmod(0o500)
    else:
        home.write_text("no directory")
    try:
        with prepared.exclusive(KEY) as found:
            assert found is None
            check_memory_only(caplog, "is not kept for the next start")
    finally:
        if kind == "read-only" and os.geteuid() == 0:
            subprocess.run(["umount", "-l", str(home)], check=True)


@pytest.mark.parametrize(
    "software",
    [{"layout": 4}, {"anyrig": "9.9"}, {"description": prepared_key.DESCRIPTION + 1}, {"transformers": "9.9"}],
    ids=lambda s: next(iter(s)),
)
def test_an_update_replaces_the_files_of_its_kind(software: dict[str, object]) -> None:
    others = [
        replace(KEY, kind="int4", group=32),
        replace(KEY, model="mine-too"),
        replace(KEY, length=8192),
        replace(KEY, version="f" * 16),
    ]
    for key in (KEY, *others):
        make(key)
    new = replace(KEY, **software)  # type: ignore[arg-type]
    mapped = prepared.find(KEY)
    make(new)
    assert not KEY.path.exists()
    assert all(key.path.exists() for key in (new, *others))
    assert is_whole(mapped)  # who runs it goes on


def test_a_file_of_before_the_key_had_all_its_parts_goes() -> None:
    make(KEY)
    # As an older version of ours wrote it.
    raw = KEY.path.read_bytes()
    length = int.from_bytes(raw[8:16], "little")
    header = json.loads(raw[48 : 48 + length])
    del header["key"]["description"], header["key"]["transformers"]
    text = json.dumps(header).encode()
    old = KEY.path.with_name("mine-int8-before.anyrig")
    whole = raw[:8] + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text
    old.write_bytes(whole.ljust(len(raw) - header["bytes"], b"\0") + raw[len(raw) - header["bytes"] :])
    assert sorted(f.kind or "" for f in prepared.prepared_files()) == ["int8", "int8"]
    make(KEY)
    assert not old.exists()


def test_other_files_of_a_model_go_when_nobody_has_used_them_for_a_month() -> None:
    """Two revisions, or two lengths of a rope that depends on it, in turn: each is prepared once."""
    revision, longer = replace(KEY, version="f" * 16), replace(KEY, length=8192)
    for key in (KEY, revision, longer, KEY, revision):
        make(key)
        assert all(is_whole(prepared.find(k)) for k in (KEY, revision) if k.path.exists())
    assert all(key.path.exists() for key in (KEY, revision, longer))
    month = time.time() - 31 * 24 * 3600
    os.utime(KEY.path, (month, month))
    assert is_whole(prepared.find(KEY))  # used
    make(revision)
    assert KEY.path.exists()
    for key in (KEY, longer):
        os.utime(key.path, (month, month))
    make(revision)
    assert not KEY.path.exists()
    assert longer.path.exists()  # of another length: never in the way


def test_matrices_of_another_size_than_the_kernels_read_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    def padded(kind: str, rows: int, columns: int, group: int, minimum: bool) -> int:
        return packed_size(kind, rows, columns, group, minimum) + 64

    make(KEY)
    assert is_whole(prepared.find(KEY, packed_size))
    assert not caplog.records
    assert prepared.find(KEY, padded) is None
    (line,) = [r.getMessage() for r in caplog.records]
    assert line == f"{KEY.path} is made anew: head has 10,880 bytes rather than 10,944"
    with prepared.exclusive(KEY, packed_size=padded) as found:
        assert found is None
    with prepared.exclusive(KEY, packed_size=packed_size) as found:
        assert is_whole(found)


def test_our_own_mistakes_are_not_taken_for_a_disk_that_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "posix_fallocate", wrong)
    with pytest.raises(OSError, match="Invalid argument"):
        make(KEY)


def test_the_version_of_transformers_is_known_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared_key.transformers_version.cache_clear()
    assert prepared_key.transformers_version() == metadata.version("transformers") == KEY.transformers
    monkeypatch.setattr(sys, "path", [])
    prepared_key.transformers_version.cache_clear()
    assert prepared_key.transformers_version() == ""
    prepared_key.transformers_version.cache_clear()


def test_the_key_follows_the_files_and_the_length_where_it_counts(tmp_path: Path) -> None:
    path = tmp_path / "some" / "model"
    path.mkdir(parents=True)
    config = {"model_type": "llama", "vocab_size": 160}
    (path / "config.json").write_text(json.dumps(config))

    def key(length: int, name: str = "model", where: Path = path) -> Key:
        return prepared_key.key_of(name, where, length, kind="int8", layout=1)

    first = key(2048)
    assert first == key(4096)
    assert first.model.startswith("model-")  # there may be other directories of this name
    assert key(2048, "org/name@main").model == "org/name"
    shutil.copytree(path, tmp_path / "model")
    assert key(2048, where=tmp_path / "model").model != first.model
    shutil.copytree(path, cache.models_dir() / "model")
    assert key(2048, where=cache.models_dir() / "model").model == "model"
    config["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}  # type: ignore[assignment]
    (path / "config.json").write_text(json.dumps(config))
    assert key(2048).version != first.version
    assert key(2048) != key(4096)
    config["rope_scaling"] = {"full_attention": {"rope_type": "longrope"}}  # type: ignore[assignment]
    (path / "config.json").write_text(json.dumps(config))
    assert key(2048) != key(4096)


def run(*words: str) -> tuple[int, str, str]:
    done = subprocess.run([*ANYRIG, *words], capture_output=True, text=True, timeout=60, env=os.environ)
    return done.returncode, done.stdout, done.stderr


def test_models_lists_and_removes_prepared_files(home: Path) -> None:
    cache.install("mine", lambda d: (d / "w").write_bytes(b"x" * 5000) and None, source="/data/mine.gguf")
    int4, org = replace(KEY, kind="int4", group=32), replace(KEY, model="org/name")
    for key in (KEY, int4, org):
        make(key)
    broken = home / "prepared" / "broken.anyrig"
    broken.write_bytes(b"?")
    _, out, _ = run("models", "--json")
    rows = [row for row in json.loads(out) if row["kept_by"] == "prepared"]
    assert {(r["name"], r["kind"], r["path"], r["bytes"]) for r in rows} == {
        *((k.model, k.kind, str(k.path), k.path.stat().st_size) for k in (KEY, int4, org)),
        ("broken.anyrig", None, str(broken), 1),
    }
    code, out, _ = run("models")
    assert f"mine\t{KEY.path.stat().st_size}\t{KEY.path}" in out.splitlines()
    code, _, err = run("models", "rm", "org/name", "--prepared")
    assert (code, "--yes" in err) == (2, True)
    code, _, err = run("models", "rm", "other", "--prepared", "--yes")
    assert (code, "No prepared file is of a model called 'other'" in err) == (1, True)
    assert run("models", "rm", "org/name", "--yes")[0] == 0
    assert not org.path.exists()
    assert run("models", "rm", "broken.anyrig", "--yes")[0] == 0
    assert not broken.exists()
    assert run("models", "rm", "mine", "--prepared", "--yes")[0] == 0
    assert not KEY.path.exists()
    assert not int4.path.exists()
    assert (home / "models" / "mine").exists()
    make(KEY)
    assert run("models", "rm", "mine", "--yes")[0] == 0
    assert not KEY.path.exists()
    assert not (home / "models" / "mine").exists()


def test_finding_imports_no_torch_and_writing_takes_no_memory_of_its_own() -> None:
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from dataclasses import replace
from anyrig.models import prepared
from tests.models.test_prepared import KEY, packed_size, spec

def own():
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return int(lines["RssAnon"].split()[0]) * 1024, int(lines["VmRSS"].split()[0]) * 1024

big = replace(spec(), vocab_size=1 << 20)  # 68 MB
with prepared.create(KEY, big, packed_size) as writer:
    before = own()
    for name in big.matrices():
        view = writer.matrix(name)
        view[:] = 7
    filled = own()
    for name in big.matrices():
        writer.release(name)
    released = own()
    writer.commit()
assert (prepared.find(KEY).matrices["head"] == 7).all()
assert not {{"torch", "transformers"}} & sys.modules.keys()
print(filled[0] - before[0], filled[1] - before[1], released[1] - before[1])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.returncode == 0, done.stderr
    anonymous, resident, released = map(int, done.stdout.split())
    assert anonymous < 2_000_000
    assert resident > 60_000_000
    assert released < 4_000_000
