"""Text that arrives in pieces, broken between words at the terminal's edge."""

import shutil
import unicodedata


class Wrapper:
    """Turns pieces of text into what to write, so that no word is cut.

    A word is shown while it grows; when it reaches the edge, it is erased and written again in the next line.

    Args:
        width: columns of the terminal.
    """

    def __init__(self, width: int | None = None) -> None:
        self._width = width or shutil.get_terminal_size().columns
        self._column = 0
        self._word = ""

    def feed(self, text: str) -> str:
        out: list[str] = []
        for char in text:
            if char == "\n":
                self._column, self._word = 0, ""
            elif char.isspace():
                self._word = ""
                if self._column >= self._width - 1:  # the break takes the place of the space
                    char, self._column = "\n", 0
                else:
                    self._column += 1
            else:
                out.append(self._room_for(char))
                self._word += char
                self._column += _columns(char)
            out.append(char)
        return "".join(out)

    def _room_for(self, char: str) -> str:
        """What to write before `char`, so that it and the word that it ends stand in one line."""
        if self._column + _columns(char) <= self._width - 1:
            return ""
        columns = sum(map(_columns, self._word))
        if columns >= self._column:  # a word as long as the line, or a script without spaces
            self._column, self._word = 0, ""
            return "\n"
        self._column = columns
        back = f"\x1b[{columns}D" if columns else ""
        return f"{back}\x1b[K\n{self._word}"


def _columns(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) == "Cf":
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
