"""The work that is measured: random token ids, so that nobody profits from what the text says, or a file's prompts."""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from anyrig.core.errors import DataError


@dataclass(frozen=True, slots=True)
class Work:
    """`n` requests of `prompt` tokens each, all at once; `gen` tokens are generated greedily, end tokens ignored.

    With `texts`, request i has the tokens of text `i % len(texts)` as its prompt, and `prompt` says nothing.
    """

    n: int = 32
    prompt: int = 128
    gen: int = 128
    texts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Tells works of the same lengths apart: `random ids`, or what the texts hash to."""
        if not self.texts:
            return "random ids"
        return "texts " + hashlib.sha256("\0".join(self.texts).encode()).hexdigest()[:12]

    def prompts(
        self, seed: int, vocab_size: int, encode: Callable[[str], Sequence[int]] | None = None
    ) -> list[list[int]]:
        """Token ids; the first thousand (special and single-byte tokens in most vocabularies) are left out.

        Args:
            seed: of the random ids; texts are the same for every seed.
            vocab_size: ids are below it.
            encode: the model's tokenizer, for texts.
        """
        if self.texts:
            if encode is None:
                raise ValueError("a work of texts needs `encode`")
            ids = [list(encode(text)) for text in self.texts[: self.n]]
            return [ids[i % len(ids)] for i in range(self.n)]
        rng = random.Random(seed)
        low, high = min(1000, vocab_size // 2), min(40_000, vocab_size)
        return [[rng.randrange(low, high) for _ in range(self.prompt)] for _ in range(self.n)]

    def warm_up(self) -> "Work":
        """A small part of it."""
        return replace(self, n=min(self.n, 4), gen=8)


def read_texts(file: Path) -> tuple[str, ...]:
    """The prompts of a file: `.jsonl` holds one object with a "prompt" per line, any other file one prompt per line.

    Raises:
        DataError: unreadable, empty, or a line that is no such object; with its number.
    """
    try:
        lines = file.expanduser().read_text("utf-8").splitlines()
    except OSError as error:
        raise DataError(f"cannot read the prompts from {file} ({error.strerror})") from None
    except UnicodeDecodeError:
        raise DataError(f"not UTF-8 text: {file}") from None
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise DataError(f"{file} holds no prompts", "one per line, or objects with a `prompt` in a .jsonl file")
    if file.suffix != ".jsonl":
        return tuple(line for _, line in numbered)
    return tuple(_prompt(line, f"line {i} of {file}") for i, line in numbered)


def _prompt(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error})") from None
    text = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(text, str) or not text:
        raise DataError(f"{where} has no `prompt`", 'each line must look like {"prompt": "..."}')
    return text
