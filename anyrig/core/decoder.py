"""A whole decoder as plain data: what the CPU's fused decoder (`csrc/cpu/decoder.h`) computes, layer by layer.

`models/describe.py` arrives at it from Transformers' module, `models/prepared.py` keeps it beside the packed weights,
and `engine/fused.py` runs it without importing any modelling code. There is one loop for all of them:

    x = embed[token] * embed_scale
    for each layer:
        a = attention(rope(qk_norm(qkv(norm(x)))));  x += multiplier * attn_out_norm(o(a))
        m = down(act(gate(norm(x))) * up(norm(x)));  x += multiplier * mlp_out_norm(m)
    logits = softcap(head(norm(x)) * logit_scale)
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from anyrig.core.spec import LayerSpec

Activation = Literal["silu", "gelu", "gelu_tanh"]
WeightKind = Literal["float32", "bfloat16", "int8", "int4"]


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding: angle of pair `i` at position `p` is `p * inv_freq[i]`; cos and sin are times `scaling`.

    Pairs are `(i, i + n)` with `n = len(inv_freq)`, or `(2i, 2i + 1)` when `interleaved`. Dimensions from `2n` on
    are left as they are (partial rotary).
    """

    inv_freq: tuple[float, ...]
    scaling: float = 1.0
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One layer. Which norms and biases exist shows in the names of its tensors (`tensor_names`).

    Attributes:
        attention: what its attention asks for.
        rope: index into `DecoderSpec.ropes`; None: positions are not encoded (NoPE).
        intermediate: width of the gated MLP.
        activation: of the gate.
        tensors: names of the optional tensors that the layer has: any of `OPTIONAL`.
        multiplier: factor on what attention and MLP add to the residual stream.
    """

    attention: LayerSpec
    rope: int | None
    intermediate: int
    activation: Activation
    tensors: tuple[str, ...] = ()
    multiplier: float = 1.0


# int4: inputs per group, and whether groups have a minimum. On this grid rounding to nearest keeps small models whole.
INT4 = (32, True)

# Always there: the packed matrices and the norm before attention and before the MLP.
MATRICES = ("qkv", "o", "gate_up", "down")
REQUIRED_NORMS = ("attn_norm", "mlp_norm")
# float32 vectors. Norm weights hold what is multiplied (Gemma's `1 + w` is folded in). `q_norm` and `k_norm` are [dim]:
# one RMSNorm per head. `attn_out_norm` and `mlp_out_norm` come before the addition to the residual stream (Gemma 2, 3).
OPTIONAL = (
    "attn_out_norm",
    "mlp_out_norm",
    "q_norm",
    "k_norm",
    "qkv_bias",
    "o_bias",
    "gate_up_bias",
    "down_bias",
    "sinks",
)


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The decoder.

    Tensors, by name: `embed` (packed like `head`, absent when tied), `head`, `final_norm`, `layers.{i}.{name}`.
    `qkv` holds the rows of q, k and v below each other. `gate_up` holds blocks of 16 rows of gate and of up in turn
    (`intermediate` is padded with zero rows to a multiple of 16, and so are the columns of `down`), so that one tile of
    the product has both operands of the gate.

    Attributes:
        vocab_size, hidden: rows of the logits, width of the residual stream.
        eps: of every RMSNorm.
        kind: of the packed matrices; `packing` says what it means for each.
        group: inputs that share a scale (int4); 0 otherwise.
        minimum: int4 groups have a minimum of their own rather than a fixed zero point of 8.
        tied: `embed` is `head`.
    """

    vocab_size: int
    hidden: int
    eps: float
    kind: WeightKind
    layers: tuple[BlockSpec, ...]
    ropes: tuple[Rope, ...]
    tied: bool
    group: int = 0
    minimum: bool = False
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    final_softcap: float | None = None

    def packing(self, name: str) -> tuple[WeightKind, int, bool]:
        """Kind, group and minimum of a matrix. The ends of an int4 model are int8.

        Files quantised to 4 bits keep them finer too (llama.cpp takes Q6_K or Q8_0): with both ends in int4
        SmolLM2-135M's perplexity rises by 7% rather than by 1% (dev/LOG.md).
        """
        if self.kind == "int4" and name in ("head", "embed"):
            return "int8", 0, False
        return self.kind, self.group, self.minimum

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` is the way back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "DecoderSpec":
        layers = tuple(
            BlockSpec(**{**layer, "attention": LayerSpec(**layer["attention"]), "tensors": tuple(layer["tensors"])})
            for layer in data["layers"]
        )
        ropes = tuple(Rope(**{**rope, "inv_freq": tuple(rope["inv_freq"])}) for rope in data["ropes"])
        return cls(**{**data, "layers": layers, "ropes": ropes})

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Packed matrices: name -> `(rows, columns)`."""
        shapes = {"head": (self.vocab_size, self.hidden)}
        if not self.tied:
            shapes["embed"] = (self.vocab_size, self.hidden)
        for i, layer in enumerate(self.layers):
            a = layer.attention
            inner = -(-layer.intermediate // 16) * 16
            shapes[f"layers.{i}.qkv"] = (a.heads * a.dim + a.kv_heads * (a.dim + a.v_dim), self.hidden)
            shapes[f"layers.{i}.o"] = (self.hidden, a.heads * a.v_dim)
            shapes[f"layers.{i}.gate_up"] = (2 * inner, self.hidden)
            shapes[f"layers.{i}.down"] = (self.hidden, inner)
        return shapes

    def vectors(self) -> dict[str, int]:
        """float32 vectors: name -> length."""
        sizes = {"final_norm": self.hidden}
        for i, layer in enumerate(self.layers):
            a = layer.attention
            inner = -(-layer.intermediate // 16) * 16
            lengths = {
                "attn_norm": self.hidden,
                "mlp_norm": self.hidden,
                "attn_out_norm": self.hidden,
                "mlp_out_norm": self.hidden,
                "q_norm": a.dim,
                "k_norm": a.dim,
                "qkv_bias": a.heads * a.dim + a.kv_heads * (a.dim + a.v_dim),
                "o_bias": self.hidden,
                "gate_up_bias": 2 * inner,
                "down_bias": self.hidden,
                "sinks": a.heads,
            }
            sizes |= {f"layers.{i}.{name}": lengths[name] for name in (*REQUIRED_NORMS, *layer.tensors)}
        return sizes
