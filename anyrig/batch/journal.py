"""Finished rows of ranges that are still open, so that a crash costs seconds rather than ranges."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from anyrig.batch.row import RowKey, RowResult
from anyrig.batch.storage import writing

_SEGMENT_ROWS = 4096


class Journal:
    """An append-only log of results, in segments that are deleted once every range they speak of is committed.

    A record counts when its whole line is on disk; a torn last line (kill -9, full disk) is as if never written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._recovered: dict[RowKey, RowResult] = {}
        self._segment_of: dict[RowKey, Path] = {}
        self._live: dict[Path, int] = {}
        self._file: IO[bytes] | None = None
        self._current: Path | None = None
        self._in_current = 0
        directory.mkdir(exist_ok=True)
        for segment in sorted(directory.glob("*.jsonl")):
            self._read(segment)
        self._number = max((int(s.stem) for s in directory.glob("*.jsonl")), default=0)

    def __len__(self) -> int:
        """Recovered rows that nobody asked for yet."""
        return len(self._recovered)

    def keys(self) -> list[RowKey]:
        """The recovered rows that nobody asked for yet."""
        return list(self._recovered)

    def take(self, key: RowKey) -> RowResult | None:
        """The result that an earlier run left for this row."""
        return self._recovered.pop(key, None)

    def append(self, results: Iterable[tuple[RowKey, RowResult]]) -> None:
        """Add results; on disk when this returns."""
        lines = []
        for key, result in results:
            lines.append(json.dumps([*key, dataclasses.asdict(result)]).encode() + b"\n")
            self._own(key)
        if not lines or self._current is None:
            return
        with writing(self._current):
            assert self._file is not None
            self._file.write(b"".join(lines))
            self._file.flush()
            os.fsync(self._file.fileno())
        if self._in_current >= _SEGMENT_ROWS:
            self._close_segment()

    def forget(self, keys: Iterable[RowKey]) -> None:
        """These rows are committed elsewhere; segments that hold no other rows are deleted."""
        for key in keys:
            self._recovered.pop(key, None)
            if (segment := self._segment_of.pop(key, None)) is not None:
                self._live[segment] -= 1
                self._drop_if_dead(segment)

    def close(self) -> None:
        self._close_segment()

    def _own(self, key: RowKey) -> None:
        if self._current is None:
            self._number += 1
            self._current = self._directory / f"{self._number:08}.jsonl"
            with writing(self._current):
                self._file = self._current.open("ab", buffering=1 << 20)
            self._in_current = 0
            self._live[self._current] = 0
        self._segment_of[key] = self._current
        self._live[self._current] += 1
        self._in_current += 1

    def _close_segment(self) -> None:
        if self._file is not None and self._current is not None:
            with contextlib.suppress(OSError):  # what counts was flushed by append
                self._file.close()
            closed, self._file, self._current = self._current, None, None
            self._drop_if_dead(closed)

    def _drop_if_dead(self, segment: Path) -> None:
        if self._live.get(segment) == 0 and segment != self._current:
            del self._live[segment]
            segment.unlink(missing_ok=True)

    def _read(self, segment: Path) -> None:
        self._live[segment] = 0
        for line in segment.read_bytes().split(b"\n"):
            try:
                source, number, fields = json.loads(line)
                result = RowResult(**fields)
            except (ValueError, TypeError):
                continue  # torn
            self._recovered[(source, number)] = result
            self._segment_of[(source, number)] = segment
            self._live[segment] += 1
        self._drop_if_dead(segment)
