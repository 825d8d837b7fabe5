"""Errors that a user can act on: each names the thing, the value and the remedy, and carries its exit code."""


class AnyrigError(Exception):
    """Base of every error that is the user's, the data's or the machine's fault rather than a bug of ours.

    Args:
        message: what is wrong: the thing and its value, one sentence without a full stop at the end.
        hint: what to do about it, or ``None`` when the message says so already.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}: {hint}")
        self.message = message
        self.hint = hint


class UsageError(AnyrigError):
    """Wrong flag, wrong configuration key, wrong combination of options (exit code 2)."""

    exit_code = 2


class ModelError(AnyrigError):
    """A model that cannot be found, read or run."""


class Unsupported(AnyrigError):
    """A model asks for something that the paged path can't do; it runs through the fallback instead."""


class InvalidRequest(AnyrigError, ValueError):
    """One request that cannot be served as asked (too long, contradictory parameters, uncompilable schema)."""


class DataError(AnyrigError):
    """Input or output data that cannot be read or written."""


class OutOfMemory(AnyrigError):
    """The machine or the KV pool is too small for what was asked."""
