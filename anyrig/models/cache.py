"""The model cache `ANYRIG_HOME/models/<name>`: a directory is there whole or not at all, whoever else writes it."""

import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from anyrig.core.env import home
from anyrig.core.errors import ModelError

# Raise when the way a directory is written changes: older ones are then written anew.
FORMAT = 1
RECORD = "anyrig.json"
_STAGING = ".new-"


@dataclass(frozen=True)
class CachedModel:
    """One directory of the cache."""

    name: str
    path: Path
    bytes: int  # on disk
    source: str


def models_dir() -> Path:
    return home() / "models"


def _lock(name: str) -> FileLock:
    locks = models_dir() / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    return FileLock(locks / f"{name}.lock")


def find(name: str) -> Path | None:
    """The finished directory of this name, or None when there is none or an older format wrote it."""
    path = models_dir() / name
    return path if _record(path).get("format") == FORMAT else None


def install(
    name: str,
    write: Callable[[Path], None],
    *,
    source: str,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Fill `models/<name>` once, by calling `write(directory)` on an empty directory beside it, then renaming it.

    Several processes may do this at the same time: the first one works, the others wait and take its result.
    A process that dies leaves only a staging directory, which the next one removes.

    Raises:
        ModelError: when the disk is full or the cache cannot be written.
    """
    target = models_dir() / name
    with writable(models_dir()):
        lock = _lock(name)
        try:
            lock.acquire(timeout=0.2)
        except Timeout:
            if progress:
                progress(f"another process is preparing {name}: waiting for it")
            lock.acquire()
    try:
        if (done := find(name)) is not None:
            return done
        with writable(target):
            # The lock is ours, so whatever lies here under our name belongs to nobody.
            ours = re.compile(re.escape(f"{_STAGING}{name}-") + "[0-9a-f]{8}")
            for stale in models_dir().iterdir():
                if ours.fullmatch(stale.name):
                    shutil.rmtree(stale, ignore_errors=True)
            staging = models_dir() / f"{_STAGING}{name}-{uuid.uuid4().hex[:8]}"
            staging.mkdir()
            try:
                write(staging)
                _share(staging)
                (staging / RECORD).write_text(json.dumps({"format": FORMAT, "source": source}, indent=2) + "\n")
                _sync(staging)
                if target.exists():
                    shutil.rmtree(target)
                staging.rename(target)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
        return target
    finally:
        lock.release()


def cached_models() -> list[CachedModel]:
    """What the cache holds, by name."""
    if not models_dir().is_dir():
        return []
    return [
        CachedModel(path.name, path, size(path), str(_record(path).get("source", "")))
        for path in sorted(models_dir().iterdir())
        if not path.name.startswith(".") and (path / RECORD).is_file()
    ]


def remove(name: str) -> int:
    """Delete a model from the cache; returns the bytes freed.

    Raises:
        ModelError: when there is none of this name.
    """
    path = models_dir() / name
    if "/" in name or name.startswith(".") or not (path / RECORD).is_file():
        raise ModelError(f"No model in the cache is called {name!r}", "`anyrig models` lists them")
    with writable(path), _lock(name):
        freed = size(path)
        # Renamed first: a deletion that is cut short must not leave half a model under its name.
        doomed = models_dir() / f"{_STAGING}{name}-removed"
        path.rename(doomed)
        shutil.rmtree(doomed)
    return freed


def size(path: Path) -> int:
    """Bytes of all files below `path`; files that vanish while it counts are nothing."""
    total = 0
    for file in path.rglob("*"):
        with suppress(FileNotFoundError):
            total += file.stat().st_size if file.is_file() else 0
    return total


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn the system's refusals to write below `path` into a ModelError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_space(models_dir()) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENOENT):
            raise ModelError(
                f"Cannot write {error.filename or path}: {error.strerror}",
                "set ANYRIG_HOME to a directory that you may write",
            ) from error
        raise


def no_space(path: Path, variable: str = "ANYRIG_HOME") -> ModelError:
    """The error for a full disk below `path`, a place that the environment variable names."""
    return ModelError(
        f"No space left on the disk of {path}",
        f"free some (`anyrig models rm NAME`), or set {variable} to a directory on a larger disk",
    )


def _record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads((path / RECORD).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _share(directory: Path) -> None:
    """Let everyone read who may read the directory: safetensors makes its files for their owner only."""
    for file in directory.rglob("*"):
        if file.is_file():
            file.chmod(file.stat().st_mode | (directory.stat().st_mode & 0o444))


def _sync(directory: Path) -> None:
    """Have the files on the disk before their directory gets its final name: a power cut must not leave empty ones."""
    for file in directory.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
