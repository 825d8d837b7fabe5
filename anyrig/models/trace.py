"""One tiny forward of a Transformers decoder with every module watched: what went in, what came out.

`describe.py` compares these tensors with what it believes the module to compute, so that nothing rests on names alone.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from anyrig.core.errors import Unsupported
from anyrig.models.probe import Probe, takes

TOKENS = 7


@dataclass(frozen=True)
class Call:
    """The first tensor that a module was given, and the first that it returned."""

    input: torch.Tensor
    output: torch.Tensor


@dataclass(frozen=True)
class Attention:
    """One call of the attention interface: queries `[heads, tokens, dim]`, keys, values, result `[tokens, width]`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor | None
    output: torch.Tensor


class Trace(Probe):
    """The record of one forward.

    Args:
        model: a causal language model of Transformers with plain linear layers.
        name: for messages.
        longest: positions stay below.

    Attributes:
        ids, positions: `[TOKENS]`, what was computed.
        specs, modules: of the attention layers (`Probe`).
        attention: their calls, in the same order.
        head: what the output layer was given.
        stand_in: what took the place of the output layer's product: numbers wide enough to show what follows it.
        logits: what the model made of them.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    head: torch.Tensor
    stand_in: torch.Tensor
    logits: torch.Tensor

    def __init__(self, model: nn.Module, name: str, longest: int) -> None:
        super().__init__(model, name)
        if not getattr(model, "_supports_attention_backend", False):
            raise Unsupported(f"{name}: {type(model).__name__} does not take another attention (no backend support)")
        if not takes(type(model).forward, "logits_to_keep"):
            raise Unsupported(f"{name}: {type(model).__name__} can't be asked for some rows of logits only")
        self.attention: list[Attention] = []
        self._calls: dict[int, Call] = {}
        self._twice: set[int] = set()
        self._run(model, longest)

    def call(self, module: nn.Module) -> Call:
        """The one call of a module.

        Raises:
            Unsupported: when it was not called, or more than once.
        """
        name = self.names.get(id(module), type(module).__name__)
        if id(module) in self._twice:
            raise Unsupported(f"{self.model_name}: {name} is called twice in one forward")
        if id(module) not in self._calls:
            raise Unsupported(f"{self.model_name}: {name} is not called")
        return self._calls[id(module)]

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        out, _ = super().attend(module, query, key, value, attention_mask, **kwargs)
        rows = out[0].reshape(out.shape[1], -1).clone()
        self.attention.append(Attention(query[0].clone(), key[0].clone(), value[0].clone(), kwargs.get("s_aux"), rows))
        return out, None

    @torch.inference_mode()
    def _run(self, model: Any, longest: int) -> None:
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear or head.bias is not None:
            kind = type(head).__name__
            raise Unsupported(f"{self.model_name}: the output layer ({kind}) is not one plain matrix without a bias")
        device, dtype = head.weight.device, head.weight.dtype
        vocab = model.get_input_embeddings().weight.shape[0]
        last = max(longest - 1, TOKENS)
        self.positions = torch.tensor([0, 1, 2, 3, 5, min(17, last - 1), last], device=device)
        self.ids = (torch.arange(TOKENS, device=device) * (vocab // TOKENS) + 5) % vocab
        numbers = torch.linspace(-60, 60, head.weight.shape[0], device=device)
        self.stand_in = torch.stack([numbers.roll(i) for i in range(TOKENS)]).to(dtype)

        def product(x: torch.Tensor) -> torch.Tensor:
            self.head = x.reshape(-1, x.shape[-1]).clone()
            return self.stand_in[None]

        handles = [m.register_forward_hook(self._record, with_kwargs=True) for m in model.modules()]
        head.forward = product
        try:
            with attention_of(model, self.attend):
                out = model(
                    input_ids=self.ids[None],
                    position_ids=self.positions[None],
                    use_cache=False,
                    logits_to_keep=TOKENS,
                )
            self.logits = out.logits[0]
        finally:
            del head.forward
            for handle in handles:
                handle.remove()

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
        made = output[0] if isinstance(output, tuple) else output
        if not isinstance(given, torch.Tensor) or not isinstance(made, torch.Tensor):
            return
        if id(module) in self._calls:
            self._twice.add(id(module))
        self._calls[id(module)] = Call(given.clone(), made.clone())


@contextmanager
def attention_of(model: nn.Module, attention: Any) -> Iterator[None]:
    """Have the model's layers call `attention`: a function, or the name of one that Transformers knows."""
    name = attention
    if callable(attention):
        name = f"anyrig_trace_{threading.get_ident()}"
        AttentionInterface.register(name, attention)
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in found if hasattr(config, "_attn_implementation")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation = name
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]
        if callable(attention):
            AttentionInterface.register(name, _gone)  # Transformers' table is never emptied


def _gone(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("this forward is over")
