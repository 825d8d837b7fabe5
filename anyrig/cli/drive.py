"""Drive an engine from the terminal: run requests to their end, tell what comes, and how long it took."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anyrig.core.outputs import RequestOutput
from anyrig.core.params import SamplingParams

if TYPE_CHECKING:
    from anyrig.engine.engine import Engine


@dataclass(slots=True)
class Timing:
    """Tokens and seconds of one run over all its requests.

    Attributes:
        first: seconds until the first output token of any request; None when there was none.
        total: seconds until the last request ended.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    requests: int = 0
    first: float | None = None
    total: float = 0.0

    @property
    def rate(self) -> float:
        """Output tokens per second: after the first token for one request, over everything for several."""
        if self.first is None:
            return 0.0
        tokens, seconds = self.output_tokens, self.total
        if self.requests == 1:
            tokens, seconds = tokens - 1, seconds - self.first
        return tokens / seconds if tokens > 0 and seconds > 0 else 0.0

    def line(self) -> str:
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        parts = [f"{self.prompt_tokens} prompt tokens{cached}", f"{self.output_tokens} output tokens"]
        if self.first is not None:
            parts.append(f"first after {self.first:.2f} s")
        if self.rate:
            parts.append(f"{self.rate:.1f} tokens/s")
        return " · ".join([*parts, f"{self.total:.1f} s"])


@dataclass(slots=True)
class Run:
    """Requests on their way through an engine.

    Attributes:
        outputs: what is known of each request, in the order they were added.
    """

    engine: "Engine"
    timing: Timing = field(default_factory=Timing)
    outputs: dict[str, RequestOutput] = field(default_factory=dict)

    def until_done(
        self, on_output: Callable[[RequestOutput], None] | None = None, stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """Step the engine until all requests are finished, or until `stop()` says so; then the rest is aborted.

        Returns:
            Whether all of them finished.
        """
        start = time.perf_counter()
        done: set[str] = set()
        try:
            while len(done) < len(self.outputs) and not stop():
                for out in self.engine.step():
                    self.outputs[out.request_id] = out
                    if self.timing.first is None and any(c.token_ids for c in out.outputs):
                        self.timing.first = time.perf_counter() - start
                    if out.finished:
                        done.add(out.request_id)
                    if on_output:
                        on_output(out)
        finally:
            for request_id in self.outputs.keys() - done:
                self.engine.abort(request_id)
            self._count(time.perf_counter() - start)
        return len(done) == len(self.outputs)

    def _count(self, seconds: float) -> None:
        outs = self.outputs.values()
        self.timing.total, self.timing.requests = seconds, sum(len(o.outputs) for o in outs)
        self.timing.prompt_tokens = sum(len(o.prompt_token_ids) for o in outs)
        self.timing.cached_tokens = sum(o.num_cached_tokens for o in outs)
        self.timing.output_tokens = sum(len(c.token_ids) for o in outs for c in o.outputs)


def start(
    engine: "Engine", prompts: Sequence[Sequence[int] | str], params: SamplingParams, name: str = "prompt"
) -> Run:
    """Add a request per prompt, so that the engine reports every step of it.

    Raises:
        InvalidRequest: when the engine cannot serve one of them.
    """
    run = Run(engine)
    for number, prompt in enumerate(prompts):
        request_id = f"{name}-{number}"
        engine.add_request(request_id, prompt, params, stream=True)
        ids = [] if isinstance(prompt, str) else list(prompt)
        run.outputs[request_id] = RequestOutput(request_id, prompt if isinstance(prompt, str) else None, ids, [])
    return run
