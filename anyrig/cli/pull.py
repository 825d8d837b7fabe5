"""`anyrig pull MODEL`: fetch a model once; prints its directory."""

import json
import sys
from typing import Annotated

import typer

from anyrig.models.locate import resolve


def pull(
    model: Annotated[str, typer.Argument(help="alias, hub id (org/name), directory or .gguf file", metavar="MODEL")],
    as_json: Annotated[bool, typer.Option("--json", help='print {"path": ...}')] = False,
    offline: Annotated[bool, typer.Option("--offline", help="take only what is on this machine")] = False,
) -> None:
    """Fetch a model and convert it when needed; prints the directory that holds it."""
    path = resolve(model, offline=offline, progress=lambda line: print(line, file=sys.stderr, flush=True)).path
    print(json.dumps({"path": str(path)}) if as_json else path)
