"""One layer of a Transformers decoder -> `BlockSpec` and the source of its tensors, held against a watched forward."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anyrig.core.decoder import MATRICES, REQUIRED_NORMS, Activation, BlockSpec, Rope
from anyrig.core.errors import Unsupported
from anyrig.core.spec import LayerSpec
from anyrig.models.compare import factor, is_norm, near, ropes, rows, same, turn
from anyrig.models.rows import BLOCK, Rows
from anyrig.models.trace import Attention, Trace

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj"}

Source = Rows | torch.Tensor


class BlockReader:
    """Reads the layers of a module beside the trace of its forward.

    Attributes:
        used: the ropes that layers were found to use.
        eps: the epsilons of the norms.
        claimed: ids of the parameters that have found their place.
    """

    def __init__(self, model: Any, trace: Trace) -> None:
        self.model, self.trace = model, trace
        self.config = model.config.get_text_config().to_dict()
        self.ropes = list(ropes(model))
        self.used: list[Rope] = []
        self.eps: set[float] = set()
        self.claimed: set[int] = set()

    def read(self, spec: LayerSpec, block: nn.Module, attention: Attention) -> tuple[BlockSpec, dict[str, Source]]:
        """One layer.

        Raises:
            Unsupported: naming the layer and what it does that the description has no word for.
        """
        trace, where = self.trace, spec.name.rpartition(".")[0]
        module = self.model.get_submodule(spec.name)
        linears, norms = self.parts(where, block, module)
        if spec.kv_source != spec.index:
            raise self.no(spec.name, f"reads the keys and values of layer {spec.kv_source}")
        if getattr(module, "is_causal", True) is False:
            raise self.no(spec.name, "sees tokens after its own")
        stream = rows(trace.call(block).input)
        sources: dict[str, Source] = {}

        # Attention: norm, projections, norms per head, rope, output.
        fused = "qkv_proj" in linears
        first = linears.get("qkv_proj" if fused else "q_proj")
        if first is None or "o_proj" not in linears:
            raise self.no(spec.name, f"has {', '.join(linears)} rather than q_proj, k_proj, v_proj and o_proj")
        before = self.made(norms, rows(trace.call(first).input))
        if before is None or not same(rows(trace.call(norms[before]).input), stream):
            raise self.no(spec.name, "is not given the norm of what the layer is given")
        sources["attn_norm"] = self.norm(norms.pop(before), f"{where}.{before}")
        names = ["qkv_proj"] if fused else ["q_proj", "k_proj", "v_proj"]
        q, k, v = self.project(spec, [linears.get(n) for n in names], rows(trace.call(first).input))
        q, k = self.head_norm("q_norm", q, norms, where, sources), self.head_norm("k_norm", k, norms, where, sources)
        if not same(v, attention.value):
            raise self.no(spec.name, "changes its values between projection and attention")
        rope = self.rope(spec, (q, attention.query), (k, attention.key))
        self.linear(sources, "qkv", [linears.pop(n) for n in names], first.in_features)
        if spec.sinks:
            if attention.sinks is None or attention.sinks.data_ptr() != getattr(module, "sinks", stream).data_ptr():
                raise self.no(spec.name, "computes its sinks")
            sources["sinks"] = module.sinks.detach().float()
        output = linears.pop("o_proj")
        if not same(rows(trace.call(output).input), attention.output):
            raise self.no(spec.name, "changes the result of attention before o_proj")
        self.linear(sources, "o", [output], output.in_features)
        added = self.out_norm("attn_out_norm", rows(trace.call(output).output), norms, where, sources)

        # The gated MLP.
        fused = "gate_up_proj" in linears
        names = ["gate_up_proj"] if fused else ["gate_proj", "up_proj"]
        if any(n not in linears for n in (*names, "down_proj")):
            raise self.no(where, f"has {', '.join(linears) or 'nothing'} rather than gate_proj, up_proj and down_proj")
        first, down = linears[names[0]], linears.pop("down_proj")
        before = self.made(norms, rows(trace.call(first).input))
        if before is None:
            raise self.no(where, "has no norm before its MLP")
        middle = rows(trace.call(norms[before]).input)
        sources["mlp_norm"] = self.norm(norms.pop(before), f"{where}.{before}")
        activation = self.activation(where, block)
        made = [rows(trace.call(linears[n]).output) for n in names]
        gate, up = made[0].chunk(2, -1) if fused else made
        if not near(rows(trace.call(down).input), ACTIVATIONS[activation](gate.float()) * up.float()):
            raise self.no(where, f"does not give down_proj {activation}(gate) * up")
        self.linear(sources, "gate_up", [linears.pop(n) for n in names], first.in_features, halves=fused)
        self.linear(sources, "down", [down], -(-down.in_features // BLOCK) * BLOCK)
        result = self.out_norm("mlp_out_norm", rows(trace.call(down).output), norms, where, sources)

        if left := [*linears, *norms]:
            raise self.no(where, f"has {', '.join(left)}, which has no place in the description")
        factors = [1.0, *self.numbers("multiplier", "scale")]
        multiplier = factor(middle, added, stream, factors)
        if multiplier is None:
            raise self.no(where, "adds something else than its attention to the residual stream, or does so elsewhere")
        if factor(rows(trace.call(block).output), result, middle, [multiplier], fit=False) is None:
            raise self.no(where, "adds its MLP to the residual stream in another way than its attention")
        optional = tuple(n for n in sources if n not in (*MATRICES, *REQUIRED_NORMS))
        return BlockSpec(spec, rope, down.in_features, activation, optional, multiplier), sources

    def parts(
        self, where: str, block: nn.Module, attention: nn.Module
    ) -> tuple[dict[str, nn.Linear], dict[str, nn.Module]]:
        """Everything with parameters in a block: linear layers by their last name, norms by path.

        Raises:
            Unsupported: for anything else.
        """
        linears: dict[str, nn.Linear] = {}
        norms: dict[str, nn.Module] = {}
        for path, module in block.named_modules():
            own = [n for n, p in module.named_parameters(recurse=False)]
            last = path.rpartition(".")[2]
            if type(module) is nn.Linear and last in PROJECTIONS and last not in linears:
                linears[last] = module
            elif is_norm(module):
                norms[path] = module
            elif module is attention and own == ["sinks"]:
                self.claimed.add(id(module.sinks))
            elif own or "Linear" in type(module).__name__:
                raise self.no(f"{where}.{path}", f"({type(module).__name__}) is not a part of a dense gated block")
        self.claim(*linears.values())
        return linears, norms

    def project(
        self, spec: LayerSpec, linears: Sequence[nn.Linear | None], x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the projections made of `x`: `[heads, tokens, dim]` for q, k and v."""
        widths = [spec.heads * spec.dim, spec.kv_heads * spec.dim, spec.kv_heads * spec.v_dim]
        outs = []
        for linear in linears:
            if linear is None or not same(rows(self.trace.call(linear).input), x):
                raise self.no(spec.name, "does not project q, k and v from one input")
            outs.append(rows(self.trace.call(linear).output))
        out = torch.cat(outs, -1)
        if out.shape[1] != sum(widths):
            raise self.no(spec.name, f"projects to {out.shape[1]} rather than {sum(widths)} numbers")
        q, k, v = torch.split(out, widths, -1)
        n = out.shape[0]
        heads = [spec.heads, spec.kv_heads, spec.kv_heads]
        q, k, v = (t.reshape(n, h, -1).transpose(0, 1) for t, h in zip((q, k, v), heads, strict=True))
        return q, k, v

    def head_norm(
        self, role: str, x: torch.Tensor, norms: dict[str, nn.Module], where: str, sources: dict[str, Source]
    ) -> torch.Tensor:
        """`x` `[heads, tokens, dim]` after the norm of this role, if there is one."""
        path = next((p for p in norms if p.rpartition(".")[2] == role), None)
        if path is None:
            return x
        module = norms.pop(path)
        call = self.trace.call(module)
        if call.input.dim() == 4:
            given, made = call.input[0], call.output[0]
            for a, b in ((given, made), (given.transpose(0, 1), made.transpose(0, 1))):
                if same(a, x):
                    sources[role] = self.norm(module, f"{where}.{path}")
                    return b
        raise self.no(f"{where}.{path}", "is not one norm per head between projection and rope")

    def rope(self, spec: LayerSpec, *pairs: tuple[torch.Tensor, torch.Tensor]) -> int | None:
        """Which rope turns the first of each pair into the second (index in `self.used`); None when they are equal."""
        if all(same(before, after) for before, after in pairs):
            return None
        best, least = None, math.inf
        for rope in self.ropes:
            for candidate in (rope, Rope(rope.inv_freq, rope.scaling, interleaved=True)):
                turned = [turn(before, self.trace.positions, candidate) for before, _ in pairs]
                if not all(near(after, t) for t, (_, after) in zip(turned, pairs, strict=True)):
                    continue
                error = max(float((after - t).abs().max()) for t, (_, after) in zip(turned, pairs, strict=True))
                if error < least:
                    best, least = candidate, error
        if best is None:
            raise self.no(spec.name, "changes q and k in another way than by one of the model's rotary embeddings")
        if best not in self.used:
            self.used.append(best)
        return self.used.index(best)

    def out_norm(
        self, role: str, x: torch.Tensor, norms: dict[str, nn.Module], where: str, sources: dict[str, Source]
    ) -> torch.Tensor:
        """`x` after the norm that it is given to, if there is one."""
        for path, module in norms.items():
            call = self.trace.call(module)
            if same(rows(call.input), x):
                sources[role] = self.norm(norms.pop(path), f"{where}.{path}")
                return rows(call.output)
        return x

    def made(self, norms: dict[str, nn.Module], x: torch.Tensor) -> str | None:
        """The norm that returned `x`."""
        return next((path for path, m in norms.items() if same(rows(self.trace.call(m).output), x)), None)

    def norm(self, module: Any, path: str) -> torch.Tensor:
        """What an RMSNorm multiplies with, in float32, by letting it do so."""
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        eps = torch.finfo(torch.float32).eps if eps is None else float(eps)
        weight: torch.Tensor = module.weight.detach().float()
        # Small numbers, so that the epsilon counts.
        x = torch.randn(8, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.device) * math.sqrt(eps)
        out = copy.deepcopy(module).float()(x)
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        self.claim(module)
        self.eps.add(eps)
        for candidate in (weight, 1 + weight):
            if near(out, normed * candidate):
                return candidate
        raise self.no(path, f"({type(module).__name__}) is not an RMSNorm")

    def activation(self, where: str, block: nn.Module) -> Activation:
        """The function of the gate, found by trying it."""
        found = [f for m in block.modules() for n in ("act_fn", "activation_fn") if callable(f := getattr(m, n, None))]
        if len(found) != 1:
            raise self.no(where, f"has {len(found)} activations")
        x = torch.linspace(-9, 9, 361)
        out = found[0](x)
        for name, function in ACTIVATIONS.items():
            if near(out, function(x)):
                return name
        raise self.no(where, f"has another activation than {', '.join(ACTIVATIONS)}: {type(found[0]).__name__}")

    def linear(
        self, sources: dict[str, Source], name: str, linears: list[nn.Linear], columns: int, halves: bool = False
    ) -> None:
        """One matrix (and bias, if any has one) of several layers; `halves`: of the halves of one."""
        weights = [w for m in linears for w in (m.weight.chunk(2) if halves else [m.weight])]
        paired = name == "gate_up"
        sources[name] = Rows(tuple(weights), columns, interleaved=paired)
        if all(m.bias is None for m in linears):
            return
        biases = [m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in linears]
        columns_of = tuple(b[:, None].float() for m in biases for b in (m.chunk(2) if halves else [m]))
        sources[f"{name}_bias"] = torch.cat(list(Rows(columns_of, 1, interleaved=paired).pieces()))[:, 0].contiguous()

    def numbers(self, *words: str) -> list[float]:
        """Values in the configuration whose name has one of the words in it."""
        return [
            float(x)
            for key, x in self.config.items()
            if isinstance(x, (int, float)) and not isinstance(x, bool) and x and any(word in key for word in words)
        ]

    def claim(self, *modules: nn.Module) -> None:
        self.claimed |= {id(p) for m in modules for p in m.parameters(recurse=False)}

    def no(self, where: str, what: str) -> Unsupported:
        return Unsupported(f"{self.trace.model_name}: {where} {what}")
