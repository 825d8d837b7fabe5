"""From rows of logits to tokens: groups the rows by what they need and keeps the memory for it."""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from anyrig.engine.rows import NOT_FINITE, Sampled, SampleRow
from anyrig.ops import registry
from anyrig.ops.sample import BLOCK, SampleOp, TokenScores

# Rows are worked on in tiles of about this many bytes, which stay in a CPU's caches from one pass to the next.
_TILE_BYTES = {"cpu": 4 << 20}
_TILE_BYTES_ELSEWHERE = 256 << 20

_NOTHING_ALLOWED = "no token is allowed here: allowed, banned and grammar tokens exclude each other"


class Sampler:
    """Samples one token per row; a row's result is the same, to the bit, in whatever company it comes.

    Args:
        vocab_size: width of the logits.
        logprobs_mode: "raw": of the model's own distribution. "processed": of the one really sampled from (after
            masks, penalties, temperature and filters; for greedy rows without temperature and filters).
    """

    def __init__(
        self, vocab_size: int, logprobs_mode: Literal["raw", "processed"] = "raw", op: SampleOp | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self.processed = logprobs_mode == "processed"
        self.op: SampleOp = op or registry.choose("sample", "cpu").load()
        self._width = -(-vocab_size // BLOCK) * BLOCK
        self._tile: torch.Tensor | None = None
        self._scratch: torch.Tensor | None = None

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        """One token per row.

        Args:
            logits: [R, V] of any floating dtype and device; left as they are.
            rows: one per row of logits.
        """
        self._check(logits, len(rows))
        plain = [i for i, row in enumerate(rows) if row.plain]
        other = [i for i, row in enumerate(rows) if not row.plain]
        sampled: list[Sampled] = [Sampled(-1)] * len(rows)
        for i, result in zip(plain, self._argmax(logits, plain), strict=True):
            sampled[i] = result
        for tile, picked in self._tiles(logits, other):
            for i, result in zip(picked, self._sample_tile(tile, [rows[i] for i in picked]), strict=True):
                sampled[i] = result
        # Processed log-probabilities of plain rows are the raw ones.
        todo = [i for i in (plain if self.processed else range(len(rows))) if rows[i].params.logprobs is not None]
        todo = [i for i in todo if sampled[i].error is None]
        for tile, picked in self._tiles(logits, todo):
            self._score(tile, [sampled[i] for i in picked], [rows[i].params.logprobs or 0 for i in picked])
        return sampled

    @torch.inference_mode()
    def prompt_logprobs(self, logits: torch.Tensor, target_ids: Sequence[int], k: int) -> list[TokenScores]:
        """Log-probability and rank of the given token (first) and of the `k` best ones, for each row of logits [R, V].

        Rows with NaN give NaN; they are the caller's to refuse.
        """
        self._check(logits, len(target_ids))
        scores: list[TokenScores] = []
        for tile, picked in self._tiles(logits, list(range(len(target_ids)))):
            scores += self.op.logprobs(
                tile, [target_ids[i] for i in picked], [k] * len(picked), self._scratch_for(tile)
            )
        return scores

    def _check(self, logits: torch.Tensor, rows: int) -> None:
        if logits.shape != (rows, self.vocab_size):
            raise ValueError(f"logits must be [{rows}, {self.vocab_size}]. Given: {list(logits.shape)}")

    def _argmax(self, logits: torch.Tensor, rows: list[int]) -> Iterator[Sampled]:
        if logits.dtype != torch.float32:
            # torch's argmax of 16-bit numbers is ten times slower than converting them first.
            parts = [self.op.argmax(tile) for tile, _ in self._tiles(logits, rows)]
        elif rows:
            parts = [self.op.argmax(logits if len(rows) == len(logits) else logits[rows])]
        else:
            parts = []
        for ids, values in parts:
            for token, finite in zip(ids.tolist(), values.isfinite().tolist(), strict=True):
                yield Sampled(token) if finite else Sampled(-1, error=NOT_FINITE)

    def _sample_tile(self, tile: torch.Tensor, rows: list[SampleRow]) -> list[Sampled]:
        """Sample rows that are sampled at random or adjusted; tile [R, W] is overwritten."""
        results = [Sampled(-1, error=None if ok else NOT_FINITE) for ok in tile.amax(-1).isfinite().tolist()]
        for z, row, result in zip(tile, rows, results, strict=True):
            if row.adjustment is not None and result.error is None:
                row.adjustment.apply(z[: self.vocab_size], row.output_ids)
        for result, ok in zip(results, tile.amax(-1).isfinite().tolist(), strict=True):
            if not ok and result.error is None:
                result.error = _NOTHING_ALLOWED
        good = [i for i, result in enumerate(results) if result.error is None]
        greedy = [i for i in good if rows[i].greedy]
        drawn = [i for i in good if not rows[i].greedy]
        if greedy:
            ids, _ = self.op.argmax(tile if len(greedy) == len(rows) else tile[greedy])
            for i, token in zip(greedy, ids.tolist(), strict=True):
                results[i].token_id = token
        want = [i for i in good if self.processed and rows[i].params.logprobs is not None]
        if drawn:
            part = tile if len(drawn) == len(rows) else tile[drawn]
            tokens = self.op.draw(part, [rows[i].draw() for i in drawn], self._scratch_for(part), bool(want))
            for i, token in zip(drawn, tokens, strict=True):
                results[i].token_id = token
            if want and part is not tile:
                tile[drawn] = part
        if want:
            part = tile if len(want) == len(rows) else tile[want]
            self._score(part, [results[i] for i in want], [rows[i].params.logprobs or 0 for i in want])
        return results

    def _score(self, tile: torch.Tensor, results: list[Sampled], ks: list[int]) -> None:
        scores = self.op.logprobs(tile, [r.token_id for r in results], ks, self._scratch_for(tile))
        for result, score in zip(results, scores, strict=True):
            result.logprobs = score
            result.logprob = score[result.token_id][0]

    def _tiles(self, logits: torch.Tensor, rows: list[int]) -> Iterator[tuple[torch.Tensor, list[int]]]:
        """Copies of these rows as float32 [n, W], padded with -inf, a few at a time; each overwrites the one before."""
        if not rows:
            return
        size = _TILE_BYTES.get(logits.device.type, _TILE_BYTES_ELSEWHERE)
        most = max(1, size // (4 * self._width))
        if self._tile is None or self._tile.device != logits.device:
            shape = most, self._width
            self._tile = torch.empty(shape, dtype=torch.float32, device=logits.device)
            self._scratch = torch.empty_like(self._tile)
        for start in range(0, len(rows), most):
            picked = rows[start : start + most]
            tile = self._tile[: len(picked)]
            run = picked[-1] - picked[0] + 1 == len(picked)
            tile[:, : self.vocab_size] = logits[picked[0] : picked[-1] + 1] if run else logits[picked]
            tile[:, self.vocab_size :] = -torch.inf
            yield tile, picked

    def _scratch_for(self, tile: torch.Tensor) -> torch.Tensor:
        scratch = torch.empty_like(tile) if self._scratch is None else self._scratch
        return scratch[: len(tile)]
