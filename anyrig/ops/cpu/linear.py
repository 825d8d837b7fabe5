"""A linear layer by the CPU kernels (`csrc/cpu/linear.h`), for models that run module by module."""

import numpy as np
import torch
from torch import nn

from anyrig.core.decoder import WeightKind
from anyrig.core.errors import Unsupported
from anyrig.ops.cpu import native

PIECE = 16 << 20  # bytes of float32 rows that are packed at once


class CpuLinear(nn.Module):
    """`nn.Linear` with its weight packed once: bfloat16 or float32, or int8 / int4 with int8 activations.

    `weight` stays there as a tensor without memory, for code that asks for its dtype or shape.

    Args:
        linear: the layer to replace.
        kind, group, minimum: how its weight is kept (`core/decoder.py`).
        threads: that compute it.
    """

    def __init__(self, linear: nn.Linear, kind: WeightKind, group: int, minimum: bool, threads: int) -> None:
        super().__init__()
        module = native.module()
        if module is None:
            raise Unsupported(f"CPU kernels: {native.why_not()}")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        n, k = linear.weight.shape
        self.packed = np.zeros(module.packed_size(kind, n, k, group, minimum), np.uint8)
        step = max(16, PIECE // (4 * k) // 16 * 16)
        for row in range(0, n, step):
            piece = np.ascontiguousarray(linear.weight.detach()[row : row + step].float().numpy())
            module.pack(kind, piece, self.packed, row, n, group, minimum)
        self.kernel = module.Linear(self.packed, kind, n, k, group, minimum, threads)
        self.register_buffer("weight", linear.weight.detach().to("meta"), persistent=False)

    @property
    def packed_bytes(self) -> int:
        return self.packed.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.detach().reshape(-1, self.in_features).float().contiguous()
        out = torch.empty(len(rows), self.out_features)
        self.kernel.run(rows.numpy(), out.numpy())
        if self.bias is not None:
            out += self.bias
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)
