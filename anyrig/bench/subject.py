"""The engine under measurement: loaded once, with what is needed to say how much work a pass was."""

import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

from anyrig import __version__
from anyrig.bench import cost, roofline
from anyrig.bench.ceilings import Ceilings
from anyrig.bench.work import Work
from anyrig.core.config import EngineConfig
from anyrig.engine.engine import Engine
from anyrig.engine.runner import pick_device, pick_dtype
from anyrig.hardware import cpu
from anyrig.models import locate


class Subject:
    """A loaded engine.

    Args:
        model: what `Engine` takes.
        config: its options.
        label: what results call the model; the same as `model` unless given.

    Attributes:
        load_s: seconds from nothing to an engine that takes requests.
        kind: what its weights are: a dtype, int8 or int4.
        weight_bytes: of all of them, as they are kept.
    """

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        *,
        label: str | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        start = time.perf_counter()
        self.engine = Engine(model, config, progress=progress)
        self.load_s = time.perf_counter() - start
        self.model = label or model
        self.config = config
        self.device = pick_device(config.device)
        self.shape = cost.read_shape(locate.resolve(model).path)
        runner: Any = self.engine.runner
        dtype = dtype_name(config, self.device)
        self.kv_itemsize = cost.ITEMSIZE[dtype]
        if (spec := getattr(runner, "spec", None)) is not None:  # the fused decoder decides for itself
            self.kind, self.kv_itemsize = str(spec.kind), cost.ITEMSIZE[runner.kv_kind]
        else:
            self.kind = dtype if config.quantize == "none" else config.quantize
        packed: int | None = getattr(runner, "weight_bytes", None)
        self.weight_bytes = packed or self.shape.parameters * cost.ITEMSIZE[dtype]

    @property
    def threads(self) -> int:
        return self.config.threads or cpu.read().cores

    def prompts(self, work: Work, seed: int) -> list[list[int]]:
        return work.prompts(seed, self.engine.info.vocab_size, self.engine.tokenizer.encode)

    def describe(self) -> dict[str, Any]:
        """The keys of a result that say what was measured."""
        return {
            "peer": "anyrig",
            "version": __version__,
            "model": self.model,
            "variant": self.engine.describe(),
            "weights": self.kind,
            "parameters": self.shape.parameters,
            "weight_mb": round(self.weight_bytes / 1e6),
            "threads": self.threads if self.device == "cpu" else None,
        }

    def reached(
        self, lengths: Sequence[tuple[int, int]], seconds: float, steps: int, ceilings: Ceilings | None
    ) -> dict[str, Any]:
        """Rates of a pass of `steps` steps over requests of `(prompt, generated)` tokens, see `roofline.reached`."""
        in_tokens = sum(p for p, _ in lengths)
        prefill_steps = min(steps, -(-in_tokens // self.engine.scheduler.max_batch_tokens))
        phases = cost.phases(
            self.shape,
            lengths,
            prefill_steps=prefill_steps,
            decode_steps=steps - prefill_steps,
            weight_bytes=self.weight_bytes,
            kv_itemsize=self.kv_itemsize,
        )
        return roofline.reached(*phases, seconds, sum(g for _, g in lengths), self.kind, ceilings)


def dtype_name(config: EngineConfig, device: str) -> str:
    """The dtype that the options mean on this machine."""
    return str(pick_dtype(config.dtype, device)).removeprefix("torch.")


def peak_rss_mb() -> int:
    """Greatest memory of this process so far."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
