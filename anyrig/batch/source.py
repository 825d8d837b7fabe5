"""Input files: what was asked for, in which order, in which format, and what every reader offers."""

import glob
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from anyrig.batch.row import Position, Row
from anyrig.core.errors import DataError, UsageError

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".txt": "txt",
}
SUPPORTED = ".jsonl .ndjson .csv .tsv .parquet .txt"

Payload = Literal["json", "arrow"]


class Source(ABC):
    """One input file, read as a stream, from any row on.

    Attributes:
        index: its place among the inputs.
        name: what messages call it.
        columns: the columns that every row has, or None where each row brings its own (JSON Lines).
        rows_known: number of rows where the file says so.
    """

    columns: tuple[str, ...] | None = None
    rows_known: int | None = None

    def __init__(self, index: int, path: Path, name: str | None = None) -> None:
        self.index = index
        self.path = path
        self.name = name or str(path)
        try:
            stat = path.stat()
            with path.open("rb"):
                pass
        except OSError as e:
            raise UsageError(f"input can't be read: {self.name} ({e.strerror})") from None
        self.size, self.mtime_ns = stat.st_size, stat.st_mtime_ns

    @property
    def start(self) -> Position:
        return Position(self.index, 0, 0, 1)

    @abstractmethod
    def rows(self, start: Position, payload: Payload = "json") -> Iterator[Row]:
        """The rows from `start` on. A row that can't be read comes with its `error`; the next ones follow.

        Raises:
            DataError: when the file itself breaks (damaged Parquet, a disk that fails, a file that changed).
        """

    def where(self, position: Position) -> str:
        return f"{self.name}, line {position.line}"

    def consumed(self, position: Position) -> float:
        """Share of the file that lies before `position`."""
        return position.offset / self.size if self.size else 1.0

    def identity(self) -> dict[str, Any]:
        """What tells this file from a changed one."""
        return {"name": self.name, "path": str(self.path.resolve()), "size": self.size, "mtime_ns": self.mtime_ns}

    def check_unchanged(self) -> None:
        """Raises: DataError when the file is not the one that was opened."""
        try:
            stat = self.path.stat()
        except OSError as e:
            raise DataError(f"input vanished while it was read: {self.name} ({e.strerror})") from None
        if (stat.st_size, stat.st_mtime_ns) != (self.size, self.mtime_ns):
            raise DataError(
                f"input changed while it was read: {self.name}",
                "rows already done belong to the old file; start anew with --fresh once it is complete",
            )


def find(patterns: Sequence[str], output: Path | None) -> list[Path]:
    """The input files, in the order of the patterns and sorted within each; the output is never among them.

    Raises:
        UsageError: naming the pattern that matches nothing, or the file that is input and output at once.
    """
    found: dict[Path, Path] = {}
    for pattern in patterns:
        try:
            files = _matching(pattern, output)
        except PermissionError as e:
            raise UsageError(f"input {pattern} can't be read ({e.strerror})") from None
        for file in files:
            real = file.resolve()
            if output is None or (real != output and output not in real.parents):
                found.setdefault(real, file)
    if not found:
        raise UsageError(f"no input but the output itself: {', '.join(patterns)}")
    return list(found.values())


def _matching(pattern: str, output: Path | None) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        files = _inside(path)
        if not files:
            raise UsageError(f"no input in directory {pattern}", f"it must hold files named {SUPPORTED}")
    elif path.exists():
        files = [path]
        if output is not None and path.resolve() == output:
            raise UsageError(f"{pattern} is the input and the output", "write to another file with -o")
    else:
        files = [p for p in map(Path, sorted(glob.glob(str(path), recursive=True))) if p.is_file()]  # noqa: PTH207
        if not files:
            raise UsageError(f"input {pattern} {'matches no file' if glob.has_magic(pattern) else 'does not exist'}")
    return files


def format_of(path: Path) -> str:
    """Raises: UsageError for a name that tells no supported format."""
    suffix = path.suffix.lower()
    if suffix in FORMATS:
        return FORMATS[suffix]
    hint = f"supported are {SUPPORTED}; --format says what a file is"
    if suffix in (".gz", ".zst", ".bz2", ".xz"):
        hint = "decompress it first"
    elif suffix == ".json":
        hint = f"make it JSON Lines with `jq -c '.[]' {path.name}`, or say --format jsonl if it is that already"
    raise UsageError(f"input format {suffix or 'without extension'!r} of {path} is not supported", hint)


def _inside(directory: Path) -> list[Path]:
    def hidden(path: Path) -> bool:
        return any(part.startswith((".", "_")) for part in path.relative_to(directory).parts)

    return sorted(p for p in directory.rglob("*") if p.suffix.lower() in FORMATS and p.is_file() and not hidden(p))
