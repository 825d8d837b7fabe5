"""Holds the loaded model and its pages, and computes planned steps."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from anyrig.core.config import EngineConfig
from anyrig.core.errors import Unsupported, UsageError
from anyrig.core.spec import StepPlan
from anyrig.engine import inputs, memory
from anyrig.hardware import cpu
from anyrig.models import load
from anyrig.models.adapter import Decoder
from anyrig.models.checkpoint import ModelInfo
from anyrig.models.fallback import Fallback
from anyrig.models.probe import PROBE_TOKENS, VERIFY_TOKENS
from anyrig.ops import registry
from anyrig.ops.attention import AttentionOp
from anyrig.ops.ref.invariance import linear_unit

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Runner(Protocol):
    """Computes steps; the engine knows no more about the model than this.

    Attributes:
        num_pages: pages of the KV cache, the trash page included.
        max_model_len: longest sequence that the model and the pages hold.
        prefix_caching: whether pages can be shared between sequences.
        chunked: whether a prompt can be computed in several steps.
    """

    num_pages: int
    max_model_len: int
    prefix_caching: bool
    chunked: bool

    def run(self, plan: StepPlan) -> torch.Tensor:
        """Logits `[R, vocab]` of the rows that the chunks ask for, in their order."""
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
    """Load the model and decide how it runs: through our op where it can be, through Transformers otherwise."""
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    threads = config.threads or cpu.read().cores
    if device == "cpu":
        torch.set_num_threads(threads)
    limit = config.max_model_len or info.max_model_len
    if limit > info.max_model_len:
        raise UsageError(f"`max_model_len` is {limit}, but {name} was made for {info.max_model_len} tokens")
    progress(f"loading {name} ({_word(dtype)}, {device})")
    try:
        model = load.load(path, dtype=dtype, device=device, attn_implementation="eager")
        probe_tokens = VERIFY_TOKENS if config.verify else PROBE_TOKENS
        return PagedRunner(Decoder(model, name, limit, probe_tokens), config, limit)
    except Unsupported as error:
        reason = str(error)
    # Outside of the handler: the error's traceback holds the first model, and two would be in memory.
    log.warning("%s; it runs through Transformers' own forward, one sequence at a time", reason)
    if config.kv_cache_memory is not None:
        log.warning("`kv_cache_memory` does not apply to it: Transformers sizes the cache; `max_num_seqs` bounds it")
    model = load.load(path, dtype=dtype, device=device, attn_implementation="eager")
    return FallbackRunner(Fallback(model), config, limit, reason)


class PagedRunner:
    """The paged path: flat ragged batches through `Decoder`."""

    prefix_caching = True
    chunked = True

    def __init__(self, decoder: Decoder, config: EngineConfig, max_model_len: int) -> None:
        self.decoder = decoder
        self.device = str(decoder.device)
        size = memory.size_kv(decoder.layers, config, max_model_len, decoder.dtype, self.device)
        self.num_pages = size.num_pages
        self.kv_bytes = size.total_bytes
        self.max_model_len = min(max_model_len, (size.num_pages - 1) * config.page_size)
        if self.max_model_len < max_model_len:
            log.warning(
                "the KV cache holds %d tokens: max_model_len is %d instead of %d (`kv_cache_memory` sets its size)",
                self.max_model_len,
                self.max_model_len,
                max_model_len,
            )
        decoder.bind(memory.allocate(decoder.layers, size, config.page_size, decoder.dtype, self.device))
        kind = self.device.split(":")[0]
        self.implementation = registry.choose("attention", kind)
        self.attention: AttentionOp = self.implementation.load()(config.page_size, self.device)
        self.unit = linear_unit(decoder.linear_shapes, decoder.linear, decoder.dtype, self.device)
        if self.device == "cpu":
            memory.keep_freed()  # not earlier: what loading needed is given back
        if config.verify:
            self.verify()

    def run(self, plan: StepPlan) -> torch.Tensor:
        step = inputs.build(plan, self.unit, self.device)
        attention = self.attention.prepare(plan, len(step.token_ids))
        logits = self.decoder.forward(step.token_ids, step.positions, step.rows, attention)
        return logits[: step.num_rows]

    def forget(self, seq_id: int) -> None:
        """Nothing is kept by sequence: pages are the scheduler's."""

    def scrub(self, pages: Sequence[int]) -> None:
        for layer in self.decoder.kv:
            layer.k[:, pages] = 0
            layer.v[:, pages] = 0

    def describe(self) -> str:
        threads = f", {torch.get_num_threads()} threads" if self.device == "cpu" else ""
        return (
            f"paged engine on {self.device}{threads}, {_word(self.decoder.dtype)}, "
            f"attention {self.implementation.name}, linear {'packed' if self.decoder.packed else 'plain'}, "
            f"KV cache up to {self.kv_bytes / 2**20:,.0f} MiB ({(self.num_pages - 1):,} pages)"
        )

    def verify(self, tolerance: float = 2e-2) -> float:
        """Compare a prefill and its decode steps through pages and tiles with plain attention on the same weights.

        Returns:
            the greatest relative difference of the logits.

        Raises:
            Unsupported: when it is above `tolerance`.
        """
        from anyrig.core.spec import Chunk

        expected = self.decoder.probe_logits.float()
        tokens = list(range(len(expected)))
        table = list(range(1, 1 + -(-len(tokens) // self.attention.page_size)))  # type: ignore[attr-defined]
        half = len(tokens) // 2
        got = [self.run(StepPlan([Chunk(0, tokens[:half], 0, table, rows=half)]))]
        got += [self.run(StepPlan([Chunk(0, [t], t, table)])) for t in tokens[half:]]
        difference = float((torch.cat(got).float() - expected).abs().max() / expected.abs().max())
        if not difference <= tolerance:
            raise Unsupported(f"{self.decoder.name}: logits differ by {difference:.1e} from plain attention")
        return difference


class FallbackRunner:
    """Any model that Transformers runs: its own forward and cache, one sequence after the other."""

    prefix_caching = False
    chunked = False  # recurrent states take a prompt whole, or token by token

    def __init__(self, model: Fallback, config: EngineConfig, max_model_len: int, reason: str) -> None:
        self.model = model
        self.max_model_len = max_model_len
        # The model keeps keys and values itself; pages only count, and there are enough for everybody.
        self.num_pages = config.max_num_seqs * -(-max_model_len // config.page_size) + 1
        self.reason = reason

    def run(self, plan: StepPlan) -> torch.Tensor:
        rows = [self.model.forward(chunk) for chunk in plan.chunks]
        return torch.cat([r for r in rows if r is not None]) if any(r is not None for r in rows) else torch.empty(0, 0)

    def forget(self, seq_id: int) -> None:
        self.model.forget(seq_id)

    def scrub(self, pages: Sequence[int]) -> None:
        """Every sequence has a cache of its own, dropped with it."""

    def describe(self) -> str:
        return f"Transformers' own forward ({self.reason})"


def pick_device(wanted: str) -> str:
    """`auto` takes the first GPU that torch sees, else the CPU.

    Raises:
        UsageError: for a device that torch can't use.
    """
    if wanted == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return wanted
    if wanted.split(":")[0] == "cuda":
        if torch.cuda.is_available():
            return wanted if ":" in wanted else "cuda:0"
        raise UsageError(f"`device` is {wanted!r}, but torch sees no GPU", "`anyrig doctor --deep` says why")
    raise UsageError(f"`device` must be auto, cpu, cuda or cuda:N. Given: {wanted!r}")


def pick_dtype(wanted: str, device: str) -> torch.dtype:
    """`auto` is bfloat16 where the hardware computes in it; emulated, it would be slower than float32."""
    if wanted != "auto":
        return DTYPES[wanted]
    if device.startswith("cuda"):
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if cpu.read().native_bf16 else torch.float32


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
