"""What is done of a job, on disk: committed ranges, the run's fingerprint, and the lock that keeps a second run out.

    out.jsonl                 appears at the end, whole
    .out.jsonl.anyrig/        until then, beside it
      lock                    held (flock) while a run lives
      manifest.json           the run's fingerprint: model, prompt, parameters, inputs
      ledger.jsonl            one line per committed range; a range counts once its line is whole
      parts/00000-000000000   rows of one committed range, in input order: <source>-<first row>
      journal/                results of ranges that are still open

A range is contiguous: rows `start.number .. end.number` of one source. Parts are written aside, synced and renamed
before their line is added, so a crash leaves a part without a line at worst, which the next run overwrites.
"""

import bisect
import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from anyrig.batch.journal import Journal
from anyrig.batch.row import Position, RowKey, Tally
from anyrig.batch.storage import creating, write_durably, writing
from anyrig.core.errors import DataError, UsageError

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Committed:
    """One committed range.

    Attributes:
        columns: input columns of its rows, in order of appearance.
        types: JSON types of all columns (`arrow_types.py`), where the output needs them.
    """

    part: str
    start: Position
    end: Position
    tally: Tally
    columns: list[str] = field(default_factory=list)
    types: dict[str, Any] = field(default_factory=dict)

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "Committed":
        raw = json.loads(line)
        raw["start"], raw["end"] = Position(*raw["start"]), Position(*raw["end"])
        return cls(**{**raw, "tally": Tally(**raw["tally"])})


class Ledger:
    """The work directory of one output.

    Attributes:
        committed: committed ranges by the identity of their first row.
        resumed: rows that earlier runs have finished, committed and journaled.
    """

    def __init__(self, output: Path, *, fresh: bool = False) -> None:
        """Open or create, and lock.

        Raises:
            UsageError: when another run holds it.
            DataError: when the directory can't be made.
        """
        self.output = output
        self.directory = output.with_name(f".{output.name}.anyrig")
        self._lock = self._take_lock()
        if fresh:
            self._empty()
        self._manifest = self.directory / "manifest.json"
        self._log = self.directory / "ledger.jsonl"
        self.parts = self.directory / "parts"
        with writing(self.directory):
            self.parts.mkdir(exist_ok=True)
            self.journal = Journal(self.directory / "journal")
            self.committed = self._read_log()
            # The segment that was being written at a crash still holds rows whose range was committed later.
            self.journal.forget(self._covered(self.journal.keys()))
        self.resumed = sum(c.tally.rows for c in self.committed.values()) + len(self.journal)
        self._log_file: IO[bytes] | None = None

    def begin(self, fingerprint: Mapping[str, Any]) -> None:
        """Write down what this run is, or compare it with what an interrupted run has left.

        May be called again with more of the fingerprint, as it becomes known.

        Raises:
            UsageError: when they differ; it names what.
        """
        fingerprint = json.loads(json.dumps(fingerprint, default=str))
        known: dict[str, Any] = {}
        if self._manifest.exists():
            known = json.loads(self._manifest.read_bytes())
            if known.pop("version", None) != _VERSION:
                raise UsageError(f"{self.directory} was left by another version of anyrig", "start anew with --fresh")
            if changes := _changes(known, fingerprint):
                raise UsageError(
                    f"{self.output} was begun with another {' and '.join(changes)}",
                    f"start anew with --fresh, or write elsewhere with -o (finished rows: {self.resumed:,})",
                )
        if known != fingerprint:
            with writing(self._manifest):
                content = {"version": _VERSION, **known, **fingerprint}
                write_durably(self._manifest, json.dumps(content, indent=1).encode())

    def commit(
        self, start: Position, end: Position, keys: Iterable[RowKey], write: Callable[[IO[bytes]], Committed]
    ) -> None:
        """Make one range last.

        Args:
            write: writes the part's bytes and returns its record, whose `part`, `start` and `end` are filled in here.
        """
        part = f"{start.source:05}-{start.number:012}"
        path = self.parts / part
        with writing(path), creating(path) as file:
            record = write(file)
        record = Committed(part, start, end, record.tally, record.columns, record.types)
        with writing(self._log):
            if self._log_file is None:
                self._log_file = self._log.open("ab")
            self._log_file.write(record.to_line())
            self._log_file.flush()
            os.fsync(self._log_file.fileno())
        self.committed[start.key] = record
        self.journal.forget(keys)

    def in_order(self) -> list[Committed]:
        return [self.committed[key] for key in sorted(self.committed)]

    def close(self) -> None:
        """Let go of it; a directory in which nothing is worth keeping is removed."""
        self.journal.close()
        self._close_log()
        if not self.committed and not any((self.directory / "journal").glob("*.jsonl")):
            self._remove()
        self._lock.close()

    def remove(self) -> None:
        """The output is complete: nothing of this is needed any more."""
        self.journal.close()
        self._close_log()
        self._remove()
        self._lock.close()

    def _close_log(self) -> None:
        if self._log_file is not None:
            with contextlib.suppress(OSError):
                self._log_file.close()
            self._log_file = None

    def _remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def _take_lock(self) -> IO[str]:
        path = self.directory / "lock"
        while True:
            with writing(self.directory):
                self.directory.mkdir(exist_ok=True)
                try:
                    file = path.open("a+")
                except FileNotFoundError:  # the run that held it has just removed the directory
                    continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                owner = file.read().strip()
                file.close()
                raise UsageError(
                    f"another run is writing {self.output}" + (f" (process {owner})" if owner else ""),
                    "wait for it, or write elsewhere with -o",
                ) from None
            try:
                same = os.path.samestat(path.stat(), os.fstat(file.fileno()))
            except FileNotFoundError:
                same = False
            if same:
                file.truncate(0)
                file.write(str(os.getpid()))
                with contextlib.suppress(OSError):  # the number is only for the message
                    file.flush()
                return file
            file.close()

    def _empty(self) -> None:
        for path in self.directory.iterdir():
            if path.name != "lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _covered(self, keys: Iterable[RowKey]) -> list[RowKey]:
        """Those of `keys` that lie in a committed range."""
        starts = sorted(self.committed)

        def covered(key: RowKey) -> bool:
            at = bisect.bisect_right(starts, key) - 1
            return at >= 0 and starts[at][0] == key[0] and key[1] < self.committed[starts[at]].end.number

        return [key for key in keys if covered(key)]

    def _read_log(self) -> dict[RowKey, Committed]:
        committed: dict[RowKey, Committed] = {}
        if not self._log.exists():
            return committed
        data = self._log.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):  # torn by a crash: the next line must not be glued to it
            with self._log.open("r+b") as file:
                file.truncate(whole)
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                record = Committed.from_line(line)
            except (ValueError, TypeError, KeyError):
                raise DataError(f"{self._log}, line {number} is damaged", "start anew with --fresh") from None
            committed[record.start.key] = record
        return committed


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two fingerprints, in words; fields that only one of them has yet don't count."""
    changes = []
    for key in old.keys() & new.keys():
        if old[key] == new[key]:
            continue
        if key == "inputs":
            if words := _changed_inputs(old[key], new[key]):
                changes.append(words)
        elif isinstance(old[key], dict) and isinstance(new[key], dict):
            inner = sorted(k for k in old[key].keys() | new[key].keys() if old[key].get(k) != new[key].get(k))
            changes += [f"{k} ({_brief(old[key].get(k))}, now {_brief(new[key].get(k))})" for k in inner]
        else:
            changes.append(f"{key} ({_brief(old[key])}, now {_brief(new[key])})")
    return sorted(changes)


def _changed_inputs(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str | None:
    """What differs between two lists of `Source.identity()`; the name under which a file was given doesn't matter."""
    before, now = ({i.get("path", i["name"]): i for i in inputs} for inputs in (old, new))

    def state(identity: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in identity.items() if k != "name"}

    words = [
        (f"{len(names)} inputs" if len(names) > 3 else ", ".join(names)) + f" {what}"
        for what, names in (
            ("changed", [i["name"] for p, i in now.items() if p in before and state(before[p]) != state(i)]),
            ("new", [i["name"] for p, i in now.items() if p not in before]),
            ("missing", [i["name"] for p, i in before.items() if p not in now]),
        )
        if names
    ]
    if not words and list(before) != list(now):
        words = ["another order"]
    return f"input ({'; '.join(words)})" if words else None


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return repr(text if len(text) <= 60 else text[:57] + "...") if isinstance(value, str) else text[:60]
