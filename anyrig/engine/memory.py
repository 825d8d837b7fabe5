"""How much memory the keys and values get, and how many pages that is."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anyrig.core.config import EngineConfig, parse_size
from anyrig.core.errors import OutOfMemory
from anyrig.core.spec import LayerSpec
from anyrig.hardware import memory
from anyrig.ops.attention import KVPages

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

SHARE_OF_FREE = 0.5  # of what is free on a CPU; on a GPU 0.9 of what the weights left
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
ENOUGH_ON_CPU = 4 << 30  # more is taken only when one sequence of the greatest length needs it


@dataclass(frozen=True, slots=True)
class KVSize:
    """Attributes:
    page_bytes: bytes of one page in all layers together.
    num_pages: pages, the trash page included.
    """

    page_bytes: int
    num_pages: int

    @property
    def total_bytes(self) -> int:
        return self.page_bytes * self.num_pages


def own_layers(layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Layers with keys and values of their own."""
    return [layer for layer in layers if layer.kv_source == layer.index]


def size_kv(
    layers: Sequence[LayerSpec],
    config: EngineConfig,
    max_model_len: int,
    item_bytes: int = 0,
    device: str = "cpu",
    page_bytes: int | None = None,
) -> KVSize:
    """Decide the size from `kv_cache_memory`, or from what is free.

    Args:
        item_bytes: of one number of a key or value.
        page_bytes: of one page in all layers, instead of what follows from `item_bytes`.

    Raises:
        OutOfMemory: when not even a short sequence fits.
    """
    per_token = sum(layer.kv_heads * (layer.dim + layer.v_dim) for layer in own_layers(layers)) * item_bytes
    page_bytes = page_bytes or per_token * config.page_size
    pages_per_sequence = -(-max_model_len // config.page_size)
    if config.kv_cache_memory is not None:
        room = parse_size(config.kv_cache_memory, "kv_cache_memory")
    elif device.startswith("cuda"):
        import torch

        room = int(torch.cuda.mem_get_info(device)[0] * 0.9)
    else:
        room = int(memory.available_bytes() * SHARE_OF_FREE)
        room = min(room, max(ENOUGH_ON_CPU, (pages_per_sequence + 1) * page_bytes))
    most = pages_per_sequence * config.max_num_seqs + 1
    num_pages = min(room // page_bytes, most)
    if num_pages < 2:
        raise OutOfMemory(
            f"{room / 2**20:.1f} MiB for keys and values hold less than one page of {config.page_size} tokens"
            f" ({page_bytes / 2**20:.1f} MiB)",
            "free memory, or set `kv_cache_memory` higher",
        )
    return KVSize(page_bytes, num_pages)


def longest(size: KVSize, config: EngineConfig, max_model_len: int) -> int:
    """The longest sequence that the pages hold; says so when it is less than `max_model_len`."""
    held = (size.num_pages - 1) * config.page_size
    if held < max_model_len:
        log.warning(
            "the KV cache holds %d tokens: max_model_len is %d instead of %d (`kv_cache_memory` sets its size)",
            held,
            held,
            max_model_len,
        )
    return min(max_model_len, held)


def allocate(
    layers: Sequence[LayerSpec], size: KVSize, page_size: int, dtype: torch.dtype, device: str
) -> list[KVPages]:
    """The pages of every layer, zeroed; a layer that shares keys and values gets its source's."""
    pages: list[KVPages] = []
    for layer in layers:
        if layer.kv_source != layer.index:
            pages.append(pages[layer.kv_source])
            continue
        shape = (layer.kv_heads, size.num_pages, page_size)
        pages.append(KVPages(_zeros((*shape, layer.dim), dtype, device), _zeros((*shape, layer.v_dim), dtype, device)))
    return pages


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Zeros that on a CPU take no memory before they are written.

    They come from a mapping of their own, where the operating system hands out a zeroed page at the first write. Huge
    pages are refused: the first token of a sequence would have 2 MiB zeroed for every head of every layer.
    """
    import torch

    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    with contextlib.suppress(OSError, AttributeError):  # kernels without huge pages, other systems
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def keep_freed() -> None:
    """Let malloc keep the large blocks that torch frees after every operation.

    glibc gives blocks above 128 kB back to the system at once and fetches them anew, page fault by page fault
    (`mallopt(3)`); a step makes thousands of them. Elsewhere than on glibc nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)
