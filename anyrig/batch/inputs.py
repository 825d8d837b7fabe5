"""From what `-i` says to opened sources."""

import hashlib
import shutil
import sys
from pathlib import Path
from typing import BinaryIO

from anyrig.batch.config import BatchConfig
from anyrig.batch.lines import JsonLines, TextLines
from anyrig.batch.row import Position
from anyrig.batch.source import Source, find, format_of
from anyrig.batch.table import CsvFile
from anyrig.core.errors import UsageError


def open_inputs(config: BatchConfig, output: Path | None, spool: Path) -> list[Source]:
    """Sources for every input file, opened and with their headers read.

    Args:
        output: the output's path, which is never an input.
        spool: directory into which stdin is copied first: a pipe has no position to go on from.

    Raises:
        UsageError: for inputs that don't exist or have no known format.
        DataError: for files that are damaged from the start.
    """
    if not config.input:
        raise UsageError("no input", "give a file with -i rows.jsonl, or - for stdin")
    if "-" in config.input:
        if len(config.input) > 1:
            raise UsageError("stdin (-) can't be mixed with other inputs")
        return [_stdin(config, spool, sys.stdin.buffer)]
    files = find(config.input, output)
    return [_open(i, path, config.format or format_of(path), config, None) for i, path in enumerate(files)]


def _open(index: int, path: Path, format: str, config: BatchConfig, name: str | None) -> Source:
    if format == "parquet":
        from anyrig.batch.parquet import ParquetFile

        return ParquetFile(index, path, name)
    if format in ("csv", "tsv"):
        delimiter = config.delimiter or ("\t" if format == "tsv" else None)
        return CsvFile(index, path, name, config.encoding, delimiter)
    return (JsonLines if format == "jsonl" else TextLines)(index, path, name, config.encoding)


def _stdin(config: BatchConfig, spool: Path, stdin: BinaryIO) -> Source:
    if config.format is None:
        raise UsageError("stdin has no name that tells its format", "add --format jsonl, csv, tsv, parquet or txt")
    if stdin.isatty():
        print("anyrig: reading rows from the terminal; Ctrl-D ends them", file=sys.stderr)
    path = spool / f"stdin.{config.format}"
    with path.open("wb") as file:
        shutil.copyfileobj(stdin, file, 1 << 20)
    source = _open(0, path, config.format, config, "stdin")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # Two pipes are the same input when they carried the same bytes: the copy's own time says nothing.
    source.identity = lambda: {"name": "stdin", "size": source.size, "sha256": digest}  # type: ignore[method-assign]
    return source


class Consumption:
    """How much of the whole input lies before the reader, in shares of its bytes (or rows, for Parquet)."""

    def __init__(self, sources: list[Source]) -> None:
        self._sources = sources
        self._total = sum(s.size for s in sources)

    def share(self, at: Position) -> float:
        """Share of all input before `at`, 0 to 1."""
        if not self._total:
            return 1.0
        before = sum(s.size for s in self._sources[: at.source])
        here = self._sources[at.source]
        return min(1.0, (before + here.size * here.consumed(at)) / self._total)
