"""Reader of Parquet: every column keeps its Arrow type, and is only decoded when the template asks for it."""

import bisect
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from anyrig.batch import jsontext
from anyrig.batch.row import Position, Row
from anyrig.batch.source import Payload, Source
from anyrig.core.errors import DataError

_BATCH_BYTES = 4 << 20  # decoded at a time, so that wide rows don't fill the memory
_BATCH_ROWS = 256


class ArrowRow(Mapping[str, Any]):
    """One row of a record batch; a cell becomes a Python object when it is read."""

    def __init__(self, batch: pa.RecordBatch, index: int) -> None:
        self._batch, self._index = batch, index

    def __getitem__(self, name: str) -> Any:
        at = self._batch.schema.get_field_index(name)
        if at < 0:
            raise KeyError(name)
        return self._batch.column(at)[self._index].as_py()

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch.schema.names)

    def __len__(self) -> int:
        return len(self._batch.schema.names)


class ParquetFile(Source):
    """Rows of one Parquet file; a position is a row number.

    Attributes:
        schema: the file's own.
        plain: the same without dictionary encoding, which serialised single rows cannot carry.
    """

    columns: tuple[str, ...]
    rows_known: int

    def __init__(self, index: int, path: Path, name: str | None = None) -> None:
        super().__init__(index, path, name)
        try:
            with pq.ParquetFile(path) as file:
                self.schema: pa.Schema = file.schema_arrow
                groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        except (pa.ArrowException, OSError) as e:
            raise DataError(f"{self.name} is not a Parquet file, or damaged ({_first_line(e)})") from None
        self._starts = [0, *accumulate(g.num_rows for g in groups)]
        self._group_bytes = [g.total_byte_size for g in groups]
        self.rows_known = self._starts[-1]
        self.columns = tuple(self.schema.names)
        for column in self.columns:
            if self.columns.count(column) > 1:
                raise DataError(f"{self.name} has two columns named {column!r}", "rename one of them")
        self.plain = pa.schema([f.with_type(_without_dictionary(f.type)) for f in self.schema])

    def where(self, position: Position) -> str:
        return f"{self.name}, row {position.line}"

    def consumed(self, position: Position) -> float:
        return position.number / self.rows_known if self.rows_known else 1.0

    def rows(self, start: Position, payload: Payload = "json") -> Iterator[Row]:
        number = start.number
        try:
            for batch in self._batches(number):
                batch = batch.cast(self.plain) if batch.schema != self.plain else batch
                for i in range(batch.num_rows):
                    here = Position(self.index, number, number, number + 1)
                    number += 1
                    values = ArrowRow(batch, i)
                    if payload == "arrow":
                        through = batch.slice(i, 1).serialize().to_pybytes()
                    else:
                        through = jsontext.members(values).encode()
                    yield Row(here, Position(self.index, number, number, number + 1), through, values, self.where(here))
        except (pa.ArrowException, OSError) as e:
            where = self.where(Position(self.index, number, number, number + 1))
            raise DataError(f"{where}: Parquet data is damaged ({_first_line(e)})") from None
        self.check_unchanged()

    def _batches(self, number: int) -> Iterator[pa.RecordBatch]:
        if number >= self.rows_known:
            return
        # A buffered stream without pre-buffering: a row group is decoded page by page, never held whole.
        with pq.ParquetFile(self.path, buffer_size=1 << 20, pre_buffer=False) as file:
            first = bisect.bisect_right(self._starts, number) - 1
            skip = number - self._starts[first]
            for group in range(first, len(self._group_bytes)):
                rows = self._starts[group + 1] - self._starts[group]
                if not rows:
                    continue
                size = max(1, min(_BATCH_ROWS, _BATCH_BYTES * rows // max(1, self._group_bytes[group])))
                for batch in file.iter_batches(size, row_groups=[group], use_threads=False):
                    if skip >= batch.num_rows:
                        skip -= batch.num_rows
                        continue
                    yield batch.slice(skip)
                    skip = 0


def _without_dictionary(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
