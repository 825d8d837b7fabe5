"""From committed parts to the output: in input order, whole, and at once."""

import csv
import io
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from anyrig.batch import jsontext
from anyrig.batch.ledger import Committed, Ledger
from anyrig.batch.parts import ADDED, ArrowPart, JsonPart, PartWriter
from anyrig.batch.source import Source
from anyrig.batch.storage import creating, sync_directory, writing
from anyrig.batch.target import Target
from anyrig.core.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

_FILE_ROWS = 50_000  # of a directory's part files


@dataclass(frozen=True, slots=True)
class Layout:
    """What the output looks like, as far as it is fixed before the first row.

    Attributes:
        format: jsonl, csv or parquet.
        added: names of the added columns.
        added_types: their JSON types as far as they are known beforehand (`arrow_types.py`).
        schema: Arrow schema of the input columns, when all inputs are Parquet and so is the output.
    """

    format: str
    added: Sequence[str]
    added_types: Mapping[str, Any] = field(default_factory=dict)
    schema: "pa.Schema | None" = None

    def part_writer(self) -> PartWriter:
        if self.schema is not None:
            return ArrowPart()
        track = {"jsonl": "nothing", "csv": "columns", "parquet": "types"}[self.format]
        return JsonPart(self.added, track)  # type: ignore[arg-type]


def layout_of(
    target: Target, sources: Sequence[Source], added: Sequence[str], added_types: Mapping[str, Any]
) -> Layout:
    """Raises: UsageError when Parquet inputs disagree about a column's type."""
    parquet = all(type(s).__name__ == "ParquetFile" for s in sources)
    format = target.format or ("parquet" if parquet else "jsonl")
    schema = _common_schema(sources) if parquet and format == "parquet" else None
    return Layout(format, added, added_types, schema)


def assemble(ledger: Ledger, target: Target, layout: Layout) -> None:
    """Put the output together and move it into place; until then an older output stays as it is.

    Raises:
        DataError: when there is no room for it; the parts stay.
    """
    assert target.path is not None
    parts = ledger.in_order()
    built = ledger.directory / "output"
    if built.is_dir():  # of an assembly that was interrupted
        shutil.rmtree(built)
    with writing(target.path):
        if target.kind == "file":
            with creating(built) as file:
                _write(file, ledger, parts, layout)
        else:
            built.mkdir()
            for number, group in enumerate(_groups(parts)):
                with creating(built / f"part-{number:05}.{layout.format}") as file:
                    _write(file, ledger, group, layout, all_parts=parts)
            if target.path.exists():
                # A directory can't be replaced by a rename: for a moment there is none, but never half of one.
                shutil.rmtree(replaced := ledger.directory / "replaced", ignore_errors=True)
                target.path.rename(replaced)
        built.rename(target.path)
        sync_directory(target.path.parent)


def _groups(parts: list[Committed]) -> Iterator[list[Committed]]:
    group: list[Committed] = []
    for part in parts:
        group.append(part)
        if sum(p.tally.rows for p in group) >= _FILE_ROWS:
            yield group
            group = []
    if group:
        yield group


def _write(
    file: IO[bytes], ledger: Ledger, parts: list[Committed], layout: Layout, all_parts: list[Committed] | None = None
) -> None:
    """`all_parts`: those that decide about columns and types, when `parts` are only some of them."""
    paths = [ledger.parts / p.part for p in parts]
    if layout.format == "jsonl":
        for path in paths:
            with path.open("rb") as part:
                shutil.copyfileobj(part, file, 1 << 20)
    elif layout.format == "csv":
        columns = dict.fromkeys(c for p in all_parts or parts for c in p.columns)
        _write_csv(file, paths, [*columns, *layout.added])
    else:
        _write_parquet(file, paths, all_parts or parts, layout)


def _write_csv(file: IO[bytes], paths: list[Path], columns: list[str]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for path in paths:
        for row in _json_rows(path):
            writer.writerow([_cell(row.get(c)) for c in columns])
    text.detach()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (str, jsontext.Number)):
        return str(value)
    return jsontext.dumps(value)


def _write_parquet(file: IO[bytes], paths: list[Path], deciding: list[Committed], layout: Layout) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from anyrig.batch.arrow_types import arrow_type, merge_columns, to_arrow

    types: dict[str, Any] = {}
    for part in deciding:
        merge_columns(types, part.types)
    merge_columns(types, layout.added_types)
    inputs = [] if layout.schema is not None else dict.fromkeys(c for p in deciding for c in p.columns)
    fields = [pa.field(c, arrow_type(types[c])) for c in [*inputs, *layout.added]]
    schema = pa.schema([*(layout.schema or []), *fields], metadata=layout.schema and layout.schema.metadata)
    with pq.ParquetWriter(file, schema) as writer:
        for path in paths:
            arrays: list[Any] = []
            if layout.schema is None:
                rows = list(_json_rows(path))
            else:
                with pa.ipc.open_stream(path) as stream:
                    table = stream.read_all()
                rows = [jsontext.loads(text) for text in table.column(ADDED).to_pylist()]
                arrays = [_column(table, f) for f in layout.schema]
            arrays += [to_arrow([row.get(f.name) for row in rows], types[f.name]) for f in fields]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _column(table: "pa.Table", wanted: "pa.Field") -> "pa.ChunkedArray":
    import pyarrow as pa

    at = table.schema.get_field_index(wanted.name)
    if at < 0:
        return pa.chunked_array([pa.nulls(table.num_rows, wanted.type)])
    column = table.column(at)
    if pa.types.is_dictionary(wanted.type):
        column = column.dictionary_encode()
    return column.cast(wanted.type) if column.type != wanted.type else column


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            yield jsontext.loads(line)


def _common_schema(sources: Sequence[Source]) -> "pa.Schema":
    import pyarrow as pa

    schemas = [s.schema for s in sources]  # type: ignore[attr-defined]
    try:
        common = pa.unify_schemas(schemas)
    except pa.ArrowException:
        kinds: dict[str, tuple[str, Any]] = {}
        for source, schema in zip(sources, schemas, strict=True):
            for f in schema:
                name, kind = kinds.setdefault(f.name, (source.name, f.type))
                if kind != f.type and not pa.types.is_null(f.type) and not pa.types.is_null(kind):
                    raise UsageError(
                        f"column {json.dumps(f.name)} is {kind} in {name} and {f.type} in {source.name}",
                        "write to .jsonl, or run the files one by one",
                    ) from None
        raise UsageError("the Parquet inputs have different schemas", "write to .jsonl") from None
    # A file that lacks a column gives nulls in it, whatever the others say about nullability.
    return pa.schema([f.with_nullable(True) for f in common], metadata=schemas[0].metadata)
