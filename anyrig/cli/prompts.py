"""The prompts of `anyrig generate`: from arguments, files and stdin to token ids."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anyrig.core.errors import DataError, UsageError

if TYPE_CHECKING:
    from anyrig.models.tokenizer import Tokenizer


def gather(argument: str | None, more: Sequence[str], files: Sequence[Path]) -> list[str]:
    """All prompts in the order argument, `--prompt`, `--file`; stdin when there is none of them.

    Raises:
        UsageError: when nobody gave a prompt.
        DataError: when a file cannot be read as UTF-8 text, or a prompt is empty.
    """
    prompts = [_stdin() if argument == "-" else argument] if argument is not None else []
    prompts += [*more, *map(_file, files)]
    if not prompts:
        if sys.stdin.isatty():
            raise UsageError("no prompt was given", "give it as an argument, with --file FILE, or on stdin")
        prompts = [_stdin()]
    if any(not p for p in prompts):
        raise DataError("the prompt is empty")
    return prompts


def encode(tokenizer: "Tokenizer", prompt: str, *, chat: bool | None, system: str | None) -> list[int]:
    """Token ids of `prompt`, in the model's chat form if it has one.

    Args:
        chat: True insists on the chat template, False leaves it out, None takes it where there is one.
        system: system message, needs the chat form.

    Raises:
        UsageError: when the chat form is needed and the model has none.
    """
    if chat is None:
        chat = tokenizer.has_chat_template
    if not chat:
        if system is not None:
            raise UsageError(
                "`--system` needs the chat template",
                "leave out --raw" if tokenizer.has_chat_template else "this model has none: put it into the prompt",
            )
        return list(tokenizer.encode(prompt))
    if not tokenizer.has_chat_template:
        raise UsageError("this model has no chat template", "leave out --chat, or take an instruct model")
    messages = [{"role": "system", "content": system}] if system is not None else []
    return list(tokenizer.encode_chat([*messages, {"role": "user", "content": prompt}]))


def _stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError:
        raise DataError("stdin is not UTF-8 text") from None


def _file(path: Path) -> str:
    if str(path) == "-":
        return _stdin()
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except UnicodeDecodeError:
        raise DataError(f"not UTF-8 text: {path}") from None
    except OSError as e:
        raise DataError(f"cannot read the prompt from {path} ({e.strerror})") from None
