"""The terminal: data goes to stdout, everything said about it to stderr, colours and moving lines to terminals only."""

import logging
import os
import sys
import warnings
from typing import TextIO

# What keeps other people's libraries silent; only set where the user has not decided.
_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}

_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Console:
    """How much is said, and how.

    Attributes:
        verbosity: -1 only errors, 0 what a person wants to know, 1 and 2 (`-v`, `-vv`) what a developer wants.
        debug: show tracebacks.
    """

    def __init__(self) -> None:
        self.verbosity = 0
        self.debug = False
        self._status = False

    def set(self, verbosity: int) -> None:
        """Take `verbosity` on; to be called before torch and Transformers are imported."""
        self.verbosity = verbosity
        level = {-1: logging.ERROR, 0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG)
        logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr, force=True)
        logging.getLogger("anyrig").setLevel(level)
        for name, value in _QUIET.items():
            if verbosity < 1:
                os.environ.setdefault(name, value)
            elif os.environ.get(name) == value:
                del os.environ[name]
        if not sys.warnoptions:
            warnings.simplefilter("ignore" if verbosity < 1 else "default")

    def note(self, text: str) -> None:
        """One line for the person, unless `-q`."""
        if self.verbosity >= 0:
            self.clear()
            print(self.dim(text), file=sys.stderr, flush=True)

    def status(self, text: str) -> None:
        """What is going on right now: a line that the next one replaces; nothing off a terminal (but see `-v`)."""
        if self.verbosity > 0:
            print(text, file=sys.stderr, flush=True)
        elif self.verbosity == 0 and moving(sys.stderr):
            width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            print(f"\r\x1b[2K{self.dim(text[: width - 1])}", end="", file=sys.stderr, flush=True)
            self._status = True

    def clear(self) -> None:
        """Take the status line away."""
        if self._status:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
            self._status = False

    def error(self, message: str, hint: str | None = None) -> None:
        self.clear()
        print(f"{styled('error:', '31;1', sys.stderr)} {message}", file=sys.stderr)
        if hint:
            print(f"       {hint}", file=sys.stderr)

    def dim(self, text: str, stream: TextIO | None = None) -> str:
        return styled(text, "2", stream or sys.stderr)


def styled(text: str, code: str, stream: TextIO) -> str:
    """`text` with an ANSI style where `stream` is a terminal and `NO_COLOR` is unset."""
    if not moving(stream) or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{code}m{text}\x1b[0m"


def moving(stream: TextIO) -> bool:
    """Whether lines on `stream` can be rewritten."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def printable(text: str, stream: TextIO) -> str:
    """`text` without the control characters with which a model could steer the terminal."""
    return text.translate(_CONTROLS) if stream.isatty() else text


console = Console()
