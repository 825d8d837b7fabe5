"""Which implementations of an op exist, which one is used here, and why not the others (`anyrig doctor --ops`)."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anyrig.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an op.

    Attributes:
        op, name: such as "attention" and "ref".
        target: `module` or `module:attribute`, imported only when it is used.
        why_not: the reason why it can't run on a device ("cpu", "cuda"), or None when it can.
    """

    op: str
    name: str
    target: str
    why_not: Callable[[str], str | None]

    def load(self) -> Any:
        module, _, attribute = self.target.partition(":")
        loaded = importlib.import_module(module)
        return getattr(loaded, attribute) if attribute else loaded


def _anywhere(device: str) -> str | None:
    return None


def _kernels(device: str) -> str | None:
    """Why the CPU kernels can't run: no other device, not built, or switched off."""
    if device != "cpu":
        return "for CPUs"
    from anyrig.ops.cpu import native

    return native.why_not()


# Best first. `ref` comes last and runs everywhere, so every op always has an implementation.
IMPLEMENTATIONS = [
    Implementation("attention", "cpu", "anyrig.ops.cpu.attention:CpuAttention", _kernels),
    Implementation("attention", "ref", "anyrig.ops.ref.attention:RefAttention", _anywhere),
    Implementation("sample", "cpu", "anyrig.ops.cpu.sample", _kernels),
    Implementation("sample", "ref", "anyrig.ops.ref.sample", _anywhere),
]


def choose(
    op: str, device: str, name: str | None = None, suits: Callable[[Any], str | None] | None = None
) -> Implementation:
    """The first implementation of `op` that runs on `device`, or the one called `name`.

    Args:
        suits: says of a loaded implementation why it is not for the work at hand, or None when it is; None: any
            is, and none is loaded.

    Raises:
        UsageError: when `name` does not exist or can't run here, with the reason.
    """

    def why_not(implementation: Implementation) -> str | None:
        return implementation.why_not(device) or (None if suits is None else suits(implementation.load()))

    known = [i for i in IMPLEMENTATIONS if i.op == op]
    if name is None:
        return next(i for i in known if why_not(i) is None)
    for implementation in known:
        if implementation.name == name:
            if reason := why_not(implementation):
                raise UsageError(f"{op}: implementation {name!r} can't run on {device}", reason)
            return implementation
    raise UsageError(f"{op}: no implementation {name!r}", "there is " + ", ".join(i.name for i in known))


def report(device: str = "cpu") -> list[tuple[str, str, bool, str]]:
    """Rows `(op, implementation, chosen, reason)`."""
    rows = []
    for i in IMPLEMENTATIONS:
        chosen = choose(i.op, device) is i
        reason = i.why_not(device) or ("first that runs here" if chosen else "a faster one runs here")
        rows.append((i.op, i.name, chosen, reason))
    return rows
