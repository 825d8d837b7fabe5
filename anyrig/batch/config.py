"""What a batch job is told: which rows, which prompt, where the results go."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from anyrig.core.config import option
from anyrig.core.errors import UsageError

Format = Literal["jsonl", "csv", "tsv", "parquet", "txt"]
OutputFormat = Literal["jsonl", "csv", "parquet"]
OnLong = Literal["error", "skip", "truncate-left", "truncate-right"]

MAX_TOKENS = 256  # batch's own default; a single prompt's 16 is too short for a column of results


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Options of one batch job.

    Raises:
        UsageError: naming the option, its value and the allowed range.
    """

    input: Sequence[str] = option(
        "files, directories or globs (.jsonl .ndjson .csv .tsv .parquet .txt); - is stdin; repeatable",
        (),
        metavar="PATH",
        short="-i",
    )
    output: str | None = option(
        "result file (.jsonl .csv .parquet), directory of part files (ends in /), or - for JSONL on stdout",
        metavar="PATH",
        short="-o",
    )
    prompt: str | None = option(
        "Jinja2 template over the row's columns, such as 'Translate: {{ text }}', or @FILE", metavar="TEMPLATE|@FILE"
    )
    system: str | None = option("system message, a template too, or @FILE", metavar="TEMPLATE|@FILE")
    messages_column: str | None = option("column that holds a list of {role, content}", metavar="NAME")
    raw: bool = option("give the prompt to the model as it is, without the chat template", False)
    schema: str | None = option("the output is JSON that satisfies this schema", metavar="JSON|FILE")
    on_long: OnLong = option(
        "a prompt longer than the context: an error row, a skipped row, or cut the row's longest column", "error"
    )
    limit: int | None = option("only this many rows, from the first one on")
    format: Format | None = option("format of the input where its name doesn't tell (stdin)")
    encoding: str = option("encoding of text inputs", "utf-8")
    delimiter: str | None = option("column separator of .csv inputs; unset: a comma, a tab in .tsv")
    output_format: OutputFormat | None = option(
        "format of a directory's part files; unset: parquet if the inputs are, else jsonl"
    )
    output_prefix: str = option("put before the names of the columns that are added", "")
    overwrite: bool = option("replace a finished output", False)
    fresh: bool = option("throw away what an interrupted run left, and start anew", False)
    dry_run: int | None = option("show the prompts of this many rows with their token counts, and leave", metavar="N")

    def __post_init__(self) -> None:
        for name in ("limit", "dry_run"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"`{name}` must be at least 1. Given: {value}")
        if self.delimiter is not None and len(self.delimiter) != 1:
            raise UsageError(f"`delimiter` must be one character. Given: {self.delimiter!r}")
        self._check_encoding()
        if self.prompt is not None and self.messages_column is not None:
            raise UsageError("only one of `prompt` and `messages_column` can be given")
        if self.raw and (self.system is not None or self.messages_column is not None):
            given = "system" if self.system is not None else "messages_column"
            raise UsageError(f"`raw` sends one plain text: `{given}` needs the chat template", "leave one of them out")

    def _check_encoding(self) -> None:
        # Readers split bytes at \n before they decode, so that a row's place in the file is known.
        try:
            plain = "\n,\"'".encode(self.encoding) == b"\n,\"'"
        except LookupError:
            raise UsageError(f"`encoding` is unknown: {self.encoding!r}", "such as utf-8, latin-1, cp1252") from None
        if not plain:
            raise UsageError(f"`encoding` {self.encoding!r} can't be read row by row", "convert the file with iconv")
