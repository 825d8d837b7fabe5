"""Drawing tokens by the CPU kernels (`csrc/cpu/sample.h`), without torch."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from anyrig.ops.sample import Draw


def draw(
    module: ModuleType,
    logits: np.ndarray[Any, np.dtype[np.float32]],
    rows: Sequence[int],
    draws: Sequence[Draw],
    threads: int,
    mark_dropped: bool = False,
) -> list[int]:
    """One token for each of these rows of `logits [R, W]`, which are overwritten (`SampleOp.draw`).

    Args:
        threads: always the same number, whatever the rows: the kernels keep a team for every one they see.
    """
    ids = np.empty(len(rows), np.int32)
    module.draw(
        logits,
        np.array(rows, np.int32),
        np.array([d.temperature for d in draws], np.float32),
        np.array([d.uniform for d in draws], np.float64),
        np.array([d.min_p for d in draws], np.float32),
        np.array([d.top_k for d in draws], np.int32),
        np.array([d.top_p for d in draws], np.float32),
        ids,
        mark_dropped,
        threads,
    )
    tokens: list[int] = ids.tolist()
    return tokens
