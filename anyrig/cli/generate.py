"""`anyrig generate`: one prompt or several, answered on stdout."""

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from anyrig.cli import drive
from anyrig.cli.console import console, moving, printable
from anyrig.cli.interrupt import Interrupt
from anyrig.cli.options import Settings, configured
from anyrig.cli.prompts import encode, gather
from anyrig.cli.wrap import Wrapper
from anyrig.core.config import EngineConfig
from anyrig.core.errors import AnyrigError
from anyrig.core.outputs import RequestOutput
from anyrig.core.params import SamplingParams


@configured(EngineConfig, SamplingParams, defaults={"max_tokens": 256})
def generate(
    settings: Settings,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="known name, hub id, directory or .gguf file")],
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="the prompt; - or nothing: stdin")] = None,
    prompts: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", metavar="TEXT", help="one more prompt; repeatable")
    ] = None,
    file: Annotated[
        list[Path] | None, typer.Option("--file", "-f", metavar="PATH", help="read a prompt from it; repeatable")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="system message")] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="use the model's chat template [if it has one] or not", show_default=False),
    ] = None,
    stream: Annotated[
        bool | None,
        typer.Option("--stream/--no-stream", help="show the text as it comes [on a terminal]", show_default=False),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="one JSON object per prompt: text, token ids, finish reason, usage, ...")
    ] = False,
) -> int:
    """Complete one prompt or several.

    The text goes to stdout; token counts, speed, and what ran go to stderr (-q: nothing).
    """
    texts = gather(prompt, prompts or [], file or [])
    config = settings.build(EngineConfig)
    settings.build(SamplingParams)  # a wrong flag is told before the model is loaded

    from anyrig.engine.engine import Engine

    console.status(f"loading {model}")
    engine = Engine(model, config, progress=console.status)
    params = settings.build(SamplingParams, engine.info.generation)
    ids = [encode(engine.tokenizer, text, chat=chat, system=system) for text in texts]
    console.clear()

    printer = _Printer(texts, as_json=as_json)
    if stream is None:
        stream = sys.stdout.isatty()
    printer.streams = stream and not as_json and len(texts) == 1 and params.n == 1
    with Interrupt() as interrupt:
        run = drive.start(engine, ids, params)
        finished = run.until_done(printer.take, lambda: interrupt.asked)
    printer.end(list(run.outputs.values()))
    console.note(run.timing.line())
    console.note(engine.describe())
    if not finished:
        return 130
    for out in run.outputs.values():
        for completion in out.outputs:
            if completion.error:
                raise AnyrigError(f"{out.request_id}: {completion.error}")
    return 0


class _Printer:
    """Results on stdout in the order of the prompts, each as soon as the ones before it are out."""

    def __init__(self, prompts: Sequence[str], *, as_json: bool) -> None:
        self.streams = False
        self._prompts = prompts
        self._json = as_json
        self._done: dict[str, RequestOutput] = {}
        self._wrapper = Wrapper() if moving(sys.stdout) else None
        self._printed = 0  # prompts that are out; when streaming: characters

    def take(self, out: RequestOutput) -> None:
        if self.streams:
            text = out.outputs[0].text
            new = printable(text[self._printed :], sys.stdout)
            print(self._wrapper.feed(new) if self._wrapper else new, end="", flush=True)
            self._printed = len(text)
        elif out.finished:
            self._done[out.request_id] = out
            while (ready := self._done.pop(f"prompt-{self._printed}", None)) is not None:
                self._show(ready)

    def end(self, outputs: Sequence[RequestOutput]) -> None:
        """Print what an interruption left: the texts so far."""
        if self.streams:
            print(flush=True)
            return
        for out in outputs[self._printed :]:
            if out.outputs:
                self._show(out)

    def _show(self, out: RequestOutput) -> None:
        prompt = self._prompts[self._printed]
        self._printed += 1
        if self._json:
            print(json_line(out, prompt), flush=True)
            return
        for completion in out.outputs:
            if len(self._prompts) + len(out.outputs) > 2:
                which = f" #{completion.index + 1}" if len(out.outputs) > 1 else ""
                console.note(f"[{self._printed}{which}] {' '.join(prompt.split())[:70]}")
            print(printable(completion.text, sys.stdout), flush=True)


def json_line(out: RequestOutput, prompt: str) -> str:
    """`out` in its own shape as one JSON line, with the prompt as the user wrote it and a `usage` entry.

    Numbers that JSON does not have (the log-probability of an impossible token) become null.
    """

    def entry(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in pairs}

    record = dataclasses.asdict(out, dict_factory=entry)
    record["prompt"] = prompt
    record["usage"] = {
        "prompt_tokens": len(out.prompt_token_ids),
        "output_tokens": sum(len(c.token_ids) for c in out.outputs),
        "cached_tokens": out.num_cached_tokens,
    }
    return json.dumps(record, ensure_ascii=False)
