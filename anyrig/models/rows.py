"""The rows of one packed matrix, in the order of `core/decoder.py`, handed out in pieces: little is ever held twice."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

PIECE_BYTES = 16 << 20
BLOCK = 16  # rows of gate and of up that stand next to each other


@dataclass(frozen=True)
class Rows:
    """Views of a module's weights as one matrix.

    Attributes:
        parts: `[rows, columns]` each; below each other, or 16 rows of each in turn when `interleaved`.
        interleaved: every part is padded with zero rows to a multiple of 16 then.
        columns: of the matrix; a part that has fewer is padded with zeros.
    """

    parts: tuple[torch.Tensor, ...]
    columns: int
    interleaved: bool = False

    @property
    def count(self) -> int:
        """Rows of the matrix."""
        return sum(-(-p.shape[0] // BLOCK) * BLOCK if self.interleaved else p.shape[0] for p in self.parts)

    def pieces(self, limit: int = PIECE_BYTES) -> Iterator[torch.Tensor]:
        """Contiguous `[n, columns]` in float32 or bfloat16 on the CPU, at most about `limit` bytes each.

        `n` is a multiple of 16, except of the last piece.
        """
        step = max(1, limit // (self.columns * 4 * BLOCK)) * BLOCK
        if self.interleaved:
            # A block of the matrix is one block of every part.
            step = max(1, step // (BLOCK * len(self.parts))) * BLOCK
            longest = max(p.shape[0] for p in self.parts)
            for start in range(0, longest, step):
                stop = min(start + step, -(-longest // BLOCK) * BLOCK)
                blocks = [self._cut(p, start, stop).view(-1, BLOCK, self.columns) for p in self.parts]
                yield torch.stack(blocks, 1).view(-1, self.columns)
            return
        for start in range(0, self.count, step):
            stop, first, found = min(start + step, self.count), 0, []
            for part in self.parts:
                low, high = max(start - first, 0), min(stop - first, part.shape[0])
                if low < high:
                    found.append(self._cut(part, low, high))
                first += part.shape[0]
            yield found[0] if len(found) == 1 else torch.cat(found)

    def _cut(self, part: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Rows `start .. stop` of one part, with zeros where it has none."""
        rows = part.detach()[start : min(stop, part.shape[0])].cpu()
        if rows.dtype not in (torch.float32, torch.bfloat16):
            rows = rows.float()
        below, right = stop - start - rows.shape[0], self.columns - rows.shape[1]
        return torch.nn.functional.pad(rows, (0, right, 0, below)) if below or right else rows.contiguous()
