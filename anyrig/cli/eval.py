"""`anyrig eval`: how good a model is."""

import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from anyrig.cli.console import console
from anyrig.cli.options import Settings, configured
from anyrig.core.config import EngineConfig, Quantize
from anyrig.core.errors import AnyrigError, DataError, UsageError

if TYPE_CHECKING:
    from anyrig.bench.perplexity import Perplexity

evaluate = typer.Typer(no_args_is_help=True, help="Measure how good a model is.")


@evaluate.callback()
def _verbs() -> None:
    """Measure how good a model is."""


@evaluate.command()
@configured(EngineConfig, skip=("quantize",), defaults={"enable_prefix_caching": False, "max_batch_tokens": 512})
def perplexity(
    settings: Settings,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="known name, hub id, directory or .gguf file")],
    text: Annotated[
        Path | None,
        typer.Option(
            "--text", metavar="FILE", help="UTF-8 text [four chapters of The Time Machine]", show_default=False
        ),
    ] = None,
    window: Annotated[int, typer.Option("--window", help="tokens that are seen together")] = 512,
    stride: Annotated[
        int | None, typer.Option("--stride", help="tokens from one window to the next [half a window]")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", help="take only this many tokens of the text", show_default=False)
    ] = None,
    quantize: Annotated[
        str,
        typer.Option(
            "--quantize",
            metavar="KIND,KIND,...",
            help=f"weights: {', '.join(get_args(Quantize))}; several are compared with the first; all: whatever runs",
        ),
    ] = "none",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON line")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="write the result as JSON as well", show_default=False),
    ] = None,
) -> int:
    """Perplexity of a text, for one or several kinds of weights.

    Windows overlap, and each token counts once, in the first window that reaches it: with the defaults, all but the
    first 512 have at least 256 tokens before them.
    """
    for option, value, least in (("window", window, 2), ("stride", stride, 1), ("limit", limit, 2)):
        if value is not None and value < least:
            raise UsageError(f"--{option} must be at least {least}. Given: {value}")
    stride = stride or max(1, window // 2)
    if stride > window:
        raise UsageError(f"--stride ({stride}) must not exceed --window ({window})", "tokens between would be left out")
    if output is not None and not output.expanduser().absolute().parent.is_dir():
        raise UsageError(f"--output: there is no directory {output.parent}")
    config = settings.build(EngineConfig)
    try_all = quantize.strip() == "all"
    kinds = get_args(Quantize) if try_all else [kind.strip() for kind in quantize.split(",")]
    configs = [_quantized(config, kind) for kind in kinds]
    from anyrig.bench import perplexity as measurement
    from anyrig.bench import report

    name, content = measurement.read_text(text)
    measured: list[tuple[str, str, Perplexity]] = []
    for one in configs:
        try:
            measured.append(_measure(model, one, content, window, stride, limit))
        except AnyrigError as error:
            if not try_all or one.quantize == "none":
                raise
            console.note(f"{one.quantize} is left out: {error}")
        gc.collect()  # the engine's weights, before the next one's
    result = measurement.result(model, name, content, window, stride, measured)
    console.clear()
    if output is not None:
        try:
            output.expanduser().write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise DataError(f"cannot write {output} ({error.strerror})") from None
    print(json.dumps(result) if as_json else report.perplexity(result))
    return 0


def _quantized(config: EngineConfig, kind: str) -> EngineConfig:
    if kind not in get_args(Quantize):
        raise UsageError(f"--quantize knows no {kind!r}", f"it takes {', '.join(get_args(Quantize))}, or all")
    return replace(config, quantize=kind)  # type: ignore[arg-type]


def _measure(
    model: str, config: EngineConfig, text: str, window: int, stride: int, limit: int | None
) -> "tuple[str, str, Perplexity]":
    """Kind of weights, what ran, and the result."""
    from anyrig.bench.perplexity import measure
    from anyrig.bench.subject import Subject

    subject = Subject(model, config, progress=console.status)
    console.status(f"{model}, {subject.kind}: reading the text")
    ids: Sequence[int] = subject.engine.tokenizer.encode(text, add_special_tokens=False)
    return subject.kind, subject.engine.describe(), measure(subject.engine, ids[:limit], window, stride)
