"""Paged attention by the CPU kernels (`csrc/cpu/attention.h`), for models that run module by module."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from anyrig.core.errors import Unsupported
from anyrig.core.spec import LayerSpec, StepPlan
from anyrig.hardware import cpu
from anyrig.ops.attention import KVPages
from anyrig.ops.cpu import native, shapes


class CpuAttention:
    """`AttentionOp` on the kernels' threads. A page's numbers lie in the kernels' order, not row by row."""

    name = "cpu"

    def __init__(self, page_size: int, device: str = "cpu", threads: int | None = None) -> None:
        module = native.module()
        if module is None:
            raise Unsupported(f"CPU kernels: {native.why_not()}")
        self.page_size = page_size
        self.kernel: Any = module.Attention(page_size, threads or cpu.read().cores)

    @staticmethod
    def why_not(layers: Sequence[LayerSpec], page_size: int, dtype: torch.dtype) -> str | None:
        """Why these layers can't be computed, or None when they can."""
        if dtype not in (torch.float32, torch.bfloat16):
            return f"pages of {dtype}"
        return shapes.why_not(layers, page_size)

    def prepare(self, plan: StepPlan, num_tokens: int) -> "CpuStep":
        return CpuStep(self.kernel, plan)


class CpuStep:
    """`AttentionStep`: the plan as flat arrays; the kernel divides the work when the first layer comes along."""

    def __init__(self, kernel: Any, plan: StepPlan) -> None:
        self.kernel = kernel
        self._pages = -1
        table: list[int] = []
        offsets = [0]
        for chunk in plan.chunks:
            table += chunk.block_table
            offsets.append(len(table))
        self._arrays = (
            np.array([chunk.length for chunk in plan.chunks], np.int32),
            np.array([chunk.start for chunk in plan.chunks], np.int32),
            np.array(table, np.int32),
            np.array(offsets, np.int32),
        )

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
        if self._pages != kv.k.shape[1]:
            self._pages = kv.k.shape[1]
            self.kernel.prepare(*self._arrays, self._pages)
        out = torch.empty(q.shape[1], layer.heads, layer.v_dim)
        self.kernel.attend(
            _rows(q),
            _rows(k),
            _rows(v),
            _bits(kv.k),
            _bits(kv.v),
            layer.scaling,
            layer.window or 0,
            layer.softcap or 0.0,
            None if sinks is None else sinks.detach().float().contiguous().numpy(),
            write,
            out.numpy(),
        )
        return out.to(q.dtype)


def _rows(x: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """`[heads, tokens, dim]` -> float32 `[tokens, heads, dim]`, contiguous."""
    rows: np.ndarray[Any, np.dtype[np.float32]] = x.detach().transpose(0, 1).float().contiguous().numpy()
    return rows


def _bits(pages: torch.Tensor) -> np.ndarray[Any, Any]:
    """The pages' memory: numpy has no bfloat16, so its bits are handed over."""
    bits: np.ndarray[Any, Any] = pages.view(torch.uint16).numpy() if pages.dtype == torch.bfloat16 else pages.numpy()
    return bits
