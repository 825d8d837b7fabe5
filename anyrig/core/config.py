"""What an engine is told once. The command line, environment and configuration file are made from these fields."""

import re
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin

from anyrig.core.errors import UsageError

RunnerName = Literal["auto", "fused", "paged", "transformers"]
KvDType = Literal["auto", "float32", "bfloat16", "int8"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantize = Literal["none", "int8", "int4"]


MOST_THREADS = 1000  # of the CPU kernels


def option(help: str, default: Any = None, **extra: Any) -> Any:
    """A configuration field: `help` is shown by the command line, `extra` may hold `metavar`."""
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine.

    Raises:
        UsageError: naming the option, its value and the allowed range.
    """

    dtype: DType = option("arithmetic; auto: bfloat16 where the hardware computes in it, else float32", "auto")
    quantize: Quantize = option(
        "weights on a CPU, with int8 activations: int8 (a scale per output), int4 (groups of 32 with a minimum)", "none"
    )
    runner: RunnerName = option(
        "how steps are computed; fused: the whole decoder by the CPU kernels; paged: our attention in Transformers'"
        " module; transformers: its own forward; auto: the first that can",
        "auto",
    )
    device: str = option("auto, cpu, cuda or cuda:N (ROCm too)", "auto")
    max_model_len: int | None = option("longest prompt plus output, in tokens; unset: what the model allows")
    kv_cache_memory: str | int | None = option(
        "memory for keys and values, such as 512MB or 4GiB; unset: sized from what the machine has", metavar="SIZE"
    )
    kv_cache_dtype: KvDType = option(
        "keys and values of the fused decoder; auto: bfloat16 where the hardware takes it, else float32; int8: half the"
        " memory, a scale per token and head",
        "auto",
    )
    kv_cache_pinned: bool = option("take the memory for keys and values at the start rather than as it is used", False)
    max_num_seqs: int = option("most requests that run at once", 256)
    max_batch_tokens: int | None = option(
        "most tokens of one step, prompts and outputs together; unset: 512 where the fused decoder runs, else 2048"
    )
    max_chunk_tokens: int = option("most tokens of one prompt in one step", 512)
    page_size: int = option("tokens per page of the KV cache", 16)
    enable_prefix_caching: bool = option("reuse the keys and values of prompts that start alike", True)
    logprobs_mode: Literal["raw", "processed"] = option(
        "log-probabilities of the model's own distribution, or of the one really sampled from", "raw"
    )
    seed: int = option("seed of requests that bring none", 0)
    threads: int | None = option("CPU threads; unset: the cores this process may use")
    verify: bool = option(
        "compare the paged engine with plain attention once at load (the fused one always is, when it is prepared)",
        False,
    )

    def __post_init__(self) -> None:
        for field_ in fields(self):
            known = get_args(field_.type)
            if get_origin(field_.type) is Literal and getattr(self, field_.name) not in known:
                raise UsageError(f"`{field_.name}` must be {' or '.join(known)}. Given: {getattr(self, field_.name)!r}")
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise UsageError(f"`threads` must be 1 to {MOST_THREADS}. Given: {self.threads}")
        for name, low in (("max_num_seqs", 1), ("max_batch_tokens", 16), ("max_chunk_tokens", 1), ("page_size", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise UsageError(f"`{name}` must be at least {low}. Given: {getattr(self, name)}")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise UsageError(f"`max_model_len` must be at least 1. Given: {self.max_model_len}")
        if self.page_size & (self.page_size - 1) or self.page_size > 64:
            raise UsageError(f"`page_size` must be a power of two of at most 64. Given: {self.page_size}")
        if self.kv_cache_memory is not None:
            parse_size(self.kv_cache_memory, "kv_cache_memory")


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(value: str | int, name: str = "size") -> int:
    """Bytes of `512MB`, `4GiB`, `4G` or a plain number.

    Raises:
        UsageError: when it is none of these.
    """
    if isinstance(value, int):
        if value > 0:
            return value
    elif (
        (m := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", value.lower()))
        and m[2] in _UNITS
        and float(m[1]) > 0
    ):
        return int(float(m[1]) * _UNITS[m[2]])
    raise UsageError(f"`{name}` is not a size: {value!r}", "write it as 512MB, 4GiB or a number of bytes")
