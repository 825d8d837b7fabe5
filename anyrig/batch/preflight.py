"""What can be known to be wrong before the model is loaded."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from anyrig.batch.prompt import Prompt
from anyrig.batch.source import Source
from anyrig.batch.target import clash
from anyrig.batch.template import MissingColumn
from anyrig.core.errors import AnyrigError, DataError, UsageError

_FILES = 50  # looked into; the rows of the others speak for themselves
_ROWS = 20  # of JSON Lines, where each row brings its own columns


def check(sources: Sequence[Source], prompt: Prompt, added: Sequence[str]) -> None:
    """Try the template and the added columns' names on the first rows.

    Raises:
        DataError: no input has a row.
        UsageError: a column that the template names is nowhere, or an input column has an added one's name.
    """
    empty = True
    for source in sources:
        looked_at = 1 if source.columns is not None else _ROWS
        rows = list(islice(source.rows(source.start), looked_at))
        empty = empty and not rows
        columns = list(source.columns or dict.fromkeys(c for row in rows for c in row.values))
        if not rows:
            continue
        prompt.check_columns(columns)
        if why := clash(columns, added):
            raise UsageError(f"{source.name}: {why}")
        missing: list[str] = []
        readable = [row for row in rows if row.error is None]
        for row in readable:
            try:
                prompt.messages(row.values)
            except MissingColumn as e:
                missing.append(f"{row.where}: {e.message}")
            except AnyrigError:
                pass  # this row's own trouble; it gets an error cell
        if missing and len(missing) == len(readable):
            raise UsageError(missing[0])
        if not empty and source.index >= _FILES:
            break
    if empty:
        names = [Path(s.name).name if len(sources) > 1 else s.name for s in sources]
        raise DataError(f"no rows in {', '.join(names[:5])}" + (", ..." if len(names) > 5 else ""))
