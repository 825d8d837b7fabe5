"""`anyrig bench`: how fast a model runs here."""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from anyrig.cli.console import console
from anyrig.cli.options import Settings, configured
from anyrig.core.config import EngineConfig
from anyrig.core.errors import DataError, UsageError

if TYPE_CHECKING:
    from anyrig.bench.ceilings import Ceilings
    from anyrig.bench.subject import Subject
    from anyrig.bench.work import Work

bench = typer.Typer(no_args_is_help=True, help="Measure how fast a model runs here.")

# Nothing is to be found in the cache that an earlier pass left there.
_DEFAULTS = {"enable_prefix_caching": False}

_Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="known name, hub id, directory or .gguf file; with --random-weights also a shape"
    ),
]
_Prompt = Annotated[int, typer.Option("--prompt", help="tokens of each prompt, random ids")]
_Gen = Annotated[int, typer.Option("--gen", help="tokens generated for each")]
_Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help='prompts instead of random ids: .jsonl with "prompt", or a text with one per line; from the start again '
        "when there are fewer than requests",
        show_default=False,
    ),
]
_Repeats = Annotated[int, typer.Option("--repeats", help="passes after the warm-up")]
_Random = Annotated[
    bool,
    typer.Option(
        "--random-weights",
        help="MODEL is a config.json, a directory with one, or a known shape such as llama-1.1b; weights of --seed",
    ),
]
_WithCeilings = Annotated[
    bool, typer.Option("--ceilings", help="measure memory and matrix products too, and say what share was reached")
]
_Json = Annotated[bool, typer.Option("--json", help="one JSON line")]
_Out = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="write the result as JSON as well", show_default=False),
]
_Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="draw a picture: .png or .svg", show_default=False)
]


@bench.callback()
def _verbs() -> None:
    """Measure how fast a model runs here."""


@bench.command()
@configured(EngineConfig, defaults=_DEFAULTS)
def throughput(
    settings: Settings,
    model: _Model,
    n: Annotated[
        int | None, typer.Option("--n", help="requests, all at once [32, or one for each of --prompts]")
    ] = None,
    prompt: _Prompt = 128,
    gen: _Gen = 128,
    prompts: _Prompts = None,
    engine: Annotated[
        Literal["anyrig", "transformers"], typer.Option(help="ours, or Transformers' static-batch generate")
    ] = "anyrig",
    repeats: _Repeats = 2,
    random_weights: _Random = False,
    ceilings: _WithCeilings = False,
    as_json: _Json = False,
    output: _Out = None,
) -> int:
    """Generated tokens per second.

    Over the whole work, prefill included. The best pass counts; median and spread of all are beside it. Sampling is
    greedy, end tokens are ignored.
    """
    _check(n=n, prompt=prompt, gen=gen, repeats=repeats)
    config = settings.build(EngineConfig)
    work = _work(n, prompt, gen, prompts)
    _check_output(output)
    path = _path(model, config, random_weights)
    from anyrig.bench import report
    from anyrig.bench import throughput as measurement

    console.status(f"measuring {model} with {engine}")
    if engine == "transformers":
        limits = _ceilings(config) if ceilings else None
        result = measurement.measure_transformers(path, work, config, repeats=repeats, ceilings=limits, label=model)
    else:
        subject = _subject(path, config, model)
        passes = measurement.measure(subject, work, repeats)
        result = measurement.result(subject, work, passes, _ceilings(config) if ceilings else None)
    return _finish(result, report.throughput, as_json, output)


@bench.command()
@configured(EngineConfig, defaults=_DEFAULTS)
def latency(
    settings: Settings,
    model: _Model,
    n: Annotated[
        int | None, typer.Option("--n", help="requests in all [4 times --concurrency, or one for each prompt]")
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", help="requests in flight")] = 1,
    prompt: _Prompt = 128,
    gen: _Gen = 64,
    prompts: _Prompts = None,
    repeats: _Repeats = 2,
    random_weights: _Random = False,
    ceilings: _WithCeilings = False,
    as_json: _Json = False,
    output: _Out = None,
) -> int:
    """Time to the first token, and between tokens.

    A closed loop with others in flight: a request that ends is followed by the next one at once. Quantiles are over
    all passes.
    """
    _check(n=n, concurrency=concurrency, prompt=prompt, gen=gen, repeats=repeats)
    config = settings.build(EngineConfig)
    work = _work(n, prompt, gen, prompts, default=4 * concurrency)
    if concurrency > work.n:
        raise UsageError(f"--concurrency is {concurrency}, but there are only {work.n} requests", "raise --n")
    _check_output(output)
    path = _path(model, config, random_weights)
    from anyrig.bench import latency as measurement
    from anyrig.bench import report

    subject = _subject(path, config, model)
    passes = measurement.measure(subject, work, concurrency, repeats)
    result = measurement.result(subject, work, concurrency, passes, _ceilings(config) if ceilings else None)
    return _finish(result, report.latency, as_json, output)


@bench.command()
@configured(EngineConfig, defaults=_DEFAULTS)
def sweep(
    settings: Settings,
    model: _Model,
    n: Annotated[str, typer.Option("--n", metavar="N,N,...", help="batch sizes")] = "1,2,4,8,16,32",
    prompt: _Prompt = 128,
    gen: _Gen = 128,
    prompts: _Prompts = None,
    repeats: _Repeats = 2,
    random_weights: _Random = False,
    ceilings: _WithCeilings = False,
    plot: _Plot = None,
    as_json: _Json = False,
    output: _Out = None,
) -> int:
    """Throughput over batch sizes.

    The model is loaded once, passes go through all sizes in turn. --plot draws tokens/s over the size, with the
    machine's ceilings as lines.
    """
    sizes = _sizes(n)
    _check(prompt=prompt, gen=gen, repeats=repeats)
    config = settings.build(EngineConfig)
    work = _work(max(sizes), prompt, gen, prompts)
    _check_output(output)
    if plot is not None:
        from anyrig.bench.plot import check_plot

        check_plot(plot)
    path = _path(model, config, random_weights)
    from anyrig.bench import report
    from anyrig.bench import sweep as measurement

    subject = _subject(path, config, model)
    passes = measurement.measure(subject, work, sizes, repeats, console.status)
    result = measurement.result(subject, work, passes, _ceilings(config) if ceilings or plot else None)
    if plot is not None:
        from anyrig.bench.plot import plot_sweep

        plot_sweep(result, plot)
    return _finish(result, report.sweep, as_json, output)


@bench.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="a result that -o wrote, or any program's JSON line")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="another one of the same work")],
    plot: _Plot = None,
    as_json: _Json = False,
    output: _Out = None,
) -> int:
    """Ratios of two results of the same work.

    Of every measure that both have; of sweeps, for every batch size that both have.
    """
    _check_output(output)
    from anyrig.bench import report
    from anyrig.bench.compare import compare as put_together
    from anyrig.bench.compare import names, read

    if plot is not None:
        from anyrig.bench.plot import check_plot

        check_plot(plot)
    comparison = put_together(read(a), read(b), names(a, b))
    if plot is not None:
        from anyrig.bench.plot import plot_compare

        plot_compare(comparison, plot)
    return _finish(comparison.to_dict(), lambda _: report.compare(comparison), as_json, output)


@bench.command()
@configured(EngineConfig, skip=[f.name for f in fields(EngineConfig) if f.name not in ("threads", "device")])
def ceilings(settings: Settings, as_json: _Json = False, output: _Out = None) -> int:
    """What the machine itself can do.

    Reading memory, and matrix products in bfloat16, int8 and float32.
    """
    config = settings.build(EngineConfig)
    _check_output(output)
    from anyrig.bench import report

    limits = _ceilings(config)
    return _finish({"what": "ceilings", **limits.to_dict()}, lambda _: report.ceilings(limits), as_json, output)


def _check(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1. Given: {value}")


def _work(n: int | None, prompt: int, gen: int, file: Path | None, default: int = 32) -> "Work":
    from anyrig.bench.work import Work, read_texts

    texts = read_texts(file) if file is not None else ()
    return Work(n or len(texts) or default, prompt, gen, texts)


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"--n must be batch sizes of at least 1, separated by commas. Given: {text}")
    return sorted({int(part) for part in parts})


def _path(model: str, config: EngineConfig, random_weights: bool) -> str:
    """What the engine loads: MODEL itself, or the directory of a model made up for it."""
    if not random_weights:
        return model
    from anyrig.bench.random_model import random_model

    return str(random_model(model, seed=config.seed, progress=_say))


def _subject(path: str, config: EngineConfig, label: str) -> "Subject":
    from anyrig.bench.subject import Subject

    return Subject(path, config, label=label, progress=console.status)


def _ceilings(config: EngineConfig) -> "Ceilings":
    from anyrig.bench.ceilings import measure
    from anyrig.engine.runner import pick_device
    from anyrig.hardware import cpu

    console.status("measuring the machine's ceilings")
    return measure(config.threads or cpu.read().cores, pick_device(config.device))


def _say(text: str) -> None:
    """Sizes before they are written are told off a terminal too; how far it is only moves on one."""
    if text.endswith("(once)"):
        console.note(text)
    else:
        console.status(text)


def _check_output(output: Path | None) -> None:
    if output is not None and not output.expanduser().absolute().parent.is_dir():
        raise UsageError(f"--output: there is no directory {output.parent}")


def _finish(
    result: Mapping[str, Any], table: Callable[[Mapping[str, Any]], str], as_json: bool, output: Path | None
) -> int:
    """Print the result and write it where it was asked for."""
    console.clear()
    if output is not None:
        try:
            output.expanduser().write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise DataError(f"cannot write {output} ({error.strerror})") from None
    print(json.dumps(result) if as_json else table(result))
    return 0
