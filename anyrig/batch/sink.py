"""Where finished rows go while a job runs: into the ledger, or in input order to stdout."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Protocol

from anyrig.batch.ledger import Committed, Ledger
from anyrig.batch.parts import PartWriter
from anyrig.batch.ranges import RANGE_ROWS, OpenRange
from anyrig.batch.row import RowKey, RowResult

JOURNAL_SECONDS = 2.0  # what a kill -9 can cost, beside the rows in flight


class Sink(Protocol):
    """Takes rows and ranges as they are finished.

    Attributes:
        committed: ranges that need no work, by the identity of their first row.
        range_rows: how many rows a range may have.
        spool: directory for what doesn't fit into memory; None: the system's own.
    """

    committed: dict[RowKey, Committed]
    range_rows: int
    spool: Path | None

    def earlier(self, key: RowKey) -> RowResult | None:
        """The result of a row that an earlier run finished in a range that it didn't."""
        ...

    def finished(self, key: RowKey, result: RowResult) -> None:
        """One row is finished; its range is still open."""
        ...

    def commit(self, rng: OpenRange) -> None:
        """All rows of a range are finished."""
        ...

    def tick(self) -> None:
        """Called between steps."""
        ...

    def stop(self, still_open: Iterable[OpenRange]) -> None:
        """No more will come, because the job ends early: save what can be saved."""
        ...


class LedgerSink:
    """Commits ranges, and journals the rows of open ranges every `JOURNAL_SECONDS`."""

    def __init__(self, ledger: Ledger, writer: PartWriter) -> None:
        self.committed = ledger.committed
        self.range_rows = RANGE_ROWS
        self.spool: Path | None = ledger.directory
        self._ledger = ledger
        self._writer = writer
        self._unsaved: dict[RowKey, RowResult] = {}
        self._saved_at = time.monotonic()

    def earlier(self, key: RowKey) -> RowResult | None:
        return self._ledger.journal.take(key)

    def finished(self, key: RowKey, result: RowResult) -> None:
        self._unsaved[key] = result

    def commit(self, rng: OpenRange) -> None:
        def write(file: IO[bytes]) -> Committed:
            columns, types = self._writer.write(file, rng.source, rng.finished())
            return Committed("", rng.start, rng.end, rng.tally(), columns, types)

        keys = rng.keys()
        self._ledger.commit(rng.start, rng.end, keys, write)
        for key in keys:
            self._unsaved.pop(key, None)
        rng.release()

    def tick(self) -> None:
        if time.monotonic() - self._saved_at >= JOURNAL_SECONDS:
            self._save()

    def stop(self, still_open: Iterable[OpenRange]) -> None:
        self._save()

    def _save(self) -> None:
        unsaved, self._unsaved = self._unsaved, {}
        self._ledger.journal.append(unsaved.items())
        self._saved_at = time.monotonic()


class StdoutSink:
    """Writes rows as soon as all rows before them are out. Nothing is kept: no going on after a stop."""

    def __init__(self, out: IO[bytes], writer: PartWriter) -> None:
        self.committed: dict[RowKey, Committed] = {}
        self.range_rows = 16
        self.spool: Path | None = None
        self._out = out
        self._writer = writer
        self._waiting: dict[int, OpenRange] = {}
        self._next = 0

    def earlier(self, key: RowKey) -> RowResult | None:
        return None

    def finished(self, key: RowKey, result: RowResult) -> None:
        pass

    def commit(self, rng: OpenRange) -> None:
        self._waiting[rng.number] = rng
        while (ready := self._waiting.pop(self._next, None)) is not None:
            self._write(ready)
            self._next += 1

    def tick(self) -> None:
        pass

    def stop(self, still_open: Iterable[OpenRange]) -> None:
        for rng in sorted([*self._waiting.values(), *still_open], key=lambda r: r.number):
            if rng.number != self._next:
                break
            self._write(rng)
            if not rng.complete:
                break
            self._next += 1

    def _write(self, rng: OpenRange) -> None:
        rows: list[tuple[bytes, dict[str, Any]]] = list(rng.finished())
        self._writer.write(self._out, rng.source, rows)
        self._out.flush()
        rng.release()
