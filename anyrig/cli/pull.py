"""`anyrig pull MODEL`: fetch a model once; prints its directory."""

import json
import sys
from typing import Annotated

import typer

from anyrig.cli.console import console, moving
from anyrig.models.locate import resolve


def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="known name, hub id, directory or .gguf file")],
    as_json: Annotated[bool, typer.Option("--json", help='print {"path": ...}')] = False,
    offline: Annotated[bool, typer.Option("--offline", help="take only what is on this machine")] = False,
) -> None:
    """Fetch a model and convert it when needed; prints the directory that holds it.

    What is there already is not fetched again.
    """
    # Waiting is all that happens here, so off a terminal too each stage is told, as a line of its own.
    progress = console.status if moving(sys.stderr) else console.note
    path = resolve(model, offline=offline, progress=progress).path
    console.clear()
    print(json.dumps({"path": str(path)}) if as_json else path)
