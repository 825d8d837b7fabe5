"""What a person types in a chat: lines with editing and history, several of them where asked for, or piped turns."""

import contextlib
import re
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

from anyrig.cli.console import styled

FENCE = '"""'


class Editor:
    """Turns read from stdin.

    A line that ends in a backslash goes on in the next one; a block between two triple quotes is one turn. On a
    terminal there is a prompt, line editing and a history file; piped input is read as it is.
    """

    def __init__(self, history: Path) -> None:
        self.interactive = sys.stdin.isatty()
        self._history = history
        if self.interactive:
            self._load_history()

    def turns(self) -> Iterator[str]:
        """Every turn that isn't blank, until the input ends.

        Raises:
            KeyboardInterrupt: on Ctrl-C; the iteration is over then, start a new one to go on.
        """
        with contextlib.suppress(EOFError):
            while True:
                if (turn := self._turn()).strip():
                    yield turn

    def _turn(self) -> str:
        line = self._line("> ")
        if line.strip().startswith(FENCE):
            return self._block(line.strip().removeprefix(FENCE))
        lines = []
        while line.endswith("\\"):
            lines.append(line[:-1])
            line = self._line(". ")
        return "\n".join([*lines, line])

    def _block(self, line: str) -> str:
        lines = []
        while not line.rstrip().endswith(FENCE):
            lines.append(line)
            line = self._line(". ")
        lines.append(line.rstrip().removesuffix(FENCE))
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str:
        if not self.interactive:
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line.rstrip("\r\n")
        if "readline" in sys.modules and (bold := styled(prompt, "1", sys.stdout)) != prompt:
            prompt = re.sub(r"(\x1b\[\d*m)", "\x01\\1\x02", bold)  # readline must not count what takes no room
        return input(prompt)

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Keys typed meanwhile don't show up in the answer; they wait for the next turn."""
        if not self.interactive:
            yield
            return
        before = termios.tcgetattr(sys.stdin)
        silent = [*before]
        silent[3] &= ~termios.ECHO
        termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
        try:
            yield
        finally:
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)

    def _load_history(self) -> None:
        try:
            import readline
        except ImportError:  # some builds of Python come without it: plain lines then
            return
        with contextlib.suppress(OSError):
            readline.read_history_file(self._history)
        readline.set_history_length(1000)

    def save_history(self) -> None:
        """Keep the typed lines for the next chat, readable by the user alone."""
        if not self.interactive or "readline" not in sys.modules:
            return
        import readline

        with contextlib.suppress(OSError):  # a read-only home must not spoil a chat's end
            self._history.parent.mkdir(parents=True, exist_ok=True)
            self._history.touch(mode=0o600)
            readline.write_history_file(self._history)
