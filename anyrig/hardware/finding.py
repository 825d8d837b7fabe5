"""What doctor reports: one sentence about one thing, and the remedy where it is not well."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """A judged fact.

    ``problem``: something in this machine cannot be used as it stands. ``warning``: it works, but slower, smaller or
    otherwise than one would expect. ``remedy`` is set exactly where ``state`` is not ``ok``.
    """

    name: str
    state: State
    sentence: str
    remedy: str | None = None

    def __post_init__(self) -> None:
        if (self.state == "ok") != (self.remedy is None):
            raise ValueError(f"finding {self.name!r} is {self.state!r} with remedy {self.remedy!r}")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def ok(name: str, sentence: str) -> Finding:
    return Finding(name, "ok", sentence)


def warning(name: str, sentence: str, remedy: str) -> Finding:
    return Finding(name, "warning", sentence, remedy)


def problem(name: str, sentence: str, remedy: str) -> Finding:
    return Finding(name, "problem", sentence, remedy)


def size(count: int) -> str:
    """Bytes as a person reads them: ``22.7 GiB``, ``512 MiB``; whole numbers from 100 GiB on."""
    if count < 2**30:
        return f"{count / 2**20:.0f} MiB"
    return f"{count / 2**30:.1f} GiB" if count < 100 * 2**30 else f"{count / 2**30:.0f} GiB"
