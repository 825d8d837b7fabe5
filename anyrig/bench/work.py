"""The work that is measured: requests of random token ids, so that nobody profits from what the text says."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """`n` requests of `prompt` tokens each, all at once; `gen` tokens are generated greedily, end tokens ignored."""

    n: int = 32
    prompt: int = 128
    gen: int = 128

    def prompts(self, seed: int, vocab_size: int) -> list[list[int]]:
        """Token ids; the first thousand (special and single-byte tokens in most vocabularies) are left out."""
        rng = random.Random(seed)
        low, high = min(1000, vocab_size // 2), min(40_000, vocab_size)
        return [[rng.randrange(low, high) for _ in range(self.prompt)] for _ in range(self.n)]
