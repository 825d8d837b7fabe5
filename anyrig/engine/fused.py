"""Models that the CPU kernels run whole: one call per step, and no modelling code at the second start.

First start: Transformers' module -> description (`models/describe.py`) -> packed weights, written piece by piece into a
mapped file (`models/prepared.py`) -> one comparison with the module's own logits. From then on the file is mapped and
that is all: neither torch nor Transformers is imported, and processes on one machine share its memory.
"""

import gc
import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from anyrig.core.config import EngineConfig
from anyrig.core.decoder import INT4, DecoderSpec, WeightKind
from anyrig.core.errors import OutOfMemory, Unsupported
from anyrig.core.spec import Chunk, StepPlan, StepResult
from anyrig.engine import memory
from anyrig.engine.runner import pick_dtype
from anyrig.hardware import cpu
from anyrig.models import prepared, prepared_key
from anyrig.models.prepared import Prepared
from anyrig.ops.cpu import native, shapes

log = logging.getLogger(__name__)

Logits = np.ndarray[Any, np.dtype[np.float32]]


def make(path: Path, name: str, config: EngineConfig, limit: int, progress: Callable[[str], None]) -> "FusedRunner":
    """The fused runner of a model directory.

    Raises:
        Unsupported: with the reason why the model must run the general way.
    """
    module = native.module()
    if module is None:
        raise Unsupported(f"CPU kernels: {native.why_not()}")
    if reason := shapes.why_not((), config.page_size):
        raise Unsupported(reason)
    kind = weight_kind(config, module.isa)
    group, minimum = INT4 if kind == "int4" else (0, False)
    key = prepared_key.key_of(name, path, limit, kind=kind, layout=module.LAYOUT, group=group, minimum=minimum)
    found = prepared.find(key, module.packed_size)
    if found is None:
        with prepared.exclusive(key, progress, module.packed_size) as other:
            found = other or _prepare(path, name, config, limit, key, module, progress)
    else:
        progress(f"mapping {name} ({kind}, prepared)")
    return FusedRunner(found, module, config, limit)


def weight_kind(config: EngineConfig, isa: str) -> WeightKind:
    """What the matrices are kept in.

    Raises:
        Unsupported: for a dtype that the kernels lack.
    """
    dtype = pick_dtype(config.dtype, "cpu")
    if dtype == "float16":
        raise Unsupported("`dtype` is float16, which the CPU kernels lack")
    if config.quantize != "none":
        return config.quantize
    if config.dtype == "auto" and isa != "avx512":
        return "float32"
    return "bfloat16" if dtype == "bfloat16" else "float32"


def kv_kind(config: EngineConfig, kind: WeightKind, isa: str) -> str:
    """What keys and values are kept in: bfloat16 where there is a dot product for it, unless float32 is wanted."""
    if config.kv_cache_dtype != "auto":
        return config.kv_cache_dtype
    return "bfloat16" if kind != "float32" and isa == "avx512" and config.dtype != "float32" else "float32"


class FusedRunner:
    """A `Prepared` model in the kernels' decoder, with pages of its own."""

    prefix_caching = True
    chunked = True
    # More would be no faster: the products are at their best from some dozen rows on, and what lies between two of them
    # stays in the caches. First tokens come the sooner.
    batch_tokens = 512

    def __init__(self, model: Prepared, module: ModuleType, config: EngineConfig, max_model_len: int) -> None:
        spec = model.spec
        check(spec, config.page_size)
        self.spec = spec
        self.prepared = model
        self.isa: str = module.isa
        self.page_size = config.page_size
        self.kv_kind = kv_kind(config, spec.kind, self.isa)
        self.decoder = build(model, module, config.threads or cpu.read().cores)
        layers = [layer.attention for layer in spec.layers]
        page_bytes = self.decoder.page_bytes(self.page_size, self.kv_kind)
        size = memory.size_kv(layers, config, max_model_len, page_bytes=page_bytes, device="cpu")
        self.num_pages = size.num_pages
        self.kv_bytes = size.total_bytes
        self.max_model_len = memory.longest(size, config, max_model_len)
        try:
            self.decoder.allocate(self.num_pages, self.page_size, self.kv_kind, config.kv_cache_pinned)
        except MemoryError as error:
            raise OutOfMemory(
                f"there are no {self.kv_bytes / 2**20:,.0f} MiB for keys and values",
                "set `kv_cache_memory` lower" + (", or leave `kv_cache_pinned`" if config.kv_cache_pinned else ""),
            ) from error
        self.weight_bytes = model.bytes
        self._logits = np.empty((0, spec.vocab_size), np.float32)

    def run(self, plan: StepPlan, best_only: bool = False) -> StepResult:
        """Logits are the runner's memory, overwritten by the next step."""
        return step(self.decoder, plan, None if best_only else self._logits_for)

    def _logits_for(self, rows: int) -> Logits:
        if rows > len(self._logits):
            self._logits = np.empty((rows + rows // 4, self.spec.vocab_size), np.float32)
        return self._logits[:rows]

    def forget(self, seq_id: int) -> None:
        """Nothing is kept by sequence: pages are the scheduler's."""

    def scrub(self, pages: Sequence[int]) -> None:
        self.decoder.scrub(list(pages))

    def describe(self) -> str:
        kept = "mapped" if self.prepared.path is not None else "in memory"
        return (
            f"fused decoder on cpu ({self.isa}), {self.decoder.threads} threads, {self.spec.kind}, "
            f"weights {self.weight_bytes / 2**20:,.0f} MiB {kept}, "
            f"{self.kv_kind} KV cache up to {self.kv_bytes / 2**20:,.0f} MiB "
            f"({self.num_pages - 1:,} pages)"
        )


def step(decoder: Any, plan: StepPlan, logits_for: Callable[[int], Logits] | None = None) -> StepResult:
    """Compute a plan: its lists become flat int32 arrays, and one call does the rest.

    Args:
        logits_for: makes float32 `[rows, vocab]` to be filled; None: the best tokens are enough.
    """
    tokens: list[int] = []
    lengths: list[int] = []
    starts: list[int] = []
    table: list[int] = []
    offsets = [0]
    rows: list[int] = []
    for chunk in plan.chunks:
        tokens += chunk.tokens
        end = len(tokens)
        lengths.append(len(chunk.tokens))
        starts.append(chunk.start)
        table += chunk.block_table
        offsets.append(len(table))
        if chunk.rows:
            rows += range(end - chunk.rows, end)
    best = np.empty(len(rows), np.int32)
    best_logits = np.empty(len(rows), np.float32)
    logits = None if logits_for is None else logits_for(len(rows))
    decoder.step(
        np.array(tokens, np.int32),
        np.array(lengths, np.int32),
        np.array(starts, np.int32),
        np.array(table, np.int32),
        np.array(offsets, np.int32),
        np.array(rows, np.int32),
        best,
        best_logits,
        logits,
    )
    return StepResult(logits, best.tolist(), best_logits.tolist())


def build(model: Prepared, module: ModuleType, threads: int) -> Any:
    """The kernels' decoder of a prepared model that passed `check`; it keeps the arrays alive."""
    spec = model.spec
    decoder = module.Decoder(
        threads,
        spec.vocab_size,
        spec.hidden,
        spec.eps,
        spec.kind,
        spec.group,
        spec.minimum,
        spec.embed_scale,
        spec.logit_scale,
        spec.final_softcap or 0.0,
    )
    head = model.matrices["head"]
    kind, _, _ = spec.packing("head")
    decoder.set_ends(kind, head if spec.tied else model.matrices["embed"], head, model.vectors["final_norm"])
    for rope in spec.ropes:
        decoder.add_rope(np.array(rope.inv_freq, np.float32), rope.scaling, rope.interleaved)
    for i, layer in enumerate(spec.layers):
        a = layer.attention
        prefix = f"layers.{i}."
        decoder.add_layer(
            heads=a.heads,
            kv_heads=a.kv_heads,
            dim=a.dim,
            v_dim=a.v_dim,
            scaling=a.scaling,
            window=a.window or 0,
            softcap=a.softcap or 0.0,
            rope=-1 if layer.rope is None else layer.rope,
            intermediate=layer.intermediate,
            activation=layer.activation,
            multiplier=layer.multiplier,
            qkv=model.matrices[prefix + "qkv"],
            o=model.matrices[prefix + "o"],
            gate_up=model.matrices[prefix + "gate_up"],
            down=model.matrices[prefix + "down"],
            vectors={n.removeprefix(prefix): v for n, v in model.vectors.items() if n.startswith(prefix)},
        )
    return decoder


def check(spec: DecoderSpec, page_size: int) -> None:
    """Refuse what the kernels' decoder lacks, although a description can say it.

    Raises:
        Unsupported: naming the layer.
    """
    layers = [layer.attention for layer in spec.layers]
    if reason := shapes.why_not(layers, page_size):
        raise Unsupported(reason)
    if shared := [a.name for a in layers if a.kv_source != a.index]:
        raise Unsupported(f"layer {shared[0]} reads another layer's keys and values")


def _prepare(
    path: Path,
    name: str,
    config: EngineConfig,
    limit: int,
    key: prepared_key.Key,
    module: ModuleType,
    progress: Callable[[str], None],
) -> Prepared:
    """Load the module, describe it, pack its weights into a file, compare the two, and let the module go."""
    import torch

    from anyrig.models import checkpoint, describe, load

    progress(f"preparing {name} ({key.kind}): once, the next start is quicker")
    torch.set_num_threads(config.threads or cpu.read().cores)
    # In the dtype that they are stored in, the weights stay mapped from the checkpoint.
    dtype = torch.float32 if checkpoint.stored_dtype(path) in ("F32", "F16") else torch.bfloat16
    model = load.load(path, dtype=dtype, attn_implementation="eager")
    description = describe.describe(model, name, limit, kind=key.kind, group=key.group, minimum=key.minimum)
    check(description.spec, config.page_size)
    with prepared.create(key, description.spec, module.packed_size) as writer:
        pack(description, writer, module)
        made = writer.view()
        error = describe.check(description.spec, model, lambda ids: _logits(made, module, config, ids))
        log.info("%s: relative error of the logits, prepared against module: %.1e", name, error)
        made = writer.commit()
    del model, description
    gc.collect()
    return made


def pack(description: Any, writer: prepared.Writer | prepared.InMemory, module: ModuleType) -> None:
    """Pack a `models.describe.Description` piece by piece."""
    import torch

    spec: DecoderSpec = description.spec
    shapes = spec.matrices()
    at: dict[str, int] = {}
    for name, piece in description.tensors():
        if isinstance(piece, torch.Tensor):
            row = at.get(name, 0)
            count, _ = shapes[name]
            rows = np.ascontiguousarray(piece.float().numpy())
            kind, group, minimum = spec.packing(name)
            module.pack(kind, rows, writer.matrix(name), row, count, group, minimum)
            at[name] = row + len(rows)
            if at[name] == count:
                writer.release(name)
        else:
            writer.vector(name, np.ascontiguousarray(piece, np.float32))


def _logits(model: Prepared, module: ModuleType, config: EngineConfig, ids: list[int]) -> Any:
    """Logits `[len(ids), vocab]` of one sequence, in two chunks and some single steps."""
    decoder = build(model, module, config.threads or cpu.read().cores)
    pages = -(-len(ids) // shapes.PAGE_SIZES[0])
    decoder.allocate(pages, shapes.PAGE_SIZES[0], kv_kind(config, model.spec.kind, module.isa), False)

    def fresh(rows: int) -> Logits:
        return np.empty((rows, model.spec.vocab_size), np.float32)

    cuts = [0, len(ids) // 2, len(ids) - 3, *range(len(ids) - 2, len(ids) + 1)]
    table = list(range(pages))
    parts = [
        step(decoder, StepPlan([Chunk(0, ids[a:b], a, table, rows=b - a)]), fresh).logits for a, b in pairwise(cuts)
    ]
    return np.concatenate(parts)
