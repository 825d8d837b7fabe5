"""Readers of files that hold one row per line: JSON Lines and plain text."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from anyrig.batch import jsontext
from anyrig.batch.row import Position, Row
from anyrig.batch.source import Payload, Source
from anyrig.core.errors import DataError

MAX_LINE = 100 << 20  # bytes; a longer line is an error row, not a full memory
_BOM = b"\xef\xbb\xbf"


class RawLine(NamedTuple):
    """One physical line: its bytes with the newline, where it starts and ends in the file, its number from 1."""

    data: bytes
    offset: int
    end: int
    number: int
    complete: bool


def raw_lines(path: Path, offset: int, number: int) -> Iterator[RawLine]:
    """Lines from byte `offset` on, split at ``\\n`` only: other Unicode line separators are data.

    A line above `MAX_LINE` bytes comes cut, with `complete` False; the rest of it is skipped.
    """
    with path.open("rb") as file:
        file.seek(offset)
        while line := file.readline(MAX_LINE + 1):
            complete = len(line) <= MAX_LINE
            end, rest = offset + len(line), line
            while not complete and not rest.endswith(b"\n") and (rest := file.readline(MAX_LINE)):
                end += len(rest)
            yield RawLine(line.removeprefix(_BOM) if offset == 0 else line, offset, end, number, complete)
            offset, number = end, number + 1


class LineSource(Source):
    """Rows that end with the line. Lines of nothing but white space are no rows."""

    def __init__(self, index: int, path: Path, name: str | None = None, encoding: str = "utf-8") -> None:
        super().__init__(index, path, name)
        self.encoding = encoding

    def rows(self, start: Position, payload: Payload = "json") -> Iterator[Row]:
        number = start.number
        try:
            for line in raw_lines(self.path, start.offset, start.line):
                if line.complete and not line.data.strip():
                    continue
                here = Position(self.index, number, line.offset, line.number)
                after = Position(self.index, number + 1, line.end, line.number + 1)
                yield self._row(line, here, after)
                number += 1
        except OSError as e:
            raise DataError(f"input can't be read: {self.name} ({e.strerror})") from None
        self.check_unchanged()

    def _row(self, line: RawLine, here: Position, after: Position) -> Row:
        where = self.where(here)
        row = Row(here, after, b"", {}, where)
        if not line.complete:
            row.error = f"{where}: longer than {MAX_LINE >> 20} MB"
            return row
        try:
            text = line.data.rstrip(b"\r\n").decode(self.encoding)
        except UnicodeDecodeError as e:
            row.error = (
                f"{where}: not {self.encoding} (byte {e.start + 1} is 0x{line.data[e.start]:02x}): see --encoding"
            )
            return row
        try:
            row.values, inside = self._parse(text)
            row.payload = inside.encode()
        except (ValueError, RecursionError) as e:
            row.error = f"{where}: {e}"
        return row

    @abstractmethod
    def _parse(self, text: str) -> tuple[Mapping[str, Any], str]:
        """Columns, and the inside of the JSON object that passes them on.

        Raises:
            ValueError: saying what is wrong with the line.
        """


class JsonLines(LineSource):
    """One JSON object per line; its text goes into the output as it was written."""

    def _row(self, line: RawLine, here: Position, after: Position) -> Row:
        if here.number == 0 and (line.data.strip() == b"[" or line.data.lstrip().startswith(b"[{")):
            raise DataError(
                f"{self.name} is one JSON array, not JSON Lines",
                f"one object per line: jq -c '.[]' {self.path.name} > rows.jsonl",
            )
        return super()._row(line, here, after)

    def _parse(self, text: str) -> tuple[Mapping[str, Any], str]:
        try:
            value = jsontext.loads(text)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        except ValueError as e:
            at = f" at column {e.colno}" if hasattr(e, "colno") else ""
            raise ValueError(f"not JSON ({getattr(e, 'msg', e)}{at})") from None
        if not isinstance(value, dict):
            raise ValueError(f"a row must be a JSON object, this is a {_json_name(value)}")
        inside = text.strip()[1:-1].strip()
        try:
            inside.encode()
        except UnicodeEncodeError:
            raise ValueError("half a surrogate pair, which is no text") from None
        return value, inside


class TextLines(LineSource):
    """One row per line, in the column `text`."""

    columns = ("text",)

    def _parse(self, text: str) -> tuple[Mapping[str, Any], str]:
        values = {"text": text}
        return values, jsontext.members(values)


def _json_name(value: Any) -> str:
    names = {list: "list", str: "string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "number")
