"""How a running job is doing, in one line."""

import time
from collections import deque
from typing import NamedTuple, Protocol

from anyrig.batch.run import Status

_WINDOW = 20.0  # seconds over which rates are taken


class _Totals(Protocol):
    computed_tokens: int
    output_tokens: int


class _Sample(NamedTuple):
    at: float
    computed: int
    output: int
    rows: int


class Progress:
    """Rates over the last seconds, and the time that is left."""

    def __init__(self, totals: _Totals) -> None:
        """`totals`: running totals of the engine."""
        self._totals = totals
        self._samples: deque[_Sample] = deque()

    def line(self, status: Status) -> str:
        """Such as ``412 of ~3,000 rows · 14% · 8.1 rows/s · tokens/s: 900 in, 310 out · 2 failed · 5:20 left``."""
        now = time.monotonic()
        totals, samples = self._totals, self._samples
        samples.append(_Sample(now, totals.computed_tokens, totals.output_tokens, status.fresh.rows))
        while samples[0].at < now - _WINDOW and len(samples) > 2:
            samples.popleft()
        first, last = samples[0], samples[-1]
        seconds = max(last.at - first.at, 1e-9)
        rows, output = last.rows - first.rows, last.output - first.output
        computed = last.computed - first.computed - output

        total, exact = _total(status)
        done = status.done.rows
        parts = [f"{done:,} of {'' if exact else '~'}{total:,} rows" if total else f"{done:,} rows"]
        if total:
            parts.append(f"{min(done / total, 1):.0%}")
        if len(samples) > 1 and seconds > 0.5:
            parts.append(f"{rows / seconds:.1f} rows/s")
            parts.append(f"tokens/s: {max(0, computed) / seconds:,.0f} in, {output / seconds:,.0f} out")
        if status.done.failed:
            parts.append(f"{status.done.failed:,} failed")
        if status.draining:
            parts.append(f"stopping, {status.in_flight} rows are running")
        elif total and status.fresh.output_tokens:
            pace = (now - status.started) / status.fresh.rows
            parts.append(f"{duration((total - done) * pace)} left")
        return " · ".join(parts)


def _total(status: Status) -> tuple[int | None, bool]:
    """Rows of the whole input, and whether that is known or reckoned from the share that was read."""
    if status.rows_total is not None:
        return status.rows_total, True
    if status.share > 0 and status.read > 0:
        return max(status.done.rows, round(status.read / status.share)), False
    return None, False


def duration(seconds: float) -> str:
    """`m:ss` or `h:mm:ss`."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
