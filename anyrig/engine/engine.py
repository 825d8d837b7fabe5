"""The step loop: requests in, finished (or growing) outputs out. `llm.py` and `async_engine.py` drive it."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from anyrig.core import sequence
from anyrig.core.config import EngineConfig
from anyrig.core.errors import InvalidRequest
from anyrig.core.outputs import RequestOutput, Timing
from anyrig.core.params import SamplingParams, generation_defaults
from anyrig.core.spec import Chunk, StepPlan, StepResult
from anyrig.engine.adjust import check_token_ids
from anyrig.engine.completion import Completion, decoded
from anyrig.engine.picker import Picker
from anyrig.engine.rows import Sampled
from anyrig.engine.runner import Runner, make_runner
from anyrig.engine.structured import GrammarCompiler
from anyrig.hardware import cpu
from anyrig.kv.pool import PagePool
from anyrig.models import checkpoint, locate
from anyrig.models.tokenizer import Tokenizer
from anyrig.ops.sample import sequence_seed
from anyrig.sched.scheduler import Scheduler

log = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineStats:
    """Running totals, and the state after the last step.

    Attributes:
        prompt_tokens, cached_tokens, output_tokens: of all requests so far; cached ones came from the prefix cache.
        computed_tokens: tokens that went through the model, recomputed ones included.
        steps, preemptions: totals.
        running, waiting: sequences.
        kv_usage: share of the KV pages in use, 0 to 1.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


class _Request:
    """A request and its completions; `done` counts those that have ended."""

    def __init__(self, output: RequestOutput, stream: bool) -> None:
        self.output = output
        self.stream = stream
        self.completions: list[Completion] = []
        self.done = 0


class Engine:
    """Runs requests on one model.

    Args:
        model: alias, hub id, directory or `.gguf` file.
        config: options; see `EngineConfig`.
        progress: called with a line of text while loading.

    Raises:
        ModelError: the model can't be found or read.
        OutOfMemory: the machine has no room for keys and values.
        UsageError: an option that doesn't go with this model or machine.
    """

    def __init__(
        self, model: str, config: EngineConfig | None = None, *, progress: Callable[[str], None] | None = None
    ) -> None:
        self.config = config = config or EngineConfig()
        say = progress or log.info
        files = locate.resolve(model, progress=say)
        self.model_name = files.name
        self.info = checkpoint.read_info(files.path)
        self.tokenizer = Tokenizer.from_dir(files.path)
        self.runner: Runner = make_runner(files.path, files.name, self.info, config, say)
        self.max_model_len = self.runner.max_model_len
        self.scheduler = Scheduler(
            PagePool(self.runner.num_pages),
            page_size=config.page_size,
            max_num_seqs=config.max_num_seqs,
            max_batch_tokens=config.max_batch_tokens or max(self.runner.batch_tokens, config.max_num_seqs),
            max_chunk_tokens=config.max_chunk_tokens,
            prefix_caching=config.enable_prefix_caching and self.runner.prefix_caching,
            model_version=self.info.version,
            whole=not self.runner.chunked,
        )
        self.picker = Picker(self.info.vocab_size, config.logprobs_mode, config.threads or cpu.read().cores)
        self.grammars = GrammarCompiler(self.tokenizer, self.info.vocab_size, self.info.eos_token_ids)
        self.stats = EngineStats()
        self._requests: dict[str, _Request] = {}
        self._running: dict[int, tuple[_Request, Completion]] = {}
        self._next_seq = 0
        self._now = 0.0

    def default_params(self, **given: Any) -> SamplingParams:
        """The model's own sampling defaults (generation_config.json), changed by what is given."""
        return SamplingParams.from_dict({**generation_defaults(self.info.generation), **given})

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        stream: bool = False,
        cache_salt: str = "",
    ) -> None:
        """Queue a request.

        Args:
            request_id: not one that is still running.
            prompt: text, or token ids.
            params: how to sample it.
            priority: lower runs first.
            stream: `step` returns it at every token rather than once at the end.
            cache_salt: requests with different salts share no cached keys and values.

        Raises:
            InvalidRequest: it can't be served as asked; nothing is queued then.
        """
        if request_id in self._requests:
            raise InvalidRequest(f"request id {request_id!r} is still running")
        ids = self._prompt_ids(prompt, params)
        check_token_ids(params, self.info.vocab_size)
        grammars = [self.grammars.compile(params) for _ in range(params.n)]
        text = prompt if isinstance(prompt, str) else None
        request = _Request(RequestOutput(request_id, text, ids, [], timing=Timing(time.perf_counter())), stream)
        if params.prompt_logprobs is not None:
            request.output.prompt_logprobs = [None]
        seed = params.seed if params.seed is not None else self._draw_seed()
        leader: sequence.Sequence | None = None
        for index, grammar in enumerate(grammars):
            seq = sequence.Sequence(
                self._next_seq,
                list(ids),
                len(ids),
                priority=priority,
                leader=leader if self.scheduler.prefix_caching else None,
                salt=cache_salt,
            )
            self._next_seq += 1
            if leader is None:
                leader = seq
                # One completion is enough to read the prompt's log-probabilities from.
                seq.row_from = 0 if params.prompt_logprobs is not None else None
            completion = Completion(
                index,
                seq,
                params,
                self.tokenizer,
                self.info.eos_token_ids,
                self.max_model_len,
                sequence_seed(seed, index),
                grammar,
                stream,
            )
            request.completions.append(completion)
            request.output.outputs.append(completion.output)
            self._running[seq.seq_id] = (request, completion)
            self.scheduler.add(seq)
        self._requests[request_id] = request
        self.stats.prompt_tokens += len(ids)

    def step(self) -> list[RequestOutput]:
        """Compute one step.

        Returns:
            requests that finished in it, and streaming ones that grew.
        """
        plan = self.scheduler.plan()
        if not plan.chunks:
            return []
        touched = self._take(plan, self.runner.run(plan, self._best_only(plan)))
        stats, scheduler = self.stats, self.scheduler
        stats.steps += 1
        stats.computed_tokens += plan.num_tokens
        stats.preemptions = scheduler.preemptions
        stats.running, stats.waiting = len(scheduler.running), scheduler.waiting
        stats.kv_usage = scheduler.pool.usage
        return [request.output for request in touched if request.stream or request.output.finished]

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its pages are free at once. Returns what it had, None when there is no such request."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        for completion in request.completions:
            if not completion.finished:
                completion.abort()
                self._finish(request, completion)
        return request.output

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def describe(self) -> str:
        """One line: model, tier, dtype, threads, ops."""
        return f"{self.model_name}: {self.runner.describe()}"

    def _prompt_ids(self, prompt: str | Sequence[int], params: SamplingParams) -> list[int]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise InvalidRequest("the prompt is empty", "give at least one token")
        if bad := [t for t in ids if not 0 <= t < self.info.vocab_size]:
            raise InvalidRequest(f"token id {bad[0]} is not in the vocabulary of {self.info.vocab_size} tokens")
        if len(ids) >= self.max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(ids)} tokens, but prompt and output together may have {self.max_model_len}",
                "shorten it, or raise `max_model_len` if the model allows more",
            )
        return ids

    def _draw_seed(self) -> int:
        """Seed of a request that brings none: a function of the engine's seed and of how many came before."""
        return sequence_seed(self.config.seed, self._next_seq)

    def _best_only(self, plan: StepPlan) -> bool:
        """Whether every row that the step computes is for the most likely token, and nothing else."""
        for chunk in plan.chunks:
            if chunk.rows:
                completion = self._running[chunk.seq_id][1]
                row = completion.row
                if not row.plain or row.params.logprobs is not None or completion.sequence.row_from is not None:
                    return False  # a prompt's log-probabilities need all logits
        return True

    def _take(self, plan: StepPlan, result: StepResult) -> list[_Request]:
        """Give every sequence its new token; returns the requests that have one."""
        sampling: list[tuple[int, _Request, Completion]] = []  # row of logits
        row = 0
        for chunk in plan.chunks:
            request, completion = self._running[chunk.seq_id]
            seq = completion.sequence
            # Rows that are missing were taken before a preemption.
            if seq.row_from is not None and chunk.rows:
                self._take_prompt_logprobs(request, completion, chunk, result.logits[row : row + chunk.rows])
            row += chunk.rows
            if chunk.rows and chunk.start + chunk.length == len(seq.tokens):
                sampling.append((row - 1, request, completion))
        self.scheduler.advance(plan)
        rows = [i for i, _, _ in sampling]
        sampled = self.picker.sample(result, rows, [c.row for _, _, c in sampling]) if rows else []
        touched: dict[str, _Request] = {}
        self._now = time.perf_counter()
        for (_, request, completion), token in zip(sampling, sampled, strict=True):
            self._take_token(request, completion, token)
            touched[request.output.request_id] = request
        return list(touched.values())

    def _take_token(self, request: _Request, completion: Completion, token: Sampled) -> None:
        completion.take(token)
        timing = request.output.timing
        if timing is not None and timing.first_token is None:
            timing.first_token = self._now
        if completion.output.index == 0 and len(completion.output.token_ids) <= 1:
            cached = completion.sequence.cached or 0
            request.output.num_cached_tokens = cached
            self.stats.cached_tokens += cached
        if token.error is None:
            self.stats.output_tokens += 1
        if completion.finished:
            if token.error is not None:
                # What these pages hold must not reach anybody else: not by their name, and not as garbage.
                own = self.scheduler.pool.exclusive(completion.sequence.pages)
                self.scheduler.pool.forget(own)
                self.runner.scrub(own)
            self._finish(request, completion)

    def _take_prompt_logprobs(self, request: _Request, completion: Completion, chunk: Chunk, logits: Any) -> None:
        """Rows of a prompt's chunk: row i of the sequence holds the log-probabilities of token i + 1."""
        seq, k = completion.sequence, completion.params.prompt_logprobs
        got = request.output.prompt_logprobs
        assert k is not None and got is not None  # row_from is only set when they are wanted
        first = chunk.start + chunk.length - chunk.rows
        targets = seq.tokens[first + 1 : min(chunk.start + chunk.length + 1, seq.num_prompt)]
        if targets:
            scores = self.picker.prompt_logprobs(logits[: len(targets)], targets, k)
            got += [decoded(s, self.tokenizer) for s in scores]
        done = chunk.start + chunk.length
        seq.row_from = None if done >= seq.num_prompt else done

    def _finish(self, request: _Request, completion: Completion) -> None:
        seq = completion.sequence
        self.scheduler.finish(seq)
        self.runner.forget(seq.seq_id)
        del self._running[seq.seq_id]
        request.done += 1
        if request.done == len(request.completions):
            request.output.finished = True
            if request.output.timing is not None:
                request.output.timing.finished = time.perf_counter()
            del self._requests[request.output.request_id]
