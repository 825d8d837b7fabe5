"""A step's plan as the tensors that the model takes: one flat batch, no padding per sequence."""

from dataclasses import dataclass

import torch

from anyrig.core.spec import StepPlan


@dataclass(slots=True)
class StepInputs:
    """The ragged batch, sequence after sequence.

    Attributes:
        token_ids, positions: `[tokens]` int64; the last few may be padding (token 0 at position 0).
        rows: `[R]` int64, rows whose logits are wanted; the last few may be padding (row 0).
        num_rows: how many of them are not padding.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    num_rows: int


def build(plan: StepPlan, unit: int, device: str) -> StepInputs:
    """The inputs of `plan`, tokens and rows rounded up to a multiple of `unit` (see `ops/ref/invariance.py`)."""
    token_ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    for chunk in plan.chunks:
        end = len(token_ids) + chunk.length
        token_ids += chunk.tokens
        positions += range(chunk.start, chunk.start + chunk.length)
        rows += range(end - chunk.rows, end)
    num_rows = len(rows)
    padding = [0] * (-len(token_ids) % unit)
    rows += [0] * (-num_rows % unit)
    made = torch.tensor([token_ids + padding, positions + padding], dtype=torch.int64).to(device)
    return StepInputs(made[0], made[1], torch.tensor(rows, dtype=torch.int64, device=device), num_rows)
