"""Token ids to text, a few at a time."""

from collections.abc import Iterable, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
# Prompt tokens that the first output token is decoded behind: enough to hold a whole character of single bytes.
_CONTEXT = 6
# The window is decoded at each push, and shortened when it has become longer than this.
_WINDOW = 10


class Decoder(Protocol):
    """What is needed of a tokenizer (`models.tokenizer.Tokenizer`)."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """Text of one growing output; everything `push` returns is final and made of whole characters.

    A token's text depends on its neighbours: SentencePiece drops the space in front of the first token, a character may
    be spread over several tokens, some decoders join words. So tokens are decoded in a window that begins with tokens
    already shown, and what comes after the text shown is new:

        tokens   ... prompt | t1 t2 t3 t4 t5 ...
        window              [ t2 t3 t4 t5 ]
        text                  shown | new | U+FFFD = perhaps the beginning of a character, held back

    All pieces joined, `flush` included, are the text that decoding prompt and output together would show after the
    prompt's own. One exception: where a tokenizer decodes a run of single-byte tokens as a whole (byte fallback) and a
    later one spoils it, characters of that run which were shown before stay.

    Attributes:
        text: everything returned so far.
    """

    def __init__(self, tokenizer: Decoder, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        tail = prompt_ids[-4 * _CONTEXT :]
        self._window = [i for i in tail if i not in self._skipped][-_CONTEXT:]
        self._shown = self._decode(self._window)
        # The window's text up to its token `_clean` is shown; the tokens from `_chunk` to there were shown last.
        self._chunk = 0
        self._clean = len(self._window)

    def push(self, ids: Iterable[int]) -> str:
        """Take the next tokens; return the text that has become final."""
        new = "".join(self._push(i) for i in ids if i not in self._skipped)
        self.text += new
        return new

    def flush(self) -> str:
        """The rest, once no more tokens will come: an unfinished character becomes U+FFFD."""
        text = self._decode_window()
        rest = text[len(self._shown) :]
        self._shown = text
        self._clean = len(self._window)
        self.text += rest
        return rest

    def _push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode_window()
        # An unfinished character is one U+FFFD, or up to three where each of its bytes is decoded to one.
        held = min(len(text) - len(text.rstrip(_REPLACEMENT)), 3)
        new = text[len(self._shown) : len(text) - held]
        self._shown += new
        if not held:
            self._chunk, self._clean = self._clean, len(self._window)
        if len(self._window) > _WINDOW:
            self._shorten(text)
        return new

    def _shorten(self, text: str) -> None:
        """Let the window begin later: with the tokens shown last, or inside an endless run of unfinished characters."""
        start = self._chunk or len(self._window) - _CONTEXT
        shorter = self._decode(self._window[start:])
        rest = text[len(self._shown) :]
        if shorter.endswith(rest):
            self._window = self._window[start:]
            self._shown = shorter[: len(shorter) - len(rest)]
            self._chunk, self._clean = 0, max(0, self._clean - start)

    def _decode_window(self) -> str:
        text = self._decode(self._window)
        if not text.startswith(self._shown):
            # Byte fallback, see above: go on from the tokens that weren't shown.
            self._window = self._window[self._clean :]
            self._chunk, self._clean, self._shown = 0, 0, ""
            text = self._decode(self._window)
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
