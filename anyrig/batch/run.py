"""The loop: keep the engine fed, give finished rows to the sink, stop cleanly when asked."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anyrig.batch import jsontext
from anyrig.batch.inputs import Consumption
from anyrig.batch.prompt import Encoder, RowSkipped, row_problem
from anyrig.batch.ranges import OpenRange, unfinished
from anyrig.batch.result import Columns, row_seed
from anyrig.batch.row import Position, Row, RowKey, RowResult, Tally
from anyrig.batch.sink import Sink
from anyrig.batch.source import Payload, Source
from anyrig.batch.storage import writing
from anyrig.batch.target import clash
from anyrig.core.errors import AnyrigError
from anyrig.core.outputs import RequestOutput
from anyrig.core.params import SamplingParams

if TYPE_CHECKING:
    from anyrig.engine.engine import Engine

_OPEN_RANGES = 64  # one slow row keeps its range open while others pass it by; their results wait in memory
_WAITING_TOKENS = 1 << 20  # prompts that wait are lists of Python integers: a million take some 60 MB
DRAIN_SECONDS = 10.0
_SHOWN_ERRORS = 3


@dataclass(slots=True)
class Status:
    """A running job, for those who watch it.

    Attributes:
        done: rows of this run and of earlier ones.
        fresh: rows of this run alone.
        share: share of the input that has been read, 0 to 1.
        rows_total: where it is known.
        errors: messages of the first failed rows.
    """

    done: Tally = field(default_factory=Tally)
    fresh: Tally = field(default_factory=Tally)
    share: float = 0.0
    read: int = 0
    rows_total: int | None = None
    in_flight: int = 0
    draining: bool = False
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Job:
    """What is run: rows, prompt, parameters, and where the rows go."""

    sources: Sequence[Source]
    encoder: Encoder
    params: SamplingParams
    columns: Columns
    sink: Sink
    payload: Payload
    seed: int
    limit: int | None = None


class Run:
    """One pass of a job over the rows that nobody has finished yet.

    Attributes:
        status: kept up to date; `on_status` is called with it between steps.
    """

    def __init__(self, engine: "Engine", job: Job, on_status: Callable[[Status], None] = lambda status: None) -> None:
        self._engine = engine
        self._job = job
        self._on_status = on_status
        self._in_flight: dict[str, tuple[OpenRange, Position, str]] = {}
        self._tokens = 0  # of the prompts in flight
        self._open: dict[int, OpenRange] = {}
        self._consumption = Consumption(list(job.sources))
        self.status = Status()
        for record in job.sink.committed.values():
            self.status.done.merge(record.tally)
            self.status.read += record.tally.rows
        known = [s.rows_known for s in job.sources]
        if all(rows is not None for rows in known):
            self.status.rows_total = sum(rows for rows in known if rows is not None)
        if job.limit is not None:
            self.status.rows_total = min(job.limit, self.status.rows_total or job.limit)

    def until_done(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Run to the end, or until `stop()`: then what runs may finish for `DRAIN_SECONDS`, and is saved.

        Returns:
            Whether every row is finished.

        Raises:
            DataError: the input breaks or the output can't be written; what was finished is saved if it can be.
        """
        try:
            finished = self._loop(stop)
        except BaseException:
            # The first error is the one to tell; saving may well fail for the same reason.
            with contextlib.suppress(AnyrigError, OSError):
                self._job.sink.stop(self._open.values())
            raise
        self.status.seconds = time.monotonic() - self.status.started
        if not finished:
            self._job.sink.stop(self._open.values())
        self._on_status(self.status)
        return finished

    def _loop(self, stop: Callable[[], bool]) -> bool:
        job, sink = self._job, self._job.sink
        rows = unfinished(
            job.sources,
            sink.committed,
            job.payload,
            limit=job.limit,
            range_rows=sink.range_rows,
            spool=sink.spool,
            check=self._check_clash,
        )
        more = True
        self._on_status(self.status)
        while not stop():
            while more and self._hungry():
                with writing(sink.spool) if sink.spool else contextlib.nullcontext():
                    item = next(rows, None)
                if item is None:
                    more = False
                    self.status.share, self.status.rows_total = 1.0, self.status.read
                else:
                    self._begin(*item)
                    # Rows that fail before the engine sees them can go on for long.
                    sink.tick()
                    self._on_status(self.status)
                if stop():
                    break
            if not more and not self._in_flight:
                return True
            self._step()
        self._drain()
        return False

    def _hungry(self) -> bool:
        """Whether the engine wants more: enough that its next steps are full, however long the input is."""
        flying, most = len(self._in_flight) * self._job.params.n, self._engine.config.max_num_seqs
        roomy = flying < most or (flying < 2 * most and self._tokens < _WAITING_TOKENS)
        return roomy and len(self._open) < _OPEN_RANGES

    def _begin(self, rng: OpenRange, row: Row) -> None:
        """Send a row to the engine, or finish it at once when it never gets there."""
        job, status = self._job, self.status
        self._open[rng.number] = rng
        status.read += 1
        status.share = self._consumption.share(row.next)
        key = row.position.key
        if (earlier := job.sink.earlier(key)) is not None:
            status.done.add(earlier)
            self._end(rng, key, earlier)
            return
        request_id = f"{key[0]}-{key[1]}"
        problem = row.error
        if problem is None:
            try:
                ids = job.encoder.encode(row.values)
                seed = row_seed(job.seed, rng.source.path.name, row)
                self._engine.add_request(request_id, ids, job.params.replace(seed=seed))
                self._in_flight[request_id] = (rng, row.position, row.where)
                self._tokens += len(ids)
                return
            except RowSkipped:
                self._count(rng, key, job.columns.skipped())
                return
            except AnyrigError as e:
                problem = row_problem(e, row.where)
            except Exception as e:  # whatever a row's data makes templates and tokenizers do, the others go on
                problem = f"{row.where}: {type(e).__name__}: {e}"
        self._count(rng, key, job.columns.failed(problem))

    def _check_clash(self, row: Row) -> None:
        """Headers are checked before the start; a JSON line can bring a column of our names at any time."""
        both = row.values.keys() & set(self._job.columns.names)
        if both and row.error is None:
            row.error = f"{row.where}: {clash(list(row.values), self._job.columns.names)}"
            row.payload = jsontext.members({k: v for k, v in row.values.items() if k not in both}).encode()

    def _step(self) -> None:
        for out in self._engine.step():
            self._take(out)
        self._job.sink.tick()
        self.status.in_flight = len(self._in_flight)
        self._on_status(self.status)

    def _take(self, out: RequestOutput) -> None:
        if not out.finished or out.request_id not in self._in_flight:
            return
        rng, position, where = self._in_flight.pop(out.request_id)
        self._tokens -= len(out.prompt_token_ids)
        self._count(rng, position.key, self._job.columns.finished(out, where))

    def _count(self, rng: OpenRange, key: RowKey, result: RowResult) -> None:
        self.status.done.add(result)
        self.status.fresh.add(result)
        if result.failed and len(self.status.errors) < _SHOWN_ERRORS:
            self.status.errors.append(self._job.columns.error_of(result))
        self._job.sink.finished(key, result)
        self._end(rng, key, result)

    def _end(self, rng: OpenRange, key: RowKey, result: RowResult) -> None:
        rng.finish(key, result)
        if rng.complete:
            del self._open[rng.number]
            self._job.sink.commit(rng)

    def _drain(self) -> None:
        """Let what is running finish, for a while; what only waits is dropped at once."""
        self.status.draining = True
        self._on_status(self.status)
        waiting = -(-self._engine.stats.waiting // self._job.params.n)
        self._abort(list(self._in_flight)[max(0, len(self._in_flight) - waiting) :])
        until = time.monotonic() + DRAIN_SECONDS
        while self._in_flight and time.monotonic() < until:
            self._step()
        self._abort(list(self._in_flight))

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._engine.abort(request_id)
            del self._in_flight[request_id]
