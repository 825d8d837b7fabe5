"""Prepared models: a decoder's description and packed weights in one file, mapped at the next start.

`ANYRIG_HOME/prepared/<model>-<kind>-<hash of the key>.anyrig` is there whole or not at all:

    magic, length of the header (uint64), SHA-256 of the header
    header (JSON): key, description (`DecoderSpec.to_dict`), tensors {name: {dtype, shape, offset, bytes}}, bytes
    tensors, each at a multiple of 4096 from the next such multiple after the header

It is written through a shared mapping, so that packed weights never are memory of the process alone, and mapped
read-only by all who run the model: replicas share its pages. Nothing here imports torch or Transformers.
"""

import errno
import hashlib
import json
import logging
import mmap
import os
import struct
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from anyrig.core.decoder import DecoderSpec, WeightKind
from anyrig.models import cache
from anyrig.models.prepared_key import SUFFIX, Key, directory

log = logging.getLogger(__name__)

MAGIC = b"ANYRIG01"
ALIGN = 4096
_PREFIX = struct.Struct("<8sQ32s")
_LONGEST_HEADER = 256 << 20  # bytes; a broken length must not be read
_DAY = 24 * 3600  # seconds
_UNUSED = 30 * _DAY  # after which a file of another version of the model goes
_SOFTWARE = ("layout", "anyrig", "description", "transformers")  # parts of the key
# What a disk, its owner or the file system may refuse; anything else is a bug of ours.
_REFUSED = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST),
    *(errno.ENODEV, errno.EOPNOTSUPP, errno.EIO, errno.ENOMEM, errno.ENOLCK, errno.ENOSYS),
}

# packed_size(kind, rows, columns, group, minimum) -> bytes of a packed matrix.
PackedSize = Callable[[WeightKind, int, int, int, bool], int]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Prepared:
    """A decoder ready to run; its arrays keep the mapping alive.

    Attributes:
        spec: the decoder.
        matrices: packed, uint8, read-only.
        vectors: float32, read-only.
        path: the file; None when it is in this process' memory only.
        bytes: of all tensors.
    """

    spec: DecoderSpec
    matrices: dict[str, Bytes]
    vectors: dict[str, Floats]
    path: Path | None
    bytes: int


def find(key: Key, packed_size: PackedSize | None = None, *, quiet: bool = False) -> Prepared | None:
    """The prepared file of this key, mapped; None when there is none, or when it is stale, cut short or foreign.

    The latter is said in one line (unless `quiet`), and the file is then made anew by whoever asked.

    Args:
        packed_size: of the kernels that will read it; with it, matrices of another size are stale.
    """
    try:
        with key.path.open("rb") as file:
            header, start = _read_header(file.fileno(), key.path)
            if header["key"] != asdict(key):
                raise ValueError("it was made from something else")
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with suppress(OSError):
                mapping.madvise(mmap.MADV_WILLNEED)
            found = _views(mapping, header, start, key.path)
            if packed_size is not None:
                _check_sizes(found, packed_size)
            with suppress(OSError):
                if time.time() - os.fstat(file.fileno()).st_mtime > _DAY:
                    os.utime(key.path)  # it is used: `_remove_stale`
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.log(logging.DEBUG if quiet else logging.WARNING, "%s is made anew: %s", key.path, error)
        return None


@contextmanager
def exclusive(
    key: Key, progress: Callable[[str], None] | None = None, packed_size: PackedSize | None = None
) -> Iterator[Prepared | None]:
    """Be the only process that prepares this key: yields what another one has made meanwhile, or None: then `create`.

    Call `find` first, which needs no lock. Where none can be had (a directory that may not be written), there is none.
    """
    lock: FileLock | None = None
    try:
        locks = directory() / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        lock = FileLock(locks / f"{key.path.stem}.lock")
        try:
            lock.acquire(timeout=0.2)
        except Timeout:
            if progress:
                progress(f"another process is preparing {key.model}: waiting for it")
            lock.acquire()
        # The lock is ours, so what lies here belongs to nobody.
        for stale in directory().glob(f".new-{key.path.stem}-*"):
            stale.unlink(missing_ok=True)
    except (OSError, NotImplementedError) as error:  # filelock raises the latter where a file system has no locks
        log.debug("no lock for %s: %s", key.path, error)
    try:
        yield find(key, packed_size, quiet=True)
    finally:
        if lock is not None and lock.is_locked:
            lock.release()


class Writer:
    """The file while it is filled (`create`).

    Attributes:
        spec: the decoder whose tensors it takes.
        in_memory: there is no file, because the disk or its owner said no.
    """

    def __init__(self, key: Key, spec: DecoderSpec, packed_size: PackedSize) -> None:
        self.key, self.spec = key, spec
        tensors, at = {}, 0
        for name, (rows, columns) in spec.matrices().items():
            kind, group, minimum = spec.packing(name)
            size = packed_size(kind, rows, columns, group, minimum)
            tensors[name] = {"dtype": "packed", "shape": [rows, columns], "offset": at, "bytes": size}
            at += -(-size // ALIGN) * ALIGN
        for name, length in spec.vectors().items():
            tensors[name] = {"dtype": "float32", "shape": [length], "offset": at, "bytes": 4 * length}
            at += -(-4 * length // ALIGN) * ALIGN
        self._header = {"key": asdict(key), "spec": spec.to_dict(), "tensors": tensors, "bytes": at}
        text = json.dumps(self._header).encode()
        self._start = _after(len(text))
        self._new: Path | None = directory() / f".new-{key.path.stem}-{uuid.uuid4().hex[:8]}"
        self._fd = -1
        try:
            self._mapping = self._map(self._start + at)
            self._mapping[: _PREFIX.size] = _PREFIX.pack(MAGIC, len(text), hashlib.sha256(text).digest())
            self._mapping[_PREFIX.size : _PREFIX.size + len(text)] = text
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._give_up(error)
            self._mapping = mmap.mmap(-1, self._start + at)

    @property
    def in_memory(self) -> bool:
        return self._new is None

    def matrix(self, name: str) -> Bytes:
        """Where the packed bytes of a matrix go, zero at first."""
        entry = self._entry(name, "packed")
        return np.frombuffer(self._mapping, np.uint8, entry["bytes"], self._start + entry["offset"])

    def vector(self, name: str, values: Floats) -> None:
        entry = self._entry(name, "float32")
        if values.dtype != np.float32 or list(values.shape) != entry["shape"]:
            raise ValueError(f"{name} is {values.dtype}{list(values.shape)} rather than float32{entry['shape']}")
        np.frombuffer(self._mapping, np.float32, values.size, self._start + entry["offset"])[:] = values

    def release(self, name: str) -> None:
        """The matrix is packed: give its pages back. They stay in the system's cache until they are on the disk."""
        if self.in_memory:
            return
        entry = self._entry(name, "packed")
        start = (self._start + entry["offset"]) // mmap.PAGESIZE * mmap.PAGESIZE
        with suppress(OSError):
            self._mapping.madvise(mmap.MADV_DONTNEED, start, self._start + entry["offset"] + entry["bytes"] - start)

    def view(self) -> Prepared:
        """The decoder as it stands, to be tried out before `commit`."""
        return _views(self._mapping, self._header, self._start, None)

    def commit(self) -> Prepared:
        """Put the file in its place, whole and on the disk, and remove those that it makes stale."""
        if self._new is not None:
            try:
                os.fsync(self._fd)
                self._new.replace(self.key.path)
                self._new = None
                with self.key.path.open("rb") as file:
                    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                _remove_stale(self.key)
                return _views(mapping, self._header, self._start, self.key.path)
            except OSError as error:
                self._give_up(error)
        return _views(self._mapping, self._header, self._start, None)

    def close(self) -> None:
        """Remove what was not committed. The mapping goes when nobody looks at it any more."""
        if self._new is not None:
            self._new.unlink(missing_ok=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _map(self, size: int) -> mmap.mmap:
        assert self._new is not None
        directory().mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        # All blocks now: writing to a mapped file on a full disk is a SIGBUS rather than an error.
        os.posix_fallocate(self._fd, 0, size)
        return mmap.mmap(self._fd, size)

    def _give_up(self, error: OSError) -> None:
        log.warning(
            "%s is not kept for the next start, which will take as long as this one: %s",
            self.key.path.name,
            error.strerror or error,
        )
        with suppress(OSError):
            self.close()
        self._new = None

    def _entry(self, name: str, dtype: str) -> dict[str, Any]:
        entry: dict[str, Any] = self._header["tensors"][name]  # type: ignore[index]
        if entry["dtype"] != dtype:
            raise ValueError(f"{name} is {entry['dtype']}, not {dtype}")
        return entry


class InMemory:
    """What `Writer` does, for one process: no file, so no key.

    For weights that nobody starts with again: the random models of the tests (`tests/models/families.py`), and
    trainers that pack new ones after every update. Models of users go through `create`.
    """

    def __init__(self, spec: DecoderSpec, packed_size: PackedSize) -> None:
        self._made = Prepared(spec, {}, {}, None, 0)
        for name, (rows, columns) in spec.matrices().items():
            kind, group, minimum = spec.packing(name)
            self._made.matrices[name] = np.zeros(packed_size(kind, rows, columns, group, minimum), np.uint8)

    def matrix(self, name: str) -> Bytes:
        return self._made.matrices[name]

    def vector(self, name: str, values: Floats) -> None:
        self._made.vectors[name] = values

    def release(self, name: str) -> None:
        """It stays."""

    def commit(self) -> Prepared:
        size = sum(m.nbytes for m in self._made.matrices.values()) + sum(v.nbytes for v in self._made.vectors.values())
        return replace(self._made, bytes=size)


@contextmanager
def create(key: Key, spec: DecoderSpec, packed_size: PackedSize) -> Iterator[Writer]:
    """A file of this key to be filled and committed, under `exclusive`; without a commit nothing is left of it."""
    writer = Writer(key, spec, packed_size)
    try:
        yield writer
    finally:
        writer.close()


@dataclass(frozen=True)
class PreparedFile:
    """One file in `directory()`; `kind` is None for one that can't be read (its name stands for the model then)."""

    model: str
    kind: str | None
    path: Path
    bytes: int
    key: dict[str, Any] | None = None


def prepared_files() -> list[PreparedFile]:
    """What is kept, by name of the file."""
    found = []
    for path in sorted(directory().glob(f"*{SUFFIX}")) if directory().is_dir() else []:
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                key = _read_header(file.fileno(), path)[0]["key"]
            found.append(PreparedFile(str(key["model"]), str(key["kind"]), path, size, key))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError):
            found.append(PreparedFile(path.name, None, path, size))
    return found


def remove(path: Path) -> None:
    """Delete one; who has mapped it keeps it.

    Raises:
        ModelError: when it may not be deleted.
    """
    with cache.writable(path):
        path.unlink(missing_ok=True)


def _remove_stale(key: Key) -> None:
    """Delete files of the same model, kind, group, minimum and length that nobody will want again.

    1. Of the same files of the model, made by other software: an update.
    2. Of other files of the model, when no one has used it for 30 days. Until then it may be another revision, or
    another directory's: two of them must not make each other's first start slow for ever.
    """
    ours = asdict(key)
    for file in prepared_files():
        theirs = file.key or {}
        if file.path == key.path or any(
            theirs.get(n) != ours[n] for n in ("model", "kind", "group", "minimum", "length")
        ):
            continue
        with suppress(OSError):
            if theirs.get("version") == ours["version"]:
                stale = any(theirs.get(n) != ours[n] for n in _SOFTWARE)
            else:
                stale = time.time() - file.path.stat().st_mtime > _UNUSED
            if stale:
                file.path.unlink(missing_ok=True)


def _check_sizes(found: Prepared, packed_size: PackedSize) -> None:
    """
    Raises:
        ValueError: naming a matrix that the kernels would not read as it was written.
    """
    for name, (rows, columns) in found.spec.matrices().items():
        kind, group, minimum = found.spec.packing(name)
        size = packed_size(kind, rows, columns, group, minimum)
        if found.matrices[name].nbytes != size:
            raise ValueError(f"{name} has {found.matrices[name].nbytes:,} bytes rather than {size:,}")


def _read_header(fd: int, path: Path) -> tuple[dict[str, Any], int]:
    """The header, and where the tensors start.

    Raises:
        ValueError: with what is wrong.
    """
    size = os.fstat(fd).st_size
    prefix = os.pread(fd, _PREFIX.size, 0)
    if len(prefix) < _PREFIX.size or prefix[: len(MAGIC)] != MAGIC:
        raise ValueError("it is not a prepared model of this format")
    _, length, digest = _PREFIX.unpack(prefix)
    text = os.pread(fd, length, _PREFIX.size) if length <= min(size, _LONGEST_HEADER) else b""
    if len(text) != length or hashlib.sha256(text).digest() != digest:
        raise ValueError("its header is damaged")
    header = json.loads(text)
    start = _after(length)
    if size != start + header["bytes"]:
        raise ValueError(f"it has {size:,} bytes rather than {start + header['bytes']:,}")
    return header, start


def _views(mapping: mmap.mmap, header: dict[str, Any], start: int, path: Path | None) -> Prepared:
    spec = DecoderSpec.from_dict(header["spec"])
    matrices: dict[str, Bytes] = {}
    vectors: dict[str, Floats] = {}
    for name, entry in header["tensors"].items():
        at, (length, *_) = start + entry["offset"], entry["shape"]
        if entry["dtype"] == "packed":
            matrices[name] = np.frombuffer(mapping, np.uint8, entry["bytes"], at)
            matrices[name].flags.writeable = False
        else:
            vectors[name] = np.frombuffer(mapping, np.float32, length, at)
            vectors[name].flags.writeable = False
    if matrices.keys() != spec.matrices().keys() or vectors.keys() != spec.vectors().keys():
        raise ValueError("its tensors are not those of its description")
    return Prepared(spec, matrices, vectors, path, sum(e["bytes"] for e in header["tensors"].values()))


def _after(header: int) -> int:
    return -(-(_PREFIX.size + header) // ALIGN) * ALIGN
