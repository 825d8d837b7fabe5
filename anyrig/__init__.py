"""anyrig: LLM work on any rig."""

from typing import TYPE_CHECKING, Any

from anyrig.core.env import calm_openmp
from anyrig.core.outputs import CompletionOutput, Logprob, RequestOutput
from anyrig.core.params import SamplingParams

if TYPE_CHECKING:
    from anyrig.engine.async_engine import AsyncLLM
    from anyrig.engine.llm import LLM

__version__ = "0.1.0"
calm_openmp()  # before anybody imports torch
__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Torch takes seconds to import; `--help` and `doctor` must not wait for it.
    if name == "LLM":
        from anyrig.engine.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from anyrig.engine.async_engine import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
