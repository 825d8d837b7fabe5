"""What a job came to: for a person and for a program."""

from dataclasses import dataclass
from typing import Any

from anyrig.batch.progress import duration
from anyrig.batch.run import Status


@dataclass(frozen=True, slots=True)
class Summary:
    """The end of a job.

    Attributes:
        finished: every row is done and the output is in place.
        output: where it is.
        earlier: rows that an interrupted run had done before.
    """

    status: Status
    finished: bool
    output: str
    earlier: int

    def as_dict(self) -> dict[str, Any]:
        done, fresh, seconds = self.status.done, self.status.fresh, self.status.seconds
        return {
            "finished": self.finished,
            "output": self.output,
            "rows": done.rows,
            "failed": done.failed,
            "skipped": done.skipped,
            "rows_done_earlier": self.earlier,
            "seconds": round(seconds, 3),
            "rows_per_second": round(_rate(fresh.rows, seconds), 3),
            "prompt_tokens": done.prompt_tokens,
            "cached_tokens": done.cached_tokens,
            "output_tokens": done.output_tokens,
            "prompt_tokens_per_second": round(_rate(fresh.prompt_tokens, seconds), 1),
            "output_tokens_per_second": round(_rate(fresh.output_tokens, seconds), 1),
            "errors": list(self.status.errors),
        }

    def lines(self) -> list[str]:
        done, fresh, seconds = self.status.done, self.status.fresh, self.status.seconds
        counts = [f"{done.rows:,} rows"]
        if done.failed:
            counts.append(f"{done.failed:,} failed")
        if done.skipped:
            counts.append(f"{done.skipped:,} skipped")
        if self.earlier:
            counts.append(f"{self.earlier:,} of them done earlier")
        took = f"{seconds:.1f} s" if seconds < 100 else duration(seconds)
        lines = [f"{', '.join(counts)} · {took} · {_rate(fresh.rows, seconds):.1f} rows/s"]
        cached = f" ({done.cached_tokens / done.prompt_tokens:.0%} from the prefix cache)" if done.cached_tokens else ""
        lines.append(
            f"{done.prompt_tokens:,} prompt tokens{cached}, {done.output_tokens:,} output tokens · tokens/s: "
            f"{_rate(fresh.prompt_tokens, seconds):,.0f} in, {_rate(fresh.output_tokens, seconds):,.0f} out"
        )
        for error in self.status.errors:
            lines.append(f"failed: {error}")
        more = self.status.fresh.failed - len(self.status.errors)
        if more > 0:
            lines.append(f"and {more:,} more failed rows: see their column `error`")
        return lines


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
