"""Content hashes of pages: two prompts that start alike have the same hashes for the pages they share."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b


def root_hash(model_version: str, salt: str = "") -> bytes:
    """What every chain starts from.

    The model's version is part of it, so that keys and values of other weights are never taken over;
    so is the salt of a tenant, so that tenants who must not share cannot.
    """
    return blake2b(f"{model_version}\0{salt}".encode(), digest_size=16).digest()


def page_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of one full page, given that of everything before it (16 bytes; collisions are out of reach)."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


def extend(hashes: list[bytes], root: bytes, tokens: Sequence[int], page_size: int, limit: int) -> None:
    """Add to `hashes` those of the full pages of `tokens[:limit]` that it lacks."""
    for i in range(len(hashes), limit // page_size):
        parent = hashes[-1] if hashes else root
        hashes.append(page_hash(parent, tokens[i * page_size : (i + 1) * page_size]))
