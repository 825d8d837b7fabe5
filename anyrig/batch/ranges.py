"""Cutting the input into contiguous ranges, and holding one until all its rows are finished."""

import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from anyrig.batch.parts import Finished
from anyrig.batch.row import Position, Row, RowKey, RowResult, Tally
from anyrig.batch.source import Payload, Source

RANGE_ROWS = 1000
RANGE_BYTES = 16 << 20
_IN_MEMORY = 128 << 10  # of one range's payload; the rest waits on disk, so that wide rows don't fill the memory


class OpenRange:
    """Contiguous rows of one source that are being worked on.

    Attributes:
        number: order in which ranges were opened.
        closed: no more rows will come.
    """

    def __init__(self, number: int, source: Source, start: Position, spool: Path | None) -> None:
        self.number = number
        self.source = source
        self.start = start
        self.end = start
        self.closed = False
        self._results: list[RowResult | None] = []
        self._left = 0
        self._bytes = 0
        # Unnamed on disk: a killed run leaves nothing behind.
        self._payloads = tempfile.SpooledTemporaryFile(_IN_MEMORY, dir=str(spool) if spool else None)  # noqa: SIM115

    def __len__(self) -> int:
        return len(self._results)

    @property
    def full(self) -> bool:
        return self._bytes >= RANGE_BYTES

    @property
    def complete(self) -> bool:
        return self.closed and self._left == 0

    def add(self, row: Row) -> None:
        self._payloads.write(struct.pack("<Q", len(row.payload)) + row.payload)
        self._bytes += len(row.payload)
        self._results.append(None)
        self._left += 1
        self.end = row.next

    def finish(self, key: RowKey, result: RowResult) -> None:
        at = key[1] - self.start.number
        assert self._results[at] is None, f"row {key} finished twice"
        self._results[at] = result
        self._left -= 1

    def keys(self) -> list[RowKey]:
        return [(self.start.source, self.start.number + i) for i in range(len(self._results))]

    def tally(self) -> Tally:
        tally = Tally()
        for result in self._results:
            if result is not None:
                tally.add(result)
        return tally

    def finished(self) -> Iterator[Finished]:
        """Payload and added columns of the rows from the first one to the last one before an unfinished one."""
        self._payloads.seek(0)
        for result in self._results:
            if result is None:
                return
            (size,) = struct.unpack("<Q", self._payloads.read(8))
            yield self._payloads.read(size), result.added

    def release(self) -> None:
        self._payloads.close()


def unfinished(
    sources: Sequence[Source],
    committed: Mapping[RowKey, Any],
    payload: Payload,
    *,
    limit: int | None = None,
    range_rows: int = RANGE_ROWS,
    spool: Path | None = None,
    check: Callable[[Row], None] = lambda row: None,
) -> Iterator[tuple[OpenRange, Row]]:
    """Every row that no committed range covers, with the range it belongs to; a range's last row closes it.

    Args:
        committed: ranges by the identity of their first row; each has an `end`.
        limit: rows in all, committed ones included.
        check: may give a row an error and change its payload before that is kept.
    """
    left = limit if limit is not None else -1
    opened = 0
    for source in sources:
        position: Position | None = source.start
        while position is not None and left != 0:
            while (done := committed.get(position.key)) is not None:
                left -= done.end.number - position.number if limit is not None else 0
                position = done.end
            start, position = position, None
            rng: OpenRange | None = None
            for row, last in _with_last(source.rows(start, payload)):
                if left == 0:
                    break
                left -= 1 if limit is not None else 0
                if rng is None:
                    rng, opened = OpenRange(opened, source, row.position, spool), opened + 1
                check(row)
                rng.add(row)
                reached = row.next.key in committed
                rng.closed = last or reached or left == 0 or rng.full or len(rng) >= range_rows
                yield rng, row
                if rng.closed:
                    rng = None
                if reached:
                    position = row.next
                    break


def _with_last(rows: Iterator[Row]) -> Iterator[tuple[Row, bool]]:
    """Each row, and whether it is the last one: reads one row ahead."""
    before: Row | None = None
    for row in rows:
        if before is not None:
            yield before, False
        before = row
    if before is not None:
        yield before, True
