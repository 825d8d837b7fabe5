"""Reader of CSV and TSV: every cell is text, quoted cells may hold newlines, a ragged row is an error row."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

from anyrig.batch import jsontext
from anyrig.batch.lines import MAX_LINE, RawLine, raw_lines
from anyrig.batch.row import Position, Row
from anyrig.batch.source import Payload, Source
from anyrig.core.errors import DataError, UsageError


class _Unreadable(Exception):
    """One record that can't be parsed; reading goes on at the line after its first one."""


class CsvFile(Source):
    """Rows of a delimited file with a header line."""

    columns: tuple[str, ...]

    def __init__(
        self, index: int, path: Path, name: str | None = None, encoding: str = "utf-8", delimiter: str | None = None
    ) -> None:
        super().__init__(index, path, name)
        self.encoding = encoding
        self.delimiter = delimiter or ","
        self._delimiter_given = delimiter is not None
        # Cells as large as the reader's own limit; the csv module's default is 128 kB.
        csv.field_size_limit(MAX_LINE)
        self.columns = ()
        self._first = self._header()

    def rows(self, start: Position, payload: Payload = "json") -> Iterator[Row]:
        here = start if start.number else self._first
        try:
            while True:
                for cells, first, last in self._records(here):
                    if isinstance(cells, _Unreadable):
                        # An unclosed quote runs on to the end of the file: only its first line is lost.
                        after = Position(self.index, here.number + 1, first.end, first.number + 1)
                        begin = here._replace(offset=first.offset, line=first.number)
                        yield Row(begin, after, b"", {}, self.where(begin), f"{self.where(begin)}: {cells}")
                        here = after
                        break
                    begin = here._replace(offset=first.offset, line=first.number)
                    here = Position(self.index, here.number + 1, last.end, last.number + 1)
                    yield self._row(cells, begin, here)
                else:
                    break
        except OSError as e:
            raise DataError(f"input can't be read: {self.name} ({e.strerror})") from None
        self.check_unchanged()

    def _row(self, cells: list[str], here: Position, after: Position) -> Row:
        values = dict(zip(self.columns, cells, strict=False))
        row = Row(here, after, jsontext.members(values).encode(), values, self.where(here))
        if len(cells) != len(self.columns):
            row.error = f"{row.where}: {_count(len(cells))}, the header has {len(self.columns)}"
        return row

    def _records(self, start: Position) -> Iterator[tuple[list[str] | _Unreadable, RawLine, RawLine]]:
        """Records with their first and last physical line; stops after an unreadable one."""
        taken: list[RawLine] = []
        size = 0

        def text() -> Iterator[str]:
            nonlocal size
            for line in raw_lines(self.path, start.offset, start.line):
                taken.append(line)
                size += len(line.data)
                if not line.complete or size > MAX_LINE:
                    raise _Unreadable(f"longer than {MAX_LINE >> 20} MB" + _unclosed(taken))
                try:
                    yield line.data.decode(self.encoding)
                except UnicodeDecodeError as e:
                    raise _Unreadable(
                        f"not {self.encoding} (byte {e.start + 1} is 0x{line.data[e.start]:02x}): see --encoding"
                    ) from None

        reader = csv.reader(text(), delimiter=self.delimiter, strict=True)
        while True:
            taken.clear()
            size = 0
            try:
                cells = next(reader)
            except StopIteration:
                return
            except _Unreadable as e:
                yield e, taken[0], taken[-1]
                return
            except csv.Error as e:
                why = "a quote is never closed" if "unexpected end of data" in str(e) else f"not CSV ({e})"
                yield _Unreadable(why), taken[0], taken[-1]
                return
            blank = not cells or (len(cells) == 1 and not cells[0].strip() and len(self.columns) != 1)
            if not blank:
                yield cells, taken[0], taken[-1]

    def _header(self) -> Position:
        """Reads `columns`; returns where the rows begin."""
        for cells, _, last in self._records(self.start):
            if isinstance(cells, _Unreadable):
                raise DataError(f"the header of {self.name} can't be read: {cells}")
            self.columns = tuple(cells)
            for name in cells:
                if cells.count(name) > 1:
                    raise DataError(f"{self.name} has two columns named {json.dumps(name)}", "rename one of them")
            if len(cells) == 1 and not self._delimiter_given and any(d in cells[0] for d in ";\t|"):
                found = next(d for d in ";\t|" if d in cells[0])
                raise UsageError(
                    f"{self.name} has one column, named {cells[0]!r}", f"is it separated by --delimiter {found!r}?"
                )
            return Position(self.index, 0, last.end, last.number + 1)
        return self.start


def _count(n: int) -> str:
    return f"{n} cell" if n == 1 else f"{n} cells"


def _unclosed(lines: list[RawLine]) -> str:
    return ", a quote may not be closed" if len(lines) > 1 else ""
