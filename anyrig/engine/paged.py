"""Models that run in Transformers' modules: with our attention on ragged batches, or wholly by themselves."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from anyrig.core.config import EngineConfig
from anyrig.core.errors import Unsupported, UsageError
from anyrig.core.spec import Chunk, StepPlan, StepResult
from anyrig.engine import inputs, memory
from anyrig.engine.runner import Runner, pick_dtype
from anyrig.engine.torch_threads import torch_threads
from anyrig.hardware import cpu
from anyrig.models import load
from anyrig.models.adapter import Decoder
from anyrig.models.fallback import Fallback
from anyrig.models.probe import PROBE_TOKENS, VERIFY_TOKENS
from anyrig.models.replace import choose_linear
from anyrig.ops import registry
from anyrig.ops.attention import AttentionOp
from anyrig.ops.ref.invariance import linear_unit

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make(
    path: Path,
    name: str,
    config: EngineConfig,
    limit: int,
    device: str,
    progress: Callable[[str], None],
    not_fused: str,
) -> Runner:
    """Through our op where it can be, through Transformers' own forward otherwise.

    Args:
        limit: longest sequence.
        not_fused: why the fused decoder does not run it, for `describe`.
    """
    dtype = DTYPES[pick_dtype(config.dtype, device)]
    threads = config.threads or cpu.read().cores
    if device == "cpu":
        torch.set_num_threads(threads)
    progress(f"loading {name} ({_word(dtype)}, {device})")
    try:
        if config.runner == "transformers":
            raise Unsupported("`runner` is transformers")
        model = load.load(path, dtype=dtype, device=device, attn_implementation="eager")
        probe_tokens = VERIFY_TOKENS if config.verify else PROBE_TOKENS
        linear = choose_linear(device, dtype, config.quantize, threads)
        return PagedRunner(Decoder(model, name, limit, probe_tokens, linear), config, limit, not_fused)
    except Unsupported as error:
        reason = str(error)
    if config.runner == "paged":
        raise UsageError(f"`runner` is paged, but {reason}", "auto takes what can")
    if config.quantize != "none":
        raise UsageError(
            f"`quantize` is {config.quantize}, but {reason}: it would run through Transformers' own forward"
        )
    # Outside of the handler: the error's traceback holds the first model, and two would be in memory.
    log.warning("%s; it runs through Transformers' own forward, one sequence at a time", reason)
    if config.kv_cache_memory is not None:
        log.warning("`kv_cache_memory` does not apply to it: Transformers sizes the cache; `max_num_seqs` bounds it")
    model = load.load(path, dtype=dtype, device=device, attn_implementation="eager")
    return FallbackRunner(Fallback(model), config, limit, reason)


class PagedRunner:
    """The paged path: flat ragged batches through `Decoder`.

    Attributes:
        weight_bytes: of all weights as they are kept.
        torch_threads: that compute what the CPU kernels don't; None: torch's own number.
    """

    prefix_caching = True
    chunked = True
    batch_tokens = 2048

    def __init__(self, decoder: Decoder, config: EngineConfig, max_model_len: int, not_fused: str = "") -> None:
        self.decoder = decoder
        self.not_fused = not_fused
        self.device = str(decoder.device)
        self.threads = config.threads or cpu.read().cores
        self.weight_bytes = decoder.weight_bytes
        size = memory.size_kv(decoder.layers, config, max_model_len, decoder.dtype.itemsize, self.device)
        self.num_pages = size.num_pages
        self.kv_bytes = size.total_bytes
        self.max_model_len = memory.longest(size, config, max_model_len)
        decoder.bind(memory.allocate(decoder.layers, size, config.page_size, decoder.dtype, self.device))
        kind = self.device.split(":")[0]
        self.implementation = registry.choose(
            "attention", kind, suits=lambda op: op.why_not(decoder.layers, config.page_size, decoder.dtype)
        )
        self.attention: AttentionOp = self.implementation.load()(config.page_size, self.device, self.threads)
        self.torch_threads = 1 if decoder.all_kernels else None
        self.unit = linear_unit(
            decoder.linear_shapes, decoder.linear.make or (lambda linear: linear), decoder.dtype, self.device
        )
        if self.device == "cpu":
            memory.keep_freed()  # not earlier: what loading needed is given back
        if config.verify:
            self.verify()

    def run(self, plan: StepPlan, best_only: bool = False) -> StepResult:
        return StepResult(self._logits(plan))

    def _logits(self, plan: StepPlan) -> torch.Tensor:
        step = inputs.build(plan, self.unit, self.device)
        attention = self.attention.prepare(plan, len(step.token_ids))
        with torch_threads(self.torch_threads):
            logits = self.decoder.forward(step.token_ids, step.positions, step.rows, attention)
        return logits[: step.num_rows]

    def forget(self, seq_id: int) -> None:
        """Nothing is kept by sequence: pages are the scheduler's."""

    def scrub(self, pages: Sequence[int]) -> None:
        for layer in self.decoder.kv:
            layer.k[:, pages] = 0
            layer.v[:, pages] = 0

    def describe(self) -> str:
        threads = f", {self.threads} threads" if self.device == "cpu" else ""
        return (
            f"paged engine on {self.device}{threads}, {_word(self.decoder.dtype)}, "
            f"attention {self.implementation.name}, linear {self.decoder.linear.name}, "
            f"KV cache up to {self.kv_bytes / 2**20:,.0f} MiB ({(self.num_pages - 1):,} pages)"
            + (f"; not fused: {self.not_fused}" if self.not_fused else "")
        )

    def verify(self, tolerance: float = 2e-2) -> float:
        """Compare a prefill and its decode steps through pages and tiles with plain attention on the same weights.

        Returns:
            the greatest relative difference of the logits.

        Raises:
            Unsupported: when it is above `tolerance`.
        """
        expected = self.decoder.probe_logits.float()
        tokens = list(range(len(expected)))
        table = list(range(1, 1 + -(-len(tokens) // self.attention.page_size)))  # type: ignore[attr-defined]
        half = len(tokens) // 2
        got = [self._logits(StepPlan([Chunk(0, tokens[:half], 0, table, rows=half)]))]
        got += [self._logits(StepPlan([Chunk(0, [t], t, table)])) for t in tokens[half:]]
        difference = float((torch.cat(got).float() - expected).abs().max() / expected.abs().max())
        if not difference <= tolerance:
            raise Unsupported(f"{self.decoder.name}: logits differ by {difference:.1e} from plain attention")
        return difference


class FallbackRunner:
    """Any model that Transformers runs: its own forward and cache, one sequence after the other."""

    prefix_caching = False
    chunked = False  # recurrent states take a prompt whole, or token by token
    batch_tokens = 2048

    def __init__(self, model: Fallback, config: EngineConfig, max_model_len: int, reason: str) -> None:
        self.model = model
        self.max_model_len = max_model_len
        # The model keeps keys and values itself; pages only count, and there are enough for everybody.
        self.num_pages = config.max_num_seqs * -(-max_model_len // config.page_size) + 1
        self.reason = reason

    def run(self, plan: StepPlan, best_only: bool = False) -> StepResult:
        rows = [row for chunk in plan.chunks if (row := self.model.forward(chunk)) is not None]
        return StepResult(torch.cat(rows) if rows else torch.empty(0, 0))

    def forget(self, seq_id: int) -> None:
        self.model.forget(seq_id)

    def scrub(self, pages: Sequence[int]) -> None:
        """Every sequence has a cache of its own, dropped with it."""

    def describe(self) -> str:
        return f"Transformers' own forward ({self.reason})"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
