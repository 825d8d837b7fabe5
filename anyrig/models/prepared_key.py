"""What a prepared file is made from: its key, and with it its name in `ANYRIG_HOME/prepared`."""

import hashlib
import json
import re
import sys
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import anyrig
from anyrig.core.decoder import WeightKind
from anyrig.core.env import home
from anyrig.models import cache, checkpoint

# Raise when what `describe.py`, `block.py` or `trace.py` say of the same model changes: older files are made anew.
DESCRIPTION = 1
SUFFIX = ".anyrig"


def directory() -> Path:
    return home() / "prepared"


@lru_cache(maxsize=1)
def transformers_version() -> str:
    """Of the installed Transformers, which is not imported; "" where there is none.

    Read off the name of its directory of metadata: `importlib.metadata` says the same, but its import takes longer
    (12 ms) than mapping a model.
    """
    for place in sys.path:
        for path in Path(place).glob("transformers-*.dist-info"):
            return path.name.removeprefix("transformers-").removesuffix(".dist-info")
    from importlib import metadata

    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class Key:
    """What a prepared file was made from; another one is of no use.

    Attributes:
        model: as `anyrig models` shows it.
        version: of the model's files (`ModelInfo.version`).
        kind, group, minimum: how the matrices are packed (`DecoderSpec`).
        layout: number of the native module's layout.
        length: what the rope was frozen for, where its kind depends on the length; 0 otherwise.
        anyrig: our version.
        description: `DESCRIPTION`.
        transformers: version of the library whose module was described.
    """

    model: str
    version: str
    kind: WeightKind
    group: int
    minimum: bool
    layout: int
    length: int = 0
    anyrig: str = anyrig.__version__
    description: int = DESCRIPTION
    transformers: str = field(default_factory=transformers_version)

    @property
    def path(self) -> Path:
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]
        return directory() / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', self.model).strip('.-')}-{self.kind}-{digest}{SUFFIX}"


def key_of(
    name: str,
    path: Path,
    max_model_len: int,
    *,
    kind: WeightKind,
    layout: int,
    group: int = 0,
    minimum: bool = False,
) -> Key:
    """The key of a model directory (`locate.resolve`).

    Raises:
        ModelError: when the directory has no configuration.
    """
    info = checkpoint.read_info(path)
    name, _, _ = name.partition("@")  # a revision of the hub shows in the version
    if "/" not in name and path.parent != cache.models_dir():
        # Directories of users may bear the same name.
        name = f"{name}-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    length = max_model_len if _length_matters(checkpoint.read_config(path)) else 0
    return Key(name, info.version, kind, group, minimum, layout, length)


def _length_matters(config: dict[str, Any]) -> bool:
    """Whether a kind of rope is named that `models/rope.py` freezes; there may be one per type of layer."""
    for key, value in config.items():
        if isinstance(value, dict) and _length_matters(value):
            return True
        if key in ("rope_type", "type") and isinstance(value, str) and ("dynamic" in value or value == "longrope"):
            return True
    return False
