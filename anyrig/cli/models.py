"""`anyrig models`: what the model caches hold; `anyrig models rm NAME` deletes."""

import json
import sys
from typing import Annotated, Any

import typer

from anyrig.core.errors import ModelError
from anyrig.models import cache

app = typer.Typer(help="List the models in the cache; `rm` deletes one.", invoke_without_command=True)


@app.callback()
def models(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="print a list of {name, path, bytes, source}")] = False,
) -> None:
    """List the models in the cache, with their sizes on disk."""
    if context.invoked_subcommand is not None:
        return
    found = cache.cached_models()
    if as_json:
        print(json.dumps([{"name": m.name, "path": str(m.path), "bytes": m.bytes, "source": m.source} for m in found]))
    elif not found:
        print(f"no models in {cache.models_dir()}: `anyrig pull smollm2-135m` fetches one", file=sys.stderr)
    elif sys.stdout.isatty():
        _table(found)
    else:
        for model in found:
            print(model.name, model.bytes, model.path, sep="\t")


@app.command("rm")
def remove(
    name: Annotated[str, typer.Argument(help="as `anyrig models` shows it", metavar="NAME")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
) -> None:
    """Delete a model from the cache."""
    found = next((model for model in cache.cached_models() if model.name == name), None)
    if found is None:
        raise ModelError(f"No model in the cache is called {name!r}", "`anyrig models` lists them")
    if not yes:
        typer.confirm(f"Delete {name} ({_megabytes(found.bytes)}) from {found.path}?", abort=True, err=True)
    print(f"{name}: {_megabytes(cache.remove(name))} freed", file=sys.stderr)


def _table(found: list[cache.CachedModel]) -> None:
    from rich.console import Console
    from rich.table import Table

    table: Any = Table("name", box=None, header_style="bold")
    table.add_column("size", justify="right")
    table.add_column("from", overflow="fold")
    for model in found:
        table.add_row(model.name, _megabytes(model.bytes), model.source)
    console = Console()
    console.print(table)
    console.print(f"in {cache.models_dir()}", style="dim")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
