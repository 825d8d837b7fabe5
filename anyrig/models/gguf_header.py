"""The head of a GGUF file: metadata and whether the file is whole. No tensor is read.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyrig.core.errors import ModelError

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by key (arrays as their length), and the bytes that a whole file has at least."""

    metadata: dict[str, Any]
    expected_bytes: int

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "?"))


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the head of `path`; milliseconds, where the `gguf` package takes seconds for a large vocabulary.

    Raises:
        ModelError: not GGUF, broken, cut short (expected and actual bytes), or one part of a split model.
    """
    actual = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ModelError(f"{path} is not a GGUF file: it does not start with the letters GGUF")
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _Cursor(data).header()
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise ModelError(
                f"{path} is broken or cut short: its head does not end within its {actual:,} bytes",
                "fetch the file again",
            ) from error
        except _Unreadable as error:
            raise ModelError(f"{path}: {error}", "fetch the file again, or write it anew with llama.cpp") from error
    if actual < header.expected_bytes:
        raise ModelError(
            f"{path} is cut short: {actual:,} bytes, expected {header.expected_bytes:,}", "fetch the file again"
        )
    if header.metadata.get("split.count", 1) > 1:
        raise ModelError(
            f"{path} is one of {header.metadata['split.count']} parts",
            "join them first: `llama-gguf-split --merge FIRST_PART WHOLE.gguf`",
        )
    return header


class _Unreadable(Exception):
    """A head that is whole but not understood."""


class _Cursor:
    """Walks the bytes of a GGUF head."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 4

    def header(self) -> GgufHeader:
        version = self.scalar("I")
        if version not in (2, 3):
            raise _Unreadable(f"GGUF version {version} is not supported (2 and 3 are)")
        tensors, entries = self.scalar("Q"), self.scalar("Q")
        metadata = {}
        for _ in range(entries):
            key = self.string()
            metadata[key] = self.value(self.scalar("I"))
        end = max((self.tensor_end() for _ in range(tensors)), default=0)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise _Unreadable(f"its alignment is {alignment!r}")
        start = -(-self.at // alignment) * alignment
        return GgufHeader(metadata, start + end)

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self.data, self.at)
        self.skip(struct.calcsize(f"<{form}"))
        return value

    def skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self.data):
            raise IndexError(self.at)

    def string(self) -> str:
        length = self.scalar("Q")
        self.skip(length)
        return self.data[self.at - length : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise _Unreadable(f"its metadata has a value of unknown type {kind}")
        element, count = self.scalar("I"), self.scalar("Q")
        if element in _SCALARS:
            self.skip(count * struct.calcsize(f"<{_SCALARS[element]}"))
        else:
            for _ in range(count):
                if element == _STRING:
                    self.skip(self.scalar("Q"))
                else:
                    self.value(element)
        return count

    def tensor_end(self) -> int:
        """Bytes from the start of the data section to the end of the next tensor of the table."""
        from gguf.constants import GGML_QUANT_SIZES

        self.string()
        elements = 1
        for _ in range(self.scalar("I")):
            elements *= self.scalar("Q")
        kind, offset = self.scalar("I"), self.scalar("Q")
        if kind not in GGML_QUANT_SIZES:
            raise _Unreadable(f"it holds a tensor of unknown type {kind}")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        return int(offset + elements // block * block_bytes)
