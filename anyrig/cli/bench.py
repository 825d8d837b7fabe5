"""`anyrig bench`: how fast a model runs here."""

import json
from typing import Annotated, Literal

import typer

from anyrig.cli.console import console
from anyrig.cli.options import Settings, configured
from anyrig.core.config import EngineConfig
from anyrig.core.errors import UsageError

bench = typer.Typer(no_args_is_help=True, help="Measure how fast a model runs here.")


@bench.callback()
def _verbs() -> None:
    """Measure how fast a model runs here."""


@bench.command()
@configured(EngineConfig, defaults={"enable_prefix_caching": False})
def throughput(
    settings: Settings,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="known name, hub id, directory or .gguf file")],
    n: Annotated[int, typer.Option("--n", help="requests, all at once")] = 32,
    prompt: Annotated[int, typer.Option("--prompt", help="tokens of each prompt")] = 128,
    gen: Annotated[int, typer.Option("--gen", help="tokens generated for each")] = 128,
    engine: Annotated[
        Literal["anyrig", "transformers"], typer.Option(help="ours, or Transformers' static-batch generate")
    ] = "anyrig",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON line")] = False,
) -> int:
    """Generated tokens per second over the whole work, prefill included; the better of two passes after a warm-up.

    Prompts are random token ids, sampling is greedy, end tokens are ignored.
    """
    for name, value in (("--n", n), ("--prompt", prompt), ("--gen", gen)):
        if value < 1:
            raise UsageError(f"{name} must be at least 1. Given: {value}")
    config = settings.build(EngineConfig)
    from anyrig.bench.throughput import measure_engine, measure_transformers
    from anyrig.bench.work import Work

    console.status(f"measuring {model} with {engine}")
    measure = measure_engine if engine == "anyrig" else measure_transformers
    result = measure(model, Work(n, prompt, gen), config)
    if as_json:
        print(json.dumps(result))
        return 0
    ttft = f"  mean time to first token {result['ttft_mean_s']:.2f} s" if result["ttft_mean_s"] else ""
    print(f"{result['variant']}")
    print(f"{n} requests of {prompt} + {gen} tokens: {result['tokens_per_s']:.1f} tokens/s{ttft}")
    return 0
