"""Rows through readers, ranges, ledger and assembly, with made-up results: the path of the data without a model."""

import random
from pathlib import Path
from typing import Any

from anyrig.batch.assemble import assemble, layout_of
from anyrig.batch.config import BatchConfig
from anyrig.batch.inputs import open_inputs
from anyrig.batch.ledger import Ledger
from anyrig.batch.ranges import OpenRange, unfinished
from anyrig.batch.result import Columns
from anyrig.batch.row import Row, RowResult
from anyrig.batch.sink import LedgerSink
from anyrig.batch.target import target_of
from anyrig.core.params import SamplingParams


class Crash(Exception):
    """The process is gone: nothing more is written."""


def answer(row: Row, columns: Columns) -> RowResult:
    """A result that tells which row it belongs to."""
    if row.error is not None:
        return columns.failed(row.error)
    values = {
        "output": f"answer to {row.where.rsplit('/', 1)[-1]}",
        "finish_reason": "stop",
        "error": None,
        "prompt_tokens": 3,
        "output_tokens": 2,
    }
    return RowResult(values, prompt_tokens=3, output_tokens=2)


def process(
    inputs: list[Path],
    output: str,
    *,
    shuffle: int = 0,
    crash_after: int | None = None,
    range_rows: int = 7,
    results: Any = answer,
    params: SamplingParams = SamplingParams(),  # noqa: B008
    **options: Any,
) -> int:
    """Process `inputs` into `output`, finishing up to 20 rows at a time in a shuffled order.

    Args:
        shuffle: seed of the order.
        crash_after: rows after which the "process" dies; what it had neither committed nor journaled is lost.

    Returns:
        Rows that had to be answered.
    """
    config = BatchConfig(input=[str(p) for p in inputs], output=output, **options)
    target = target_of(config)
    assert target.path is not None
    ledger = Ledger(target.path)
    columns = Columns(params)
    sources = open_inputs(config, target.path, ledger.directory)
    ledger.begin({"inputs": [s.identity() for s in sources]})
    layout = layout_of(target, sources, columns.names, columns.types())
    writer = layout.part_writer()
    sink = LedgerSink(ledger, writer)
    rng = random.Random(shuffle)
    flying: list[tuple[OpenRange, Row]] = []
    answered = 0

    def land() -> None:
        nonlocal answered
        open_range, row = flying.pop(rng.randrange(len(flying)))
        if (result := sink.earlier(row.position.key)) is None:
            answered += 1
            result = results(row, columns)
            sink.finished(row.position.key, result)
        open_range.finish(row.position.key, result)
        if open_range.complete:
            sink.commit(open_range)
        if rng.random() < 0.2:
            sink.stop([])  # the journal's timer
        if answered == crash_after:
            raise Crash

    try:
        for item in unfinished(sources, sink.committed, writer.payload, range_rows=range_rows, limit=config.limit):
            flying.append(item)
            if len(flying) >= 20:
                land()
        while flying:
            land()
        assemble(ledger, target, layout)
    except Crash:
        ledger._lock.close()  # what the system does with a dead process's lock
        return answered
    except BaseException:
        ledger._lock.close()
        raise
    ledger.remove()
    return answered
