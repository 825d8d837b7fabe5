"""Part files: the rows of one range, written once, in the form from which the output is put together."""

from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol

from anyrig.batch import jsontext
from anyrig.batch.source import Payload, Source

if TYPE_CHECKING:
    from anyrig.batch.arrow_types import JsonType

Finished = tuple[bytes, dict[str, Any]]  # a row's payload and its added columns
ADDED = "\x00added"  # column of an Arrow part that holds the added columns as JSON


class PartWriter(Protocol):
    """How ranges are written.

    Attributes:
        payload: what readers have to hand over for it.
    """

    payload: Payload

    def write(
        self, file: IO[bytes], source: Source, rows: Iterable[Finished]
    ) -> tuple[list[str], "dict[str, JsonType]"]:
        """Write a part; returns the names of the input columns, and the types of columns (see `track`)."""
        ...


class JsonPart:
    """JSON Lines. The input's own text stands in front of the added columns, untouched."""

    payload: Payload = "json"

    def __init__(self, added: Sequence[str], track: Literal["nothing", "columns", "types"]) -> None:
        """`track`: CSV needs the columns of all rows for its header, Parquet their types for its schema too."""
        self._added = frozenset(added)
        self._track = track

    def write(
        self, file: IO[bytes], source: Source, rows: Iterable[Finished]
    ) -> tuple[list[str], "dict[str, JsonType]"]:
        columns: dict[str, None] = {}
        types: dict[str, JsonType] = {}
        for payload, added in rows:
            inside = payload + (b", " if payload else b"") + jsontext.members(added).encode()
            file.write(b"{" + inside + b"}\n")
            if self._track != "nothing":
                values = jsontext.loads("{" + inside.decode() + "}")
                columns.update(dict.fromkeys(k for k in values if k not in self._added))
                if self._track == "types":
                    _merge_into(types, values)
        return list(columns), types


class ArrowPart:
    """An Arrow stream: the input's columns with their types, and the added ones as JSON until their types are known."""

    payload: Payload = "arrow"

    def write(
        self, file: IO[bytes], source: Source, rows: Iterable[Finished]
    ) -> tuple[list[str], "dict[str, JsonType]"]:
        import pyarrow as pa

        from anyrig.batch.parquet import ParquetFile

        assert isinstance(source, ParquetFile)
        types: dict[str, JsonType] = {}
        batches, added = [], []
        for payload, columns in rows:
            batches.append(pa.ipc.read_record_batch(pa.py_buffer(payload), source.plain))
            added.append(jsontext.dumps(columns))
            _merge_into(types, jsontext.loads(added[-1]))
        table = pa.Table.from_batches(batches, source.plain).append_column(ADDED, pa.array(added, pa.string()))
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table.combine_chunks())
        return list(source.columns), types


def _merge_into(types: "dict[str, JsonType]", values: dict[str, Any]) -> None:
    from anyrig.batch.arrow_types import merge_columns, type_of

    merge_columns(types, {k: type_of(v) for k, v in values.items()})
