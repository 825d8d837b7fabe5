"""A Transformers decoder as the engine sees it: a ragged batch goes in, the wanted rows of logits come out.

The model is Transformers' own module, untouched. Its attention layers call `Decoder._attend` through Transformers'
`AttentionInterface`, under a name that belongs to this one decoder: a bound method, so there is no global state.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface

from anyrig.core.errors import Unsupported
from anyrig.core.spec import LayerSpec
from anyrig.models.probe import PROBE_TOKENS, Probe, check_config, takes
from anyrig.models.replace import FEW, LinearChoice, choose_linear, left_to_torch, pack_linear, weight_bytes
from anyrig.models.rope import freeze_rope
from anyrig.ops.attention import AttentionStep, KVPages

_numbers = itertools.count()


class Decoder:
    """One model on the paged path.

    Args:
        model: a causal language model of Transformers, loaded with `attn_implementation="eager"`.
        name: for messages.
        max_model_len: fixes rope variants that depend on the length.
        probe_tokens: how many tokens the probe computes; their logits are kept as `probe_logits`.
        linear: what its linear layers are replaced by; None: the best for its device and dtype.

    Raises:
        Unsupported: when the model asks for what the paged path can't do.

    Attributes:
        layers: one `LayerSpec` per attention layer, in the order of the calls.
        linear: what stands in the place of an `nn.Linear` (`replace.py`).
        linear_shapes: `[out, in]` of the linear layers, each shape once.
        weight_bytes: of all weights as they are kept.
        all_kernels: whether the CPU kernels compute nearly all products with weights.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        name: str,
        max_model_len: int,
        probe_tokens: int = PROBE_TOKENS,
        linear: LinearChoice | None = None,
    ) -> None:
        self.model = model
        self.name = name
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self.config: Any = model.config
        if not getattr(model, "_supports_attention_backend", False):
            raise Unsupported(f"{name}: {type(model).__name__} does not take another attention (no backend support)")
        if takes(type(model).forward, "logits_to_keep") is False:
            raise Unsupported(f"{name}: {type(model).__name__} can't be asked for some rows of logits only")
        freeze_rope(model, max_model_len)
        self.linear = linear or choose_linear(str(self.device), self.dtype, threads=torch.get_num_threads())
        self.linear_shapes = pack_linear(model, self.linear)
        self.weight_bytes = weight_bytes(model)
        self.all_kernels = self.linear.kernels and left_to_torch(model) < FEW
        self._interface = f"anyrig_{next(_numbers)}"
        AttentionInterface.register(self._interface, _weakly(self._attend))
        self._probe: Probe | None = None
        self._step: AttentionStep | None = None
        self.kv: list[KVPages] = []
        self._set_attention(self._interface)
        self.layers = self._run_probe(probe_tokens)

    def bind(self, kv: list[KVPages]) -> None:
        """The pages of every layer; layers that share keys and values have the same ones."""
        self.kv = kv

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """Logits `[len(rows), vocab]` of the given rows of a flat batch.

        Args:
            token_ids, positions: `[tokens]` int64, padding included.
            rows: `[R]` int64, which rows' logits are wanted.
            step: the attention work of this batch.
        """
        self._step = step
        try:
            return self._logits(token_ids, positions, rows)
        finally:
            self._step = None

    def _logits(self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        out = self.model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows)
        logits: torch.Tensor = out.logits[0]
        return logits

    def _set_attention(self, interface: str) -> None:
        for module in self.model.modules():
            config = getattr(module, "config", None)
            if config is not None and hasattr(config, "_attn_implementation"):
                config._attn_implementation = interface

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if self._probe is not None:
            return self._probe.attend(module, query, key, value, attention_mask, **kwargs)
        if self._step is None:
            raise RuntimeError("attention was called outside of a step")
        layer = self._layer_of[id(module)]
        out = self._step.attend(
            query[0],
            key[0],
            value[0],
            layer,
            self.kv[layer.index],
            kwargs.get("s_aux"),
            write=layer.kv_source == layer.index,
        )
        return out[None], None

    @torch.inference_mode()
    def _run_probe(self, tokens: int) -> list[LayerSpec]:
        self._probe = probe = Probe(self.model, self.name)
        ids = torch.arange(tokens, device=self.device) % self.config.get_text_config().vocab_size
        try:
            self.probe_logits = self._logits(ids, ids, ids)
        finally:
            self._probe = None
        layers = probe.specs
        check_config(self.config, layers, self.name)
        self._layer_of: dict[int, LayerSpec] = {id(m): s for m, s in zip(probe.modules, layers, strict=True)}
        return layers


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method without a hold on its object: Transformers' table is never emptied, and would keep the model alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        if alive is None:
            raise RuntimeError("the engine of this model is gone")
        return alive(*args, **kwargs)

    return call
