"""Paged attention in plain torch.

    scores of a row:   | tile 0 | tile 1 | ... | tile t |      tiles of TILE keys at absolute positions
    each tile alone:     (m, l, o)  (m, l, o)      (m, l, o)    maximum, sum of exp, weighted values
    then merged:         m* = max m;  o = sum o exp(m - m*) / sum l exp(m - m*)        (split softmax)

Every tile is computed by itself and the tiles are added from first to last, so a row gets the same bits however its
sequence was cut into chunks and whoever else is in the step. A tile that a row may not see adds an exact zero.

Arithmetic is float32 whatever the pages hold. Nothing here depends on the whole batch: a chunk of a prompt gathers its
own pages, single-token rows of all sequences are gathered tile by tile into a workspace of bounded size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from anyrig.core.spec import Chunk, LayerSpec, StepPlan
from anyrig.ops.attention import KVPages
from anyrig.ops.ref.invariance import attention_unit

TILE = 64  # keys; page sizes divide it
WORKSPACE = 4 << 20  # floats gathered at once for keys, and again for values: stays in the last-level cache
PARTIALS = 16 << 20  # floats that the tiles' partial results of one prompt chunk may take


class RefAttention:
    """`AttentionOp` in plain torch, on any device that torch has."""

    name = "ref"

    def __init__(self, page_size: int, device: str = "cpu", threads: int | None = None) -> None:
        self.page_size = page_size  # threads are torch's own
        self.device = device

    @staticmethod
    def why_not(layers: Sequence[LayerSpec], page_size: int, dtype: torch.dtype) -> str | None:
        return None

    def prepare(self, plan: StepPlan, num_tokens: int) -> "RefStep":
        return RefStep(plan, num_tokens, self.page_size, self.device)


@dataclass(slots=True)
class _Tiles:
    """Which tiles the single-token rows read, longest sequence first, so that tile j concerns the first `counts[j]`."""

    rows: torch.Tensor  # [B] row in the flat batch
    sequence: torch.Tensor  # [P] which of the B
    pages: torch.Tensor  # [kv_heads, P, TILE / page_size] rows of the table that `_gather` reads
    bias: torch.Tensor  # [kv_heads, P, 1, TILE] 0 where the row may look, -inf elsewhere
    counts: list[int]


class RefStep:
    """`AttentionStep`: indices and masks of one step, made when the first layer that needs them comes along."""

    def __init__(self, plan: StepPlan, num_tokens: int, page_size: int, device: str) -> None:
        self.page_size = page_size
        self.device = device
        self.num_tokens = num_tokens
        self.slots = self._slots(plan)
        self.single: list[tuple[int, Chunk]] = []
        self.chunks: list[tuple[int, Chunk]] = []
        row = 0
        for chunk in plan.chunks:
            (self.single if chunk.length == 1 else self.chunks).append((row, chunk))
            row += chunk.length
        self._tiles: dict[tuple[int | None, ...], _Tiles] = {}
        self._tables: dict[tuple[int, ...], torch.Tensor] = {}
        self._biases: dict[tuple[int | None, ...], torch.Tensor] = {}

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerSpec,
        kv: KVPages,
        sinks: torch.Tensor | None = None,
        *,
        write: bool = True,
    ) -> torch.Tensor:
        if write:
            self._write(kv.k, k)
            self._write(kv.v, v)
        out = torch.zeros(self.num_tokens, layer.heads, layer.v_dim, dtype=q.dtype, device=q.device)
        unit = attention_unit(layer.dim, layer.v_dim, TILE, str(q.device))
        if self.single:
            self._single_rows(q, layer, kv, sinks, unit, out)
        for row, chunk in self.chunks:
            self._chunk(q, row, chunk, layer, kv, sinks, unit, out)
        return out

    def _slots(self, plan: StepPlan) -> torch.Tensor:
        """`[num_tokens]` page * page_size + offset of each row; padding rows go to the trash page."""
        slots = []
        size = self.page_size
        for chunk in plan.chunks:
            table = chunk.block_table
            slots += [table[p // size] * size + p % size for p in range(chunk.start, chunk.start + chunk.length)]
        slots += [0] * (self.num_tokens - len(slots))
        return torch.tensor(slots, dtype=torch.int64, device=self.device)

    def _write(self, pages: torch.Tensor, new: torch.Tensor) -> None:
        flat = pages.view(pages.shape[0], -1, pages.shape[-1])
        flat.index_copy_(1, self.slots, new.to(pages.dtype))

    # Prompt chunks: one sequence at a time.

    def _chunk(
        self,
        q: torch.Tensor,
        row: int,
        chunk: Chunk,
        layer: LayerSpec,
        kv: KVPages,
        sinks: torch.Tensor | None,
        unit: int,
        out: torch.Tensor,
    ) -> None:
        group = layer.heads // layer.kv_heads
        end = chunk.start + chunk.length
        first = 0 if layer.window is None else max(0, chunk.start - layer.window + 1) // TILE
        tiles = range(first, -(-end // TILE))
        pages = self._pages_of(chunk, tiles, kv)
        keys = _gather(kv.k, pages).view(layer.kv_heads, len(tiles), TILE, layer.dim)
        values = _gather(kv.v, pages).view(layer.kv_heads, len(tiles), TILE, layer.v_dim)

        # Bounded memory for the partial results: long contexts take their query rows in several goes.
        most = max(unit, PARTIALS // (len(tiles) * layer.heads * (layer.v_dim + 2)) // unit * unit)
        for start in range(0, chunk.length, most):
            n = min(most, chunk.length - start)
            low = chunk.start + start
            rows = q[:, row + start : row + start + n].float().view(layer.kv_heads, group, n, layer.dim)
            rows = _pad_rows(rows.transpose(1, 2).reshape(layer.kv_heads, n * group, layer.dim), unit)
            merge = _Merge()
            for i, tile in enumerate(tiles):
                if tile * TILE >= low + n:
                    break
                # Rows above the tile's first key see nothing of it.
                skip = max(0, tile * TILE - low) * group // unit * unit
                bias = self._bias(low, n, tile, layer.window, group, unit)
                if bias is not None:
                    bias = bias[skip:]
                merge.add(slice(skip, None), *_tile(rows[:, skip:], keys[:, i], values[:, i], layer, bias))
            o = merge.result(_sink_rows(sinks, layer, n, rows.shape[1], q.device))
            o = o[:, : n * group].view(layer.kv_heads, n, group, layer.v_dim).transpose(0, 1)
            out[row + start : row + start + n] = o.reshape(n, layer.heads, layer.v_dim)

    def _pages_of(self, chunk: Chunk, tiles: range, kv: KVPages) -> torch.Tensor:
        """`[kv_heads, pages]` of these tiles; the last one is filled up with the trash page."""
        heads, num_pages = kv.k.shape[:2]
        wanted = (chunk.seq_id, tiles.start, heads, num_pages)
        if wanted not in self._tables:
            per_tile = TILE // self.page_size
            end = min(tiles.stop * per_tile, -(-(chunk.start + chunk.length) // self.page_size))
            pages = chunk.block_table[tiles.start * per_tile : end]
            self._tables[wanted] = _in_every_head(pages + [0] * (-len(pages) % per_tile), kv)
        return self._tables[wanted]

    def _bias(self, low: int, n: int, tile: int, window: int | None, group: int, unit: int) -> torch.Tensor | None:
        """`[rows, TILE]` 0 or -inf for `n` tokens from position `low`, or None when all of them see the whole tile."""
        start = tile * TILE
        if start + TILE - 1 <= low and (window is None or start > low + n - 1 - window):
            return None
        wanted = (low, n, tile, window, group, unit)
        if wanted not in self._biases:
            position = low + torch.arange(n, device=self.device)[:, None]
            key = start + torch.arange(TILE, device=self.device)
            seen = key <= position
            if window is not None:
                seen &= key > position - window
            bias = torch.zeros(seen.shape, device=self.device).masked_fill_(~seen, -torch.inf)
            self._biases[wanted] = _pad_rows(bias.repeat_interleave(group, 0), unit)
        return self._biases[wanted]

    # Single-token rows: all sequences together.

    def _single_rows(
        self,
        q: torch.Tensor,
        layer: LayerSpec,
        kv: KVPages,
        sinks: torch.Tensor | None,
        unit: int,
        out: torch.Tensor,
    ) -> None:
        tiles = self._single_tiles(layer.window, kv)
        group = layer.heads // layer.kv_heads
        batch, pairs = len(tiles.rows), len(tiles.sequence)
        rows = q[:, tiles.rows].float().view(layer.kv_heads, group, batch, layer.dim).transpose(1, 2)
        rows = _pad_rows(rows, unit)  # [kv_heads, B, R, dim]
        width = rows.shape[2]
        parts = []
        for part in _parts(pairs, layer.kv_heads * TILE * max(layer.dim, layer.v_dim)):
            n = part.stop - part.start
            keys = _gather(kv.k, tiles.pages[:, part]).view(-1, TILE, layer.dim)
            values = _gather(kv.v, tiles.pages[:, part]).view(-1, TILE, layer.v_dim)
            query = rows[:, tiles.sequence[part]].view(-1, width, layer.dim)
            bias = tiles.bias[:, part].reshape(-1, 1, TILE)
            done = _tile(query, keys, values, layer, bias)
            parts.append([x.view(layer.kv_heads, n, width, -1) for x in done])
        m, s, o = parts[0] if len(parts) == 1 else (torch.cat(x, 1) for x in zip(*parts, strict=True))
        merge = _Merge()
        start = 0
        for count in tiles.counts:
            part = slice(start, start + count)
            merge.add(slice(0, count), m[:, part], s[:, part], o[:, part])
            start += count
        merged = merge.result(_sink_rows(sinks, layer, 1, width, q.device, batched=True))
        out[tiles.rows] = merged[:, :, :group].transpose(0, 1).reshape(batch, layer.heads, layer.v_dim).to(out.dtype)

    def _single_tiles(self, window: int | None, kv: KVPages) -> _Tiles:
        wanted = (window, *kv.k.shape[:2])
        if wanted in self._tiles:
            return self._tiles[wanted]
        per_tile = TILE // self.page_size
        spans = []
        for row, chunk in self.single:
            first = 0 if window is None else max(0, chunk.start - window + 1) // TILE
            spans.append((chunk.start // TILE + 1 - first, first, row, chunk))
        spans.sort(key=lambda x: -x[0])
        counts, sequence, pages, tile_of = [], [], [], []
        for j in range(spans[0][0]):
            count = 0
            for i, (tiles, first, _, chunk) in enumerate(spans):
                if tiles <= j:
                    break
                ids = chunk.block_table[(first + j) * per_tile : (first + j + 1) * per_tile]
                pages += ids + [0] * (per_tile - len(ids))
                sequence.append(i)
                tile_of.append(first + j)
                count += 1
            counts.append(count)
        index = torch.tensor(sequence, dtype=torch.int64, device=self.device)
        starts = torch.tensor([chunk.start for _, _, _, chunk in spans], device=self.device)[index, None]
        position = torch.tensor(tile_of, device=self.device)[:, None] * TILE + torch.arange(TILE, device=self.device)
        seen = position <= starts
        if window is not None:
            seen &= position > starts - window
        bias = torch.zeros(seen.shape, device=self.device).masked_fill_(~seen, -torch.inf)
        made = _Tiles(
            rows=torch.tensor([row for _, _, row, _ in spans], dtype=torch.int64, device=self.device),
            sequence=index,
            pages=_in_every_head(pages, kv).view(kv.k.shape[0], -1, per_tile),
            bias=bias[:, None].expand(kv.k.shape[0], -1, 1, -1).contiguous(),
            counts=counts,
        )
        self._tiles[wanted] = made
        return made


class _Merge:
    """Adds up tiles from first to last. The first one concerns all rows, later ones a slice of them."""

    def __init__(self) -> None:
        self.parts: list[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def add(self, rows: slice, m: torch.Tensor, s: torch.Tensor, o: torch.Tensor) -> None:
        self.parts.append((rows, m, s, o))

    def result(self, sinks: torch.Tensor | None) -> torch.Tensor:
        _, m, total, out = self.parts[0]
        if len(self.parts) == 1 and sinks is None:
            return out / total
        top = m.clone()
        for rows, m, _, _ in self.parts[1:]:
            torch.maximum(top[:, rows], m, out=top[:, rows])
        if sinks is not None:
            top = torch.maximum(top, sinks)
        # A row of a window may see nothing of a tile, and a row of padding nothing at all: their maximum is -inf.
        top = torch.where(top == -torch.inf, 0.0, top)
        factor = torch.exp(self.parts[0][1] - top)
        total, out = total * factor, out * factor
        for rows, m, s, o in self.parts[1:]:
            factor = torch.exp(m - top[:, rows])
            total[:, rows] += s * factor
            out[:, rows] += o * factor
        if sinks is not None:
            total += torch.exp(sinks - top)
        return out / total


def _tile(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: LayerSpec, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`q [N, R, dim]`, `k [N, TILE, dim]`, `v [N, TILE, v_dim]` -> maximum, sum `[N, R, 1]`, values `[N, R, v_dim]`."""
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(layer.scaling)
    if layer.softcap is not None:
        scores = scores.div_(layer.softcap).tanh_().mul_(layer.softcap)
    if bias is not None:
        scores += bias
    m = scores.amax(-1, keepdim=True)
    p = scores.sub_(torch.where(m == -torch.inf, 0.0, m)).exp_()
    return m, p.sum(-1, keepdim=True), torch.bmm(p, v)


def _in_every_head(pages: Sequence[int], kv: KVPages) -> torch.Tensor:
    """`[kv_heads, len(pages)]` where these pages of each head are in the table `[kv_heads * num_pages, ...]`."""
    heads, num_pages = kv.k.shape[:2]
    index = torch.tensor(pages, dtype=torch.int64, device=kv.k.device)
    return index + torch.arange(heads, device=kv.k.device)[:, None] * num_pages


def _gather(pages: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows `index` (see `_in_every_head`) of the table of all heads' pages, as float32."""
    heads, num_pages = pages.shape[:2]
    return pages.view(heads * num_pages, -1).index_select(0, index.reshape(-1)).float()


def _pad_rows(x: torch.Tensor, unit: int) -> torch.Tensor:
    missing = -x.shape[-2] % unit
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()


def _sink_rows(
    sinks: torch.Tensor | None, layer: LayerSpec, n: int, rows: int, device: torch.device, batched: bool = False
) -> torch.Tensor | None:
    """One sink per query row, `[kv_heads, rows, 1]` (`[kv_heads, 1, rows, 1]` for batched single rows)."""
    if sinks is None:
        return None
    per_head = sinks.float().to(device).view(layer.kv_heads, 1, -1).expand(-1, n, -1).reshape(layer.kv_heads, -1, 1)
    padded = torch.nn.functional.pad(per_head, (0, 0, 0, rows - per_head.shape[1]))
    return padded[:, None] if batched else padded


def _parts(total: int, floats_each: int) -> Iterator[slice]:
    step = max(1, WORKSPACE // floats_each)
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))
