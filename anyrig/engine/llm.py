"""Offline inference: a list of prompts in, a list of results out, in the same order."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from anyrig.core.config import EngineConfig
from anyrig.core.errors import InvalidRequest, UsageError
from anyrig.core.outputs import CompletionOutput, RequestOutput
from anyrig.core.params import SamplingParams
from anyrig.engine.engine import Engine

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """One model in this process.

    >>> llm = LLM("smollm2-135m")
    >>> llm.generate("The capital of France is", SamplingParams(max_tokens=5, temperature=0))[0].outputs[0].text

    Args:
        model: alias, hub id, directory or `.gguf` file.
        config: engine options; or give them as keywords (`max_model_len=512`).
        progress: called with a line of text while loading.

    Raises:
        ModelError, OutOfMemory, UsageError: as `Engine` does.
    """

    def __init__(
        self,
        model: str,
        *,
        config: EngineConfig | None = None,
        progress: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        if config is not None and options:
            raise UsageError(f"give either `config` or single options, not both. Given: {', '.join(options)}")
        if config is None:
            config = _config(options)
        self.engine = Engine(model, config, progress=progress)
        self._count = 0
        self._streams: dict[str, deque[RequestOutput]] = {}

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Complete every prompt; all of them are in flight together.

        Args:
            prompts: one prompt or several, each text or token ids.
            params: for all of them, or one for each; None: the model's own defaults.

        Returns:
            one result per prompt, in their order. A prompt that can't be served (too long, say) has a result
            with `finish_reason="error"`; the others run.
        """
        many = _as_prompts(prompts)
        each = self._params(params, len(many))
        levels = [priority] * len(many) if isinstance(priority, int) else list(priority)
        if len(levels) != len(many):
            raise UsageError(f"{len(levels)} priorities for {len(many)} prompts")
        ids = [self._next_id() for _ in many]
        results: dict[str, RequestOutput] = {}
        try:
            for request_id, prompt, one, level in zip(ids, many, each, levels, strict=True):
                try:
                    self.engine.add_request(request_id, prompt, one, priority=level)
                except InvalidRequest as error:
                    results[request_id] = _refused(request_id, prompt, error)
            while len(results) < len(ids):
                results.update((out.request_id, out) for out in self._step())
        except BaseException:
            for request_id in ids:
                self.engine.abort(request_id)
            raise
        return [results[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template.

        Args:
            messages: `[{"role": "user", "content": "..."}]`, or a list of such conversations.
            template: further variables of the chat template.

        Raises:
            InvalidRequest: the model has no chat template, or the template refuses the messages.
        """
        conversations: list[Any] = list(messages)
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        prompts = [self.engine.tokenizer.encode_chat(c, **template) for c in conversations]
        return self.generate(prompts, params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """The result as it grows, a snapshot per step; leaving the loop early aborts the request.

        Several streams may be read in turn, and `generate` called in between: all of them share the steps.
        """
        request_id = self._next_id()
        mine: deque[RequestOutput] = deque()
        self._streams[request_id] = mine
        try:
            self.engine.add_request(request_id, prompt, params or self.engine.default_params(), stream=True)
            while True:
                while not mine:
                    self._step()
                output = mine.popleft()
                yield output
                if output.finished:
                    return
        finally:
            del self._streams[request_id]
            self.engine.abort(request_id)

    def _step(self) -> list[RequestOutput]:
        """One step; what belongs to open streams goes there, the rest is returned."""
        rest = []
        for output in self.engine.step():
            if output.request_id in self._streams:
                self._streams[output.request_id].append(output.snapshot())
            else:
                rest.append(output)
        return rest

    def default_params(self, **given: Any) -> SamplingParams:
        """The model's own sampling defaults (generation_config.json), changed by what is given."""
        return self.engine.default_params(**given)

    def _next_id(self) -> str:
        self._count += 1
        return f"llm-{self._count}"

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            params = self.engine.default_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise UsageError(f"{len(params)} sampling parameters for {count} prompts")
        return list(params)


def _config(options: dict[str, Any]) -> EngineConfig:
    from dataclasses import fields
    from difflib import get_close_matches

    names = [f.name for f in fields(EngineConfig)]
    for name in options:
        if name not in names:
            near = get_close_matches(name, names, 1)
            raise UsageError(f"unknown engine option `{name}`", f"did you mean `{near[0]}`?" if near else None)
    return EngineConfig(**options)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    many: list[Any] = list(prompts)
    return [many] if many and isinstance(many[0], int) else many


def _refused(request_id: str, prompt: Prompt, error: InvalidRequest) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else None
    ids = [] if isinstance(prompt, str) else list(prompt)
    failed = CompletionOutput(0, finish_reason="error", error=str(error))
    return RequestOutput(request_id, text, ids, [failed], finished=True)
