"""Holds the loaded model and its pages, and computes planned steps: which way a model runs is decided here.

Imports neither torch nor Transformers: a prepared model starts without them (`engine/fused.py`).
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from anyrig.core.config import EngineConfig
from anyrig.core.errors import Unsupported, UsageError
from anyrig.core.spec import StepPlan, StepResult
from anyrig.hardware import cpu, device_node
from anyrig.models.checkpoint import ModelInfo

log = logging.getLogger(__name__)


class Runner(Protocol):
    """Computes steps; the engine knows no more about the model than this.

    Attributes:
        num_pages: pages of the KV cache, the trash page included.
        max_model_len: longest sequence that the model and the pages hold.
        prefix_caching: whether pages can be shared between sequences.
        chunked: whether a prompt can be computed in several steps.
        batch_tokens: most tokens of a step that it does best with.
    """

    num_pages: int
    max_model_len: int
    prefix_caching: bool
    chunked: bool
    batch_tokens: int

    def run(self, plan: StepPlan, best_only: bool = False) -> StepResult:
        """The rows that the chunks ask for. `best_only`: their most likely tokens are enough."""
        ...

    def forget(self, seq_id: int) -> None:
        """The sequence has ended."""
        ...

    def scrub(self, pages: Sequence[int]) -> None:
        """Overwrite what these pages hold: it is not finite, and zero times NaN is NaN."""
        ...

    def describe(self) -> str: ...


def make_runner(
    path: Path, name: str, info: ModelInfo, config: EngineConfig, progress: Callable[[str], None]
) -> Runner:
    """Load the model and decide how it runs.

    1. The CPU's fused decoder, when it covers the model wholly; 2. our attention in Transformers' module; 3.
    Transformers' own forward.
    """
    device = pick_device(config.device)
    limit = config.max_model_len or info.max_model_len
    if limit > info.max_model_len:
        raise UsageError(f"`max_model_len` is {limit}, but {name} was made for {info.max_model_len} tokens")
    reason = f"it is for CPUs, not {device}"
    if config.runner not in ("auto", "fused"):
        reason = f"`runner` is {config.runner}"
    elif config.runner == "auto" and config.verify:
        reason = "`verify` is for the paged engine"
    elif device == "cpu":
        from anyrig.engine import fused

        try:
            return fused.make(path, name, config, limit, progress)
        except Unsupported as error:
            reason = str(error)
    if config.runner == "fused":
        raise UsageError(f"`runner` is fused, but {reason}", "auto takes what can")
    gc.collect()  # a module that could not be described, before it is loaded anew
    from anyrig.engine import paged

    return paged.make(path, name, config, limit, device, progress, reason)


def pick_device(wanted: str) -> str:
    """`auto` takes the first GPU that torch sees, else the CPU.

    Raises:
        UsageError: for a device that torch can't use.
    """
    if wanted == "cpu" or (wanted == "auto" and not device_node.gpu_nodes()):
        return "cpu"
    import torch

    if wanted == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if wanted.split(":")[0] == "cuda":
        if torch.cuda.is_available():
            return wanted if ":" in wanted else "cuda:0"
        raise UsageError(f"`device` is {wanted!r}, but torch sees no GPU", "`anyrig doctor --deep` says why")
    raise UsageError(f"`device` must be auto, cpu, cuda or cuda:N. Given: {wanted!r}")


def pick_dtype(wanted: str, device: str) -> str:
    """Name of the dtype; `auto` is bfloat16 where the hardware computes in it: emulated, it is slower than float32."""
    if wanted != "auto":
        return wanted
    if device.startswith("cuda"):
        import torch

        return "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
    return "bfloat16" if cpu.read().native_bf16 else "float32"
