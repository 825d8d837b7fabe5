"""The engine for servers: requests from many coroutines, one thread that steps while there is work."""

import asyncio
import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from anyrig.core.config import EngineConfig
from anyrig.core.errors import AnyrigError
from anyrig.core.outputs import RequestOutput
from anyrig.core.params import SamplingParams
from anyrig.engine.engine import Engine
from anyrig.engine.llm import Prompt

log = logging.getLogger(__name__)

_Queue = asyncio.Queue["RequestOutput | Exception"]


class AsyncLLM:
    """Streams requests of any number of coroutines through one engine.

    The engine belongs to its thread: coroutines leave commands, the thread takes them between two steps and sends
    results back into the event loop. An idle engine waits on a condition and costs nothing.
    """

    def __init__(
        self, model: str, config: EngineConfig | None = None, *, progress: Callable[[str], None] | None = None
    ) -> None:
        self.engine = Engine(model, config, progress=progress)
        self._ids = itertools.count(1)
        self._commands: deque[Callable[[Exception | None], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._streams: dict[str, tuple[asyncio.AbstractEventLoop, _Queue]] = {}
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="anyrig-engine", daemon=True)
        self._thread.start()

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Snapshots of the request as it grows, the last one finished. Leaving early (or a cancelled task) aborts it.

        A slow reader gets the newest state rather than every step's; no text is lost, as snapshots hold all of it.

        Args:
            kwargs: `priority` and `cache_salt`, as `Engine.add_request` takes them.

        Raises:
            InvalidRequest: it can't be served as asked.
            AnyrigError: the engine has failed or was shut down.
        """
        request_id = request_id or f"async-{next(self._ids)}"
        loop, queue = asyncio.get_running_loop(), _Queue()
        params = params or self.engine.default_params()

        def add(refused: Exception | None) -> None:
            try:
                if refused is not None:
                    raise refused
                self.engine.add_request(request_id, prompt, params, stream=True, **kwargs)
                self._streams[request_id] = (loop, queue)
            except Exception as error:
                _put(loop, queue, error)

        def drop(refused: Exception | None) -> None:
            # Only if the request is still this one: the id may have been refused, or be in use again.
            if refused is None and self._streams.get(request_id) == (loop, queue):
                del self._streams[request_id]
                self.engine.abort(request_id)

        self._command(add)
        try:
            while True:
                item = await queue.get()
                while not queue.empty():
                    item = queue.get_nowait()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finished:
                    return
        finally:
            if not self._failed and not self._stopping:
                with contextlib.suppress(AnyrigError):  # it has stopped meanwhile, and nothing runs any more
                    self._command(drop)

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, **kwargs: Any) -> RequestOutput:
        """The finished request."""
        final: RequestOutput | None = None
        async for output in self.stream(prompt, params, **kwargs):
            final = output
        if final is None:
            raise AnyrigError("the engine ended the request without a result")
        return final

    async def abort(self, request_id: str) -> None:
        """End a request; its stream ends with what it had, `finish_reason="abort"`."""

        def end(refused: Exception | None) -> None:
            output = self.engine.abort(request_id) if refused is None else None
            if output is not None:
                self._send(request_id, output.snapshot())
            self._streams.pop(request_id, None)

        self._command(end)

    def shutdown(self, timeout: float = 10.0) -> None:
        """Stop after the step that is under way; open streams raise."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout)

    def _command(self, command: "Callable[[Exception | None], None]") -> None:
        """Leave a command for the engine's thread, which calls it with None, or with the reason why it has stopped."""
        with self._wake:
            if self._failed is not None or self._stopping:
                raise AnyrigError(
                    "the engine is not running", str(self._failed) if self._failed else "it was shut down"
                )
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        reason: Exception = AnyrigError("the engine was shut down")
        try:
            while self._take_commands():
                for output in self.engine.step():
                    self._send(output.request_id, output.snapshot())
                    if output.finished:
                        self._streams.pop(output.request_id, None)
        except Exception as error:  # whatever it is: nobody may wait for ever
            log.exception("the engine failed")
            reason = AnyrigError(f"the engine failed: {error}")
        with self._wake:
            self._failed = reason
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command(reason)
        for request_id in self._streams:
            self._send(request_id, reason)
        self._streams.clear()

    def _take_commands(self) -> bool:
        """Wait for work, run what was left; False when it is time to stop."""
        with self._wake:
            self._wake.wait_for(lambda: self._commands or self._stopping or self.engine.has_unfinished())
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command(None)
        return not self._stopping

    def _send(self, request_id: str, item: RequestOutput | Exception) -> None:
        if request_id in self._streams:
            _put(*self._streams[request_id], item)


def _put(loop: asyncio.AbstractEventLoop, queue: _Queue, item: RequestOutput | Exception) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
        loop.call_soon_threadsafe(queue.put_nowait, item)
