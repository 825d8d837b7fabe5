"""From a row to the messages (or the plain text) that go to the model, and to token ids that fit its context."""

import json
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anyrig.batch.config import BatchConfig
from anyrig.batch.template import MissingColumn, Template, missing
from anyrig.core.errors import AnyrigError, UsageError

if TYPE_CHECKING:
    from anyrig.models.tokenizer import Tokenizer

Messages = list[dict[str, Any]]

_TRIES = 8  # cutting text and encoding it again can miss by a token or two


class RowProblem(AnyrigError):
    """A row that can't become a prompt."""


class RowSkipped(Exception):
    """A row that `--on-long skip` leaves out."""


class Prompt:
    """The templates of a job.

    Attributes:
        names: columns they name.
    """

    def __init__(self, config: BatchConfig, columns: Sequence[str] = ()) -> None:
        """
        Args:
            columns: of the first row, for the message when there is no template.

        Raises:
            UsageError: no prompt, or a template with a syntax error.
        """
        if config.prompt is None and config.messages_column is None:
            raise UsageError("no prompt", "give a template: --prompt 'Summarize: {{ text }}'")
        self.template = Template.of_option(config.prompt, "--prompt") if config.prompt is not None else None
        self.system = Template.of_option(config.system, "--system") if config.system is not None else None
        self.messages_column = config.messages_column
        templates = [t for t in (self.template, self.system) if t is not None]
        self.names = frozenset().union(*(t.names for t in templates))

    def identity(self) -> dict[str, Any]:
        """What makes two runs' prompts the same."""
        return {
            "prompt": self.template and self.template.text,
            "system": self.system and self.system.text,
            "messages_column": self.messages_column,
        }

    def check_columns(self, columns: Sequence[str]) -> None:
        """Catch the template of somebody who writes `{text}` for `{{ text }}`.

        Raises:
            UsageError: when the template names no column but holds one in single braces.
        """
        if self.template is None or self.template.names:
            return
        for column in columns:
            if f"{{{column}}}" in self.template.text:
                raise UsageError(f"{self.template.flag} names no column", f"a column is written {{{{ {column} }}}}")

    def messages(self, values: Mapping[str, Any]) -> Messages:
        """Raises: RowProblem (as MissingColumn or TemplateError where the template is to blame)."""
        system = self.system.render(values) if self.system is not None else None
        if self.template is not None:
            text = self.template.render(values)
            if not text.strip():
                raise RowProblem("the prompt is empty")
            found: Messages = [{"role": "user", "content": text}]
        else:
            found = self._column(values)
        if system is not None and found[0]["role"] != "system":
            found.insert(0, {"role": "system", "content": system})
        return found

    def _column(self, values: Mapping[str, Any]) -> Messages:
        name = self.messages_column
        assert name is not None
        if name not in values:
            raise MissingColumn(missing(name, values))
        value = values[name]
        if isinstance(value, str):  # CSV has no lists
            try:
                value = json.loads(value)
            except ValueError:
                raise RowProblem(f"`{name}` is text, but no JSON list of messages") from None
        if not isinstance(value, list) or not value:
            raise RowProblem(f"`{name}` must be a list of {{role, content}}")
        for number, message in enumerate(value, 1):
            if not isinstance(message, Mapping) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                raise RowProblem(f"`{name}`: message {number} must have a role and a content, both text")
        # Arrow structs give every message every field: those that are null were never there.
        return [{k: v for k, v in message.items() if v is not None} for message in value]


class Encoder:
    """Prompts as token ids, at most `limit` of them.

    Attributes:
        chat: whether the model's chat template frames the prompt.
    """

    def __init__(self, prompt: Prompt, config: BatchConfig, tokenizer: "Tokenizer", model: str) -> None:
        """Raises: UsageError when the job needs a chat template and the model has none."""
        self.prompt = prompt
        self.tokenizer = tokenizer
        self.chat = tokenizer.has_chat_template and not config.raw
        self.limit: int | None = None
        self._on_long = config.on_long
        if not tokenizer.has_chat_template:
            for flag, given in (("--system", config.system), ("--messages-column", config.messages_column)):
                if given is not None:
                    raise UsageError(
                        f"{model} has no chat template, which {flag} needs",
                        "put everything into --prompt, or take an instruct model",
                    )

    def text(self, values: Mapping[str, Any]) -> str:
        """The prompt as the model sees it."""
        messages = self.prompt.messages(values)
        text = self.tokenizer.render_chat(messages) if self.chat else messages[0]["content"]
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RowProblem("the prompt holds half a surrogate pair, which is no text") from None
        return text

    def encode(self, values: Mapping[str, Any]) -> list[int]:
        """Token ids of one row's prompt, cut if the job says so.

        Raises:
            RowSkipped: it is too long, and such rows are skipped.
            RowProblem: it can't be made, or is too long. (AnyrigError from the chat template passes through.)
        """
        ids = self._ids(values)
        if self.limit is None or len(ids) <= self.limit:
            return ids
        if self._on_long == "skip":
            raise RowSkipped
        if self._on_long == "error":
            raise RowProblem(
                f"the prompt has {len(ids):,} tokens, {self.limit:,} fit beside the output",
                "--on-long truncate-right cuts it, --max-tokens makes room",
            )
        return self._cut(dict(values) if self._looks_at_all else {n: values[n] for n in self._sources(values)}, ids)

    @property
    def _looks_at_all(self) -> bool:
        return "row" in self.prompt.names

    def _sources(self, values: Mapping[str, Any]) -> list[str]:
        names = self.prompt.names if self.prompt.messages_column is None else {self.prompt.messages_column}
        return [n for n in names | self.prompt.names if n in values]

    def _ids(self, values: Mapping[str, Any]) -> list[int]:
        return self.tokenizer.encode(self.text(values), add_special_tokens=not self.chat)

    def _cut(self, values: dict[str, Any], ids: list[int]) -> list[int]:
        """Shorten the longest column (or the last user message) until the prompt fits; all else stays whole."""
        assert self.limit is not None
        for attempt in range(_TRIES):
            over = len(ids) - self.limit
            values = self._shorter(values, over + attempt)
            before, ids = len(ids), self._ids(values)
            if len(ids) <= self.limit:
                return ids
            if len(ids) >= before:
                break
        raise RowProblem(f"the prompt can't be cut to {self.limit:,} tokens: {len(ids):,} are left without its columns")

    def _shorter(self, values: dict[str, Any], tokens: int) -> dict[str, Any]:
        column = self.prompt.messages_column
        if column is not None:
            messages = self.prompt._column(values)
            at = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=len(messages) - 1)
            messages[at] = {**messages[at], "content": self._drop(messages[at]["content"], tokens)}
            return {**values, column: messages}
        texts = {name: value for name, value in values.items() if isinstance(value, str)}
        if not texts:
            return values
        longest = max(texts, key=lambda name: len(texts[name]))
        return dict(ChainMap({longest: self._drop(texts[longest], tokens)}, values))

    def _drop(self, text: str, tokens: int) -> str:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        keep = max(0, len(ids) - tokens)
        kept = ids[len(ids) - keep :] if self._on_long == "truncate-left" else ids[:keep]
        # A character cut in the middle of its bytes would come out as U+FFFD.
        return self.tokenizer.decode(kept, skip_special_tokens=False).strip("�")


def row_problem(error: AnyrigError, where: str) -> str:
    """The `error` cell of a row."""
    hint = f": {error.hint}" if error.hint else ""
    return f"{where}: {error.message}{hint}"
