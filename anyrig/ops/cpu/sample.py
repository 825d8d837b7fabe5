"""Drawing by the CPU kernels (`csrc/cpu/sample.h`); what they lack is `ref`'s (contract: `anyrig/ops/sample.py`)."""

from collections.abc import Sequence

import numpy as np
import torch

from anyrig.core.errors import Unsupported
from anyrig.hardware import cpu
from anyrig.ops.cpu import native
from anyrig.ops.ref.sample import argmax, logprobs
from anyrig.ops.sample import Draw

__all__ = ["argmax", "draw", "logprobs"]


def draw(logits: torch.Tensor, draws: Sequence[Draw], scratch: torch.Tensor, mark_dropped: bool = False) -> list[int]:
    module = native.module()
    if module is None:
        raise Unsupported(f"CPU kernels: {native.why_not()}")
    ids = np.empty(len(draws), np.int32)
    module.draw(
        logits.numpy(),
        np.arange(len(draws), dtype=np.int32),
        np.array([d.temperature for d in draws], np.float32),
        np.array([d.uniform for d in draws], np.float64),
        np.array([d.min_p for d in draws], np.float32),
        np.array([d.top_k for d in draws], np.int32),
        np.array([d.top_p for d in draws], np.float32),
        ids,
        mark_dropped,
        min(len(draws), cpu.read().cores),
    )
    tokens: list[int] = ids.tolist()
    return tokens
