"""One tiny forward that records what every attention layer of a Transformers decoder asks for.

No list of architectures: the model itself says, call by call, which heads, sizes, scaling, window, softcap and sinks it
uses, and which layers read another one's keys and values. What it asks for that our op can't do is refused by name.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from anyrig.core.errors import Unsupported
from anyrig.core.spec import LayerSpec

# Keywords that change nothing for a causal decoder in inference when they have one of these values.
HARMLESS: dict[str, Callable[[Any], bool]] = {
    "dropout": lambda x: not x,
    "is_causal": lambda x: x in (None, True),
    "deterministic": lambda x: True,
    "output_attentions": lambda x: not x,
    "output_hidden_states": lambda x: not x,
    "output_router_logits": lambda x: not x,
    "use_cache": lambda x: not x,
    "return_dict": lambda x: True,
    "position_ids": lambda x: True,  # rope is applied before the op
    "position_embeddings": lambda x: True,
    "cache_position": lambda x: True,
    "logits_to_keep": lambda x: True,
}
UNDERSTOOD = ("scaling", "sliding_window", "softcap", "s_aux")
PROBE_TOKENS = 6
VERIFY_TOKENS = 70  # more than a tile of keys and several pages, so that their borders are crossed


class Probe:
    """Stands in for the attention op during the probe forward, computing plain causal attention."""

    def __init__(self, model: torch.nn.Module, model_name: str) -> None:
        self.model_name = model_name
        self.names = {id(module): name for name, module in model.named_modules()}
        self.specs: list[LayerSpec] = []
        self.modules: list[torch.nn.Module] = []
        self._kv: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        name = self.names.get(id(module), type(module).__name__)
        if any(module is seen for seen in self.modules):
            raise Unsupported(f"{self.model_name}: layer {name} is called twice in one forward")
        if attention_mask is not None:
            raise Unsupported(f"{self.model_name}: layer {name} brings an attention mask of its own")
        for keyword, what in kwargs.items():
            if what is None or keyword in UNDERSTOOD:
                continue
            if keyword not in HARMLESS or not HARMLESS[keyword](what):
                shown = tuple(what.shape) if isinstance(what, torch.Tensor) else what
                raise Unsupported(f"{self.model_name}: layer {name} asks for `{keyword}`={shown}")
        heads, dim = query.shape[1], query.shape[3]
        kv_heads, v_dim = key.shape[1], value.shape[3]
        if heads % kv_heads:
            raise Unsupported(f"{self.model_name}: layer {name} has {heads} heads on {kv_heads} KV heads")
        scaling, sinks = kwargs.get("scaling"), kwargs.get("s_aux")
        spec = LayerSpec(
            index=len(self.specs),
            name=name,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            v_dim=v_dim,
            scaling=float(dim**-0.5 if scaling is None else scaling),
            window=kwargs.get("sliding_window"),
            softcap=kwargs.get("softcap"),
            sinks=sinks is not None,
            kv_source=self._source(key, value),
        )
        self.specs.append(spec)
        self.modules.append(module)
        self._kv.append((key, value))
        return _plain(query, key, value, spec, sinks), None

    def _source(self, key: torch.Tensor, value: torch.Tensor) -> int:
        """The layer that made these very tensors: this one, unless another one's were passed on."""
        for i, (k, v) in enumerate(self._kv):
            if k.data_ptr() == key.data_ptr() and v.data_ptr() == value.data_ptr() and k.shape == key.shape:
                return i
        return len(self.specs)


def check_config(config: Any, specs: list[LayerSpec], name: str) -> None:
    """What the calls can't show: layers that keep a state of another kind, masks that only the model knows.

    Raises:
        Unsupported: naming the layer type.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    for i, kind in enumerate(types):
        if kind not in ("full_attention", "sliding_attention", "attention"):
            raise Unsupported(f"{name}: layer {i} is of type {kind!r}")
    layers = getattr(text, "num_hidden_layers", len(specs))
    if len(specs) != layers:
        raise Unsupported(f"{name}: {len(specs)} of {layers} layers call the attention interface")
    for key in ("attention_chunk_size", "ssm_state_size", "conv_kernel_size"):
        if getattr(text, key, None):
            raise Unsupported(f"{name}: `{key}`={getattr(text, key)} in its configuration")
    if getattr(text, "is_encoder_decoder", False):
        raise Unsupported(f"{name}: an encoder-decoder model")


def takes(function: Callable[..., Any], parameter: str) -> bool:
    return parameter in inspect.signature(function).parameters


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: LayerSpec, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Causal attention of the few probe tokens, `[1, tokens, heads, v_dim]`; exact enough to compare logits with."""
    group = spec.heads // spec.kv_heads
    k, v = k[0].repeat_interleave(group, 0).float(), v[0].repeat_interleave(group, 0).float()
    scores = (q[0].float() @ k.transpose(1, 2)) * spec.scaling
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    n = scores.shape[-1]
    position = torch.arange(n, device=q.device)
    seen = position <= position[:, None]
    if spec.window is not None:
        seen &= position > position[:, None] - spec.window
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(-1, 1, 1).expand(-1, n, 1)], -1)
    p = scores.softmax(-1)[..., :n]
    return (p @ v).transpose(0, 1)[None].to(q.dtype)
