"""Files that survive a crash: written whole or not at all, with errors that say what the disk says."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from anyrig.core.errors import DataError

_FULL = {
    errno.ENOSPC: "no space left",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "the limit on file sizes is reached",
}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the errors of a write to `path` into one sentence with the path, the reason and the remedy."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as e:
        if e.errno in _FULL:
            raise DataError(
                f"{_FULL[e.errno]} while writing {path} ({_free(path)})",
                "finished rows are kept: make room and run the same command again",
            ) from None
        raise DataError(f"{path} can't be written ({e.strerror or e})") from None


def write_durably(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, atomically: a reader (or a crash) sees the old content or the new one."""
    with creating(path) as file:
        file.write(data)


@contextlib.contextmanager
def creating(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears as `path` when the block ends well, on disk by then; nothing is left of it otherwise."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def sync_directory(path: Path) -> None:
    """Make renames in `path` last through a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(directory: Path, what: str) -> None:
    """Try it: permission bits say little (root, read-only mounts, quotas).

    Raises:
        DataError: naming the directory and the reason.
    """
    probe = directory / f".anyrig-{os.getpid()}.probe"
    try:
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as e:
        with contextlib.suppress(OSError):
            probe.unlink()
        full = f", {_free(directory)}" if e.errno in _FULL else ""
        raise DataError(
            f"{what} can't be written: {directory} ({e.strerror}{full})", "choose another place with -o"
        ) from None


def _free(path: Path) -> str:
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return f"{shutil.disk_usage(path).free / 1e6:,.1f} MB free"
    except OSError:
        return "free space unknown"
