"""Drawing by the CPU kernels (`draw.py`) on tensors; what they lack is `ref`'s (contract: `anyrig/ops/sample.py`)."""

from collections.abc import Sequence

import torch

from anyrig.core.errors import Unsupported
from anyrig.hardware import cpu
from anyrig.ops.cpu import native
from anyrig.ops.cpu.draw import draw as draw_rows
from anyrig.ops.ref.sample import argmax, logprobs
from anyrig.ops.sample import Draw

__all__ = ["argmax", "draw", "logprobs"]


def draw(logits: torch.Tensor, draws: Sequence[Draw], scratch: torch.Tensor, mark_dropped: bool = False) -> list[int]:
    module = native.module()
    if module is None:
        raise Unsupported(f"CPU kernels: {native.why_not()}")
    return draw_rows(module, logits.numpy(), range(len(draws)), draws, cpu.read().cores, mark_dropped)
