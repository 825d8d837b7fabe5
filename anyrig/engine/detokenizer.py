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
        # Tokens of the window before this one are shown completely; those from `_chunk` to `_clean` were shown last.
        self._chunk = 0
        self._clean = len(self._window)

    def push(self, ids: Iterable[int]) -> str:
        """Take the next tokens; return the text that has become final."""
        new = "".join(self._push(i) for i in ids if i not in self._skipped)
        self.text += new
        return new

    def flush(self) -> str:
        """The rest, once no more tokens will come: an unfinished character becomes U+FFFD."""
        rest = self._decode_window()[len(self._shown) :]
        self._shown += rest
        self._chunk, self._clean = self._clean, len(self._window)
        self.text += rest
        return rest

    def _push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode_window()
        if text.endswith(_REPLACEMENT):
            if len(self._window) - self._clean > _WINDOW:
                return self._give_up_on_the_start(text)
            return ""
        new = text[len(self._shown) :]
        self._shown = text
        self._chunk, self._clean = self._clean, len(self._window)
        if len(self._window) > _WINDOW:
            self._start_at(self._chunk)
        return new

    def _give_up_on_the_start(self, text: str) -> str:
        """Show what can't become part of a character any more, so that endless broken bytes don't grow the window.

        An unfinished character takes at most the last three tokens; any place before them will do where the text
        falls into two independent parts.
        """
        for cut in range(len(self._window) - 3, self._clean, -1):
            head = self._decode(self._window[:cut])
            if head.startswith(self._shown) and head + self._decode(self._window[cut:]) == text:
                new = head[len(self._shown) :]
                self._shown = head
                self._chunk, self._clean = self._clean, cut
                self._start_at(max(self._chunk, cut - _CONTEXT))
                return new
        return ""

    def _start_at(self, start: int) -> None:
        self._window = self._window[start:]
        self._chunk, self._clean = 0, self._clean - start
        self._shown = self._decode(self._window[: self._clean])

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
