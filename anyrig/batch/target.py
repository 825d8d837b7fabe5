"""Where the results go: a file, a directory of part files, or stdout; checked before anything is spent."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from anyrig.batch.config import BatchConfig
from anyrig.batch.storage import check_writable
from anyrig.core.errors import DataError, UsageError

_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet", ".pq": "parquet"}
_SUPPORTED = ".jsonl .csv .parquet, a directory (ends in /), or - for JSONL on stdout"


@dataclass(frozen=True, slots=True)
class Target:
    """The output.

    Attributes:
        path: resolved; None is stdout.
        format: of the file or of a directory's part files; None: as the first input.
    """

    path: Path | None
    kind: Literal["file", "directory", "stdout"]
    format: str | None

    @property
    def shown(self) -> str:
        if self.path is None:
            return "stdout"
        text = str(self.path.relative_to(Path.cwd()) if self.path.is_relative_to(Path.cwd()) else self.path)
        return text + "/" if self.kind == "directory" else text


def target_of(config: BatchConfig) -> Target:
    """The output that `-o` names, after checking that it can be written there.

    Raises:
        UsageError: no output, an unknown format, a directory that doesn't exist, a finished output.
        DataError: a directory that can't be written.
    """
    given = config.output
    if given is None:
        raise UsageError("no output", "give a file with -o out.jsonl, or - for stdout")
    if given == "-":
        if config.output_format not in (None, "jsonl"):
            raise UsageError(f"stdout takes JSONL only. Given: --output-format {config.output_format}")
        return Target(None, "stdout", "jsonl")
    try:
        return _file_or_directory(given, Path(given).expanduser().resolve(), config)
    except PermissionError as e:
        raise DataError(
            f"the output can't be written: {given} ({e.strerror})", "choose another place with -o"
        ) from None


def _file_or_directory(given: str, path: Path, config: BatchConfig) -> Target:
    if given.endswith("/") or (path.is_dir() and path.suffix.lower() not in _FORMATS):
        target = Target(path, "directory", config.output_format)
    else:
        format = config.output_format or _FORMATS.get(path.suffix.lower())
        if format is None:
            shown = path.suffix or "without extension"
            raise UsageError(f"output format {shown!r} of {given} is not supported", f"supported are {_SUPPORTED}")
        target = Target(path, "file", format)
    _check(target, config)
    return target


def _check(target: Target, config: BatchConfig) -> None:
    path = target.path
    assert path is not None
    if not path.parent.is_dir():
        raise UsageError(f"the output's directory does not exist: {path.parent}", f"mkdir -p {path.parent}")
    check_writable(path.parent, "the output's directory")
    if not path.exists():
        return
    if target.kind == "file" and path.is_dir():
        raise UsageError(f"{target.shown} is a directory", "end it with / to get part files, or name another file")
    if target.kind == "directory" and not path.is_dir():
        raise UsageError(f"{target.shown[:-1]} is a file", "leave out the / or name another directory")
    if target.kind == "directory":
        foreign = [p.name for p in path.iterdir() if not p.name.startswith("part-")]
        if foreign:
            raise UsageError(f"{target.shown} holds other files ({foreign[0]})", "choose a new directory with -o")
        if not any(path.iterdir()):
            return
    if not config.overwrite:
        raise UsageError(f"{target.shown} exists", "--overwrite replaces it, -o writes elsewhere")


def clash(columns: Sequence[str], added: Sequence[str]) -> str | None:
    """Why the input's columns can't stand beside the added ones, or None."""
    both = [name for name in added if name in columns]
    if not both:
        return None
    which = f"columns named {', '.join(both)}" if len(both) > 1 else f"a column named {both[0]}"
    return f"the input has {which}, which the output adds: --output-prefix model_ renames the added ones"
