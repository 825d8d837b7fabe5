"""A conversation: its messages, what of them fits into the context, and its file."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from anyrig.core.errors import DataError, InvalidRequest

if TYPE_CHECKING:
    from anyrig.models.tokenizer import Tokenizer

Message = dict[str, str]


@dataclass(slots=True)
class Conversation:
    """Messages in turn, beginning with the user's; the system message is kept apart, so that it is never dropped.

    Attributes:
        first: the oldest message that is still sent.
    """

    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    first: int = 0

    def say(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def take_back_answer(self) -> bool:
        """Drop the last answer, so that the question before it is open again; whether there was a question."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        return bool(self.messages)

    def clear(self) -> None:
        self.messages.clear()
        self.first = 0

    def encode(self, tokenizer: "Tokenizer", room: int) -> tuple[list[int], int]:
        """Token ids of the newest turns that fit into `room` tokens, and how many turns were newly left out for that.

        Raises:
            InvalidRequest: when even the last message alone is too long.
        """
        turns = [i for i, m in enumerate(self.messages) if m["role"] == "user" and i >= self.first]
        ids: list[int] = []
        for dropped, first in enumerate(turns):
            ids = list(tokenizer.encode_chat(self.as_list(first)))
            # Once something must go, a quarter goes: the turns after this one then find their beginning in the
            # prefix cache, instead of a new beginning each time.
            if len(ids) <= (room if dropped == 0 or first == turns[-1] else room * 3 // 4):
                self.first = first
                return ids, dropped
        raise InvalidRequest(f"the message takes {len(ids)} tokens, and the context has room for {room}")

    def as_list(self, first: int = 0) -> list[Message]:
        head = [{"role": "system", "content": self.system}] if self.system is not None else []
        return head + self.messages[first:]

    def save(self, path: Path) -> None:
        """Write `{"messages": [...]}`, the form that `anyrig batch --messages-column` and trainers read."""
        indent = None if path.suffix == ".jsonl" else 2
        text = json.dumps({"messages": self.as_list()}, ensure_ascii=False, indent=indent)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as e:
            raise DataError(f"cannot write {path} ({e.strerror})") from None

    @classmethod
    def load(cls, path: Path) -> "Conversation":
        """Read what `save` wrote, or a bare list of messages.

        Raises:
            DataError: when it cannot be read or is something else.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as e:
            raise DataError(f"cannot read {path} ({e.strerror})") from None
        except ValueError:
            raise DataError(f"not a JSON file: {path}") from None
        messages = content.get("messages") if isinstance(content, dict) else content
        if not isinstance(messages, list) or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages
        ):
            raise DataError(f"no conversation in {path}", 'it must hold {"messages": [{"role": ..., "content": ...}]}')
        messages = [{"role": m["role"], "content": m["content"]} for m in messages]
        system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
        return cls(system, messages)
