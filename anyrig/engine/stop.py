"""Stop strings in a stream of text: found across token borders, and never shown in part before they are complete."""

from collections.abc import Sequence


class StopChecker:
    """Looks for stop strings in text that comes in pieces; how the text is cut into pieces makes no difference.

    The stop string that is complete first wins; of two that end at the same character, the longer one.

    Args:
        stop: strings to look for, none of them empty.
        include: the released text ends with the stop string instead of before it.
    """

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        # Longest first, so that a search for the smallest end meets the longer of two equals first.
        self.stop = tuple(sorted(set(stop), key=len, reverse=True))
        self.include = include
        self._held = ""

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """Take new text; return what may be shown of all text so far that wasn't shown yet, and the stop string hit.

        Args:
            armed: False before `min_tokens`: the text is released as it is and never becomes part of a match.
        """
        if not self.stop:
            return text, None
        text = self._held + text
        if not armed:
            self._held = ""
            return text, None
        found = [(at + len(s), s) for s in self.stop if (at := text.find(s)) >= 0]
        if found:
            end, hit = min(found, key=lambda f: f[0])
            self._held = ""
            return text[: end if self.include else end - len(hit)], hit
        cut = len(text) - max(_overlap(text, s) for s in self.stop)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """What is still held back, once no more text will come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
