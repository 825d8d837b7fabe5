"""`anyrig batch`: a prompt over every row of files."""

import contextlib
import json
import os
import signal
import sys
import time
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from anyrig.batch.config import MAX_TOKENS, BatchConfig
from anyrig.cli.console import console, moving
from anyrig.cli.options import Settings, configured
from anyrig.core.config import EngineConfig
from anyrig.core.errors import AnyrigError, UsageError
from anyrig.core.params import SamplingParams

if TYPE_CHECKING:
    from anyrig.batch.prepare import Data, Model
    from anyrig.batch.prompt import Encoder
    from anyrig.batch.run import Status
    from anyrig.batch.summary import Summary
    from anyrig.engine.engine import Engine

_SOME_FAILED = 3


@configured(
    BatchConfig,
    EngineConfig,
    SamplingParams,
    defaults={"max_tokens": MAX_TOKENS},
    skip={"json_schema", "prompt_logprobs"},
)
def batch(
    settings: Settings,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="known name, hub id, directory or .gguf file")],
    as_json: Annotated[bool, typer.Option("--json", help="the summary as one JSON object on stdout")] = False,
) -> int:
    """Run a prompt over every row of files.

    Writes every input column and `output`, `finish_reason`, `error`, `prompt_tokens`, `output_tokens`, in input
    order. A row that fails is recorded in its own row (exit code 3). After Ctrl-C or a crash the same command goes
    on where it stopped.
    """
    config = settings.build(BatchConfig)
    engine_config = settings.build(EngineConfig)
    params = _parameters(settings, config, {})
    if config.dry_run is not None:
        return _dry_run(config, model, config.dry_run)
    if as_json and config.output == "-":
        raise UsageError("--json and `-o -` both write to stdout", "send the rows to a file")

    from anyrig.batch.prepare import check_model, find_model, prepared

    with _Stop() as stop, prepared(config, engine_config, params) as data:
        found = find_model(model, console.status)
        params = _parameters(settings, config, found.info.generation)
        encoder = check_model(data, found, config, params)
        console.status(f"loading {model}")
        engine = _engine(model, engine_config)
        console.note(engine.describe())
        return _run(config, params, data, encoder, engine, stop, as_json=as_json)


def _parameters(settings: Settings, config: BatchConfig, generation: Any) -> SamplingParams:
    """Flags over the model's own values; a choice is the most likely one unless a temperature was given."""
    model = dict(generation)
    params = settings.build(SamplingParams, model)
    if params.choices is not None and "temperature" not in settings.values:
        params = params.replace(temperature=0.0)
    if config.schema is not None:
        from anyrig.batch.prepare import schema_of

        params = params.replace(json_schema=schema_of(config.schema))
    return params


def _engine(model: str, config: EngineConfig) -> "Engine":
    from anyrig.engine.engine import Engine

    return Engine(model, config, progress=console.status)


def _run(
    config: BatchConfig,
    params: SamplingParams,
    data: "Data",
    encoder: "Encoder",
    engine: "Engine",
    stop: "_Stop",
    *,
    as_json: bool,
) -> int:
    from anyrig.batch.assemble import assemble
    from anyrig.batch.run import Job, Run
    from anyrig.batch.sink import LedgerSink, StdoutSink
    from anyrig.batch.summary import Summary

    # At least one prompt token; without max_tokens the output takes what the prompt leaves.
    encoder.limit = max(1, engine.max_model_len - (params.max_tokens or 1))
    writer = data.layout.part_writer()
    ledger = data.ledger
    sink = LedgerSink(ledger, writer) if ledger is not None else StdoutSink(sys.stdout.buffer, writer)
    earlier = ledger.resumed if ledger is not None else 0
    if earlier:
        console.note(f"going on with {data.target.shown}: {earlier:,} rows are done")
    job = Job(data.sources, encoder, params, data.columns, sink, writer.payload, engine.config.seed, config.limit)
    run = Run(engine, job, _Reporter(engine))
    with stop.drains():
        finished = run.until_done(lambda: stop.asked)
    console.clear()
    if finished and ledger is not None:
        console.status(f"writing {data.target.shown}")
        assemble(ledger, data.target, data.layout)
        ledger.remove()
        console.clear()
    summary = Summary(run.status, finished, data.target.shown, earlier)
    _report(summary, as_json=as_json, resumable=ledger is not None)
    if not finished:
        return 130
    return _SOME_FAILED if run.status.done.failed else 0


def _report(summary: "Summary", *, as_json: bool, resumable: bool) -> None:
    for line in summary.lines():
        console.note(line)
    if summary.finished:
        console.note(f"written to {summary.output}")
    elif not summary.status.done.rows:
        console.note("interrupted before any row was finished")
    elif resumable:
        console.note("interrupted: finished rows are kept; the same command goes on from here")
    else:
        console.note("interrupted: rows on stdout can't be gone on with; -o FILE keeps what is done")
    if as_json:
        print(json.dumps(summary.as_dict(), ensure_ascii=False))


class _Reporter:
    """The progress line: rewritten on a terminal, one line every ten seconds elsewhere."""

    def __init__(self, engine: "Engine") -> None:
        from anyrig.batch.progress import Progress

        self._progress = Progress(engine.stats)
        self._moving = moving(sys.stderr) and console.verbosity == 0
        self._every = 0.25 if self._moving else 10.0
        self._next = time.monotonic() + (0.0 if self._moving else self._every)

    def __call__(self, status: "Status") -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._every
        line = self._progress.line(status)
        if self._moving:
            console.status(line)
        else:
            console.note(line)


class _Stop:
    """Ctrl-C and SIGTERM: before rows run they end the command; then the first drains, and the second kills."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.asked = False
        self._draining = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {s: signal.signal(s, self._on_signal) for s in self._SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def drains(self) -> Any:
        self._draining = True
        try:
            yield
        finally:
            self._draining = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._draining:
            raise KeyboardInterrupt
        if self.asked:
            # At once, whatever the engine is doing: committed and journaled rows are on disk.
            os._exit(130)
        self.asked = True
        if console.verbosity >= 0:
            # Not print: the signal may have come in the middle of one. A step can take a while before it is noticed.
            os.write(2, b"\nstopping: rows that run may finish; once more leaves at once\n")


def _dry_run(config: BatchConfig, model: str, count: int) -> int:
    """Print the first prompts as the model would see them, with their token counts."""
    import tempfile

    from anyrig.batch import preflight
    from anyrig.batch.inputs import open_inputs
    from anyrig.batch.prepare import find_model
    from anyrig.batch.prompt import Encoder, Prompt, row_problem

    prompt = Prompt(config)
    with tempfile.TemporaryDirectory(prefix="anyrig-") as spool:
        sources = open_inputs(config, None, Path(spool))
        preflight.check(sources, prompt, ())
        found: Model = find_model(model, console.status)
        encoder = Encoder(prompt, config, found.tokenizer, found.name)
        console.clear()
        lengths = []
        for row in islice((row for s in sources for row in s.rows(s.start)), count):
            try:
                if row.error is not None:
                    raise AnyrigError(row.error)
                text, tokens = encoder.text(row.values), len(encoder.encode(row.values))
            except AnyrigError as e:
                print(f"--- {row.error or row_problem(e, row.where)}\n")
                continue
            lengths.append(tokens)
            print(f"--- {row.where}: {tokens} tokens\n{text}\n")
    if lengths:
        mean = sum(lengths) / len(lengths)
        console.note(f"{len(lengths)} prompts: {min(lengths)} to {max(lengths)} tokens, {mean:.0f} on average")
    return 0
