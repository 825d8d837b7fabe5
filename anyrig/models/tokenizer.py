"""Text <-> token ids, straight on the tokenizers library: importing Transformers would cost every start two seconds."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from anyrig.core.errors import InvalidRequest, ModelError
from anyrig.models import chat_template
from anyrig.models.checkpoint import read_json

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of one model directory, with its chat template.

    Attributes:
        backend: the library's tokenizer, for constrained decoding and the like.
        special_tokens: named special tokens (`bos_token`: text, ...), as the chat template sees them.
        special_ids: ids that `decode(skip_special_tokens=True)` leaves out.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], template: str | None = None
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_template = template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added = {token_id: token.content for token_id, token in added.items()}

    @classmethod
    def from_dir(cls, path: Path) -> "Tokenizer":
        """Read `tokenizer.json` and what belongs to it; a directory without one is left to Transformers' AutoTokenizer.

        Raises:
            ModelError: no tokenizer in the directory, or a broken one.
        """
        config = read_json(path / "tokenizer_config.json", required=False)
        if (path / "tokenizer.json").is_file():
            try:
                backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
            except Exception as error:  # the library raises bare Exception
                raise ModelError(f"Cannot read {path / 'tokenizer.json'}: {error}", "fetch the file again") from error
        else:
            backend = _by_transformers(path)
        # A length limit saved by a trainer must not cut prompts here.
        backend.no_truncation()
        backend.no_padding()
        special = _special_tokens(path, config)
        _add_missing(backend, special)
        return cls(backend, special, _template(path, config))

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens spelled out in the text become those tokens.

        What `add_special_tokens` adds is what tokenizer.json says; as in Transformers, the flags `add_bos_token` and
        `add_eos_token` of tokenizer_config.json have no say where there is a tokenizer.json.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no whole UTF-8 character come out as U+FFFD. Unknown ids count as nothing."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Readable text of one token, spaces included: for lists of logprobs."""
        if (added := self._added.get(token_id)) is not None:
            return added
        if self.backend.id_to_token(token_id) is None:
            return ""
        # Some decoders strip the space of the first token, so the token is decoded behind another one.
        anchor, prefix = self._anchor
        return self.backend.decode([*anchor, token_id], skip_special_tokens=False)[len(prefix) :]

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        ids = self.encode("a", add_special_tokens=False)
        return ids, self.decode(ids, skip_special_tokens=False)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt of a conversation. `kwargs` reach the template (`tools`, `enable_thinking`, ...).

        Raises:
            InvalidRequest: no chat template, or the template refuses (with its own words).
        """
        if self.chat_template is None:
            raise InvalidRequest(
                "This model has no chat template", "use plain prompts (`generate`), or an instruct version of the model"
            )
        variables = {**self.special_tokens, "tools": None, "documents": None, **kwargs}
        return chat_template.render(
            self.chat_template, messages, add_generation_prompt=add_generation_prompt, **variables
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Token ids of a conversation. The template writes the special tokens, so none are added."""
        return self.encode(self.render_chat(messages, **kwargs), add_special_tokens=False)

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


def _special_tokens(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    stated = {**read_json(path / "special_tokens_map.json", required=False), **config}
    found: dict[str, str] = {}
    for name in _NAMED:
        value = stated.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _add_missing(backend: tokenizers.Tokenizer, special: Mapping[str, str]) -> None:
    """Named tokens must be matched whole in text, even where tokenizer.json does not list them as added."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [
        text for text in dict.fromkeys(special.values()) if text not in known and backend.token_to_id(text) is not None
    ]
    if missing:
        backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in missing])


def _template(path: Path, config: Mapping[str, Any]) -> str | None:
    """The default chat template: `chat_template.jinja`, else the one in a JSON file."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    for stated in (config, read_json(path / "chat_template.json", required=False)):
        template = stated.get("chat_template")
        if isinstance(template, list):
            template = next((t["template"] for t in template if t.get("name") == "default"), None)
        if isinstance(template, str):
            return template
    return None


def _by_transformers(path: Path) -> tokenizers.Tokenizer:
    names = ("tokenizer.model", "vocab.json", "spiece.model", "vocab.txt", "tokenizer_config.json")
    if not any((path / name).is_file() for name in names):
        raise ModelError(
            f"{path} has no tokenizer (tokenizer.json)",
            "save it into the same directory: `AutoTokenizer.from_pretrained(...).save_pretrained(DIRECTORY)`",
        )
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # a converter fails in as many ways as there are vocabulary formats
        raise ModelError(f"Cannot read the tokenizer in {path}: {error}", "save it as tokenizer.json") from error
    backend = getattr(slow, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(f"{path} has a tokenizer that only Python code reads", "save it as tokenizer.json")
    return backend
