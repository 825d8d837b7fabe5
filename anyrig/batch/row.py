"""One row of a job: where it is, what it holds, and what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

RowKey = tuple[int, int]  # (source, row number in it): the identity of a row, whatever its columns hold


class Position(NamedTuple):
    """The place of a row. `(source, number)` is its identity; the rest lets a reader start there.

    Attributes:
        source: index of the input file.
        number: rows before this one in the file.
        offset: bytes before this row (text files); the same as `number` for Parquet.
        line: line on which the row starts, from 1 (text files); row number from 1 for Parquet.
    """

    source: int
    number: int
    offset: int
    line: int

    @property
    def key(self) -> RowKey:
        return (self.source, self.number)


@dataclass(slots=True)
class Row:
    """One input row.

    Attributes:
        next: where the following row begins (or the file ends).
        payload: the input columns as they go into the output: the inside of a JSON object, or one serialised Arrow
            record batch of one row; empty when the row could not be read.
        values: the columns for the template; empty when the row could not be read.
        where: file and line, for messages.
        error: why the row cannot be used, or None.
    """

    position: Position
    next: Position
    payload: bytes
    values: Mapping[str, Any]
    where: str
    error: str | None = None


@dataclass(slots=True)
class RowResult:
    """What came of one row.

    Attributes:
        added: the columns that are added to the input's.
        prompt_tokens, cached_tokens, output_tokens: what this row cost.
    """

    added: dict[str, Any]
    failed: bool = False
    skipped: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class Tally:
    """Counts over rows."""

    rows: int = 0
    failed: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def add(self, result: RowResult) -> None:
        self.rows += 1
        self.failed += result.failed
        self.skipped += result.skipped
        self.prompt_tokens += result.prompt_tokens
        self.cached_tokens += result.cached_tokens
        self.output_tokens += result.output_tokens

    def merge(self, other: "Tally") -> None:
        self.rows += other.rows
        self.failed += other.failed
        self.skipped += other.skipped
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens
