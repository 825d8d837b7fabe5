"""`anyrig models`: the known names, what is cached and what is prepared; `anyrig models rm NAME` deletes."""

import json
import sys
from typing import Annotated

import typer

from anyrig.cli.console import console
from anyrig.core.errors import UsageError
from anyrig.models import cache, listing

app = typer.Typer(add_completion=False, rich_markup_mode=None, invoke_without_command=True)


@app.callback()
def show(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="print a list of objects")] = False,
) -> None:
    """List the known names, the models that are cached and what is prepared of them, with their sizes on disk."""
    if context.invoked_subcommand is not None:
        return
    rows = listing.list_models()
    if as_json:
        print(json.dumps([row.as_dict() for row in rows], indent=2))
    elif sys.stdout.isatty():
        _table(rows)
    else:
        for row in rows:
            print(row.name, row.bytes or "-", row.path or "-", sep="\t")


@app.command("rm")
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="as `anyrig models` shows it")],
    prepared: Annotated[
        bool, typer.Option("--prepared", help="only what is prepared of it; made anew at the next start")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
) -> int:
    """Delete a model from the cache, and what is prepared of it."""
    found = listing.find_cached(name, only_prepared=prepared)
    size = _megabytes(sum(row.bytes or 0 for row in found))
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"deleting {name} needs a yes, and there is nobody to ask", "give --yes")
        if not typer.confirm(f"Delete {name} ({size}, {', '.join(str(row.path) for row in found)})?", err=True):
            console.note("nothing was deleted")
            return 1
    for row in found:
        listing.remove(row)
    console.note(f"{name}: {size} freed")
    return 0


def _table(rows: list[listing.Listed]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("name", box=None, header_style="bold", pad_edge=False)
    table.add_column("on disk", justify="right")
    table.add_column("what it is", overflow="fold")
    for row in rows:
        style = None if row.path else "dim"
        table.add_row(row.name, _megabytes(row.bytes) if row.bytes else "-", row.about, style=style)
    screen = Console(highlight=False)
    screen.print(table)
    screen.print(f"cache: {cache.models_dir()}", style="dim", soft_wrap=True)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
