"""Transformers' module -> `DecoderSpec` and the tensors it speaks of, or a reason why there is no such description.

Roles are found by name where a name is needed (which projection is which), and everything is then held against one
watched forward (`trace.py`): what a norm multiplies with, which activation, which rope on which layer, what is added to
the residual stream, what happens to the logits. `check` compares the finished decoder with the module's own logits.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from anyrig.core.decoder import DecoderSpec, WeightKind
from anyrig.core.errors import Unsupported
from anyrig.models.block import BlockReader, Source
from anyrig.models.compare import factor, is_norm, near, rows, same
from anyrig.models.probe import VERIFY_TOKENS, check_config
from anyrig.models.rope import freeze_rope
from anyrig.models.rows import Rows
from anyrig.models.trace import Trace, attention_of

# Relative error (root of mean square) of centred logits that is arithmetic rather than another model. Against bfloat16
# modules, float32 arithmetic on the same weights is off by 0.04 (smollm2-135m, gemma3-270m), int8 weights by 0.08 and
# 0.14, int4 ones in groups of 32 with a minimum by 0.22 and 0.64: tokens drawn at random are far from any text.
TOLERANCE: dict[WeightKind, float] = {"float32": 1e-3, "bfloat16": 0.1, "int8": 0.3, "int4": 0.9}


@dataclass(frozen=True)
class Description:
    """A decoder that is wholly understood, and where its tensors come from.

    Attributes:
        spec: what is computed.
        sources: name -> rows of a matrix, or a float32 vector; views of the module's weights where possible.
    """

    spec: DecoderSpec
    sources: dict[str, Source]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | np.ndarray[Any, np.dtype[np.float32]]]]:
        """All tensors, layer by layer: `(name, piece)`, the pieces of a matrix one after the other (`Rows.pieces`).

        A vector is one float32 numpy array.
        """
        for name, source in self.sources.items():
            if isinstance(source, Rows):
                for piece in source.pieces():
                    yield name, piece
            else:
                yield name, source.cpu().numpy()


@torch.inference_mode()
def describe(
    model: nn.Module,
    name: str,
    max_model_len: int,
    *,
    kind: WeightKind,
    group: int = 0,
    minimum: bool = False,
) -> Description:
    """Describe a causal language model of Transformers whose linear layers are still plain.

    Args:
        model: its rope is frozen for `max_model_len` (`freeze_rope`); nothing else of it is changed.
        name: for messages.
        kind, group, minimum: how its matrices are going to be packed.

    Raises:
        Unsupported: naming the layer and the thing that the one loop of `core/decoder.py` does not have.
    """
    freeze_rope(model, max_model_len)
    trace = Trace(model, name, max_model_len)
    check_config(model.config, trace.specs, name)
    return _read(model, trace, kind, group, minimum)


@torch.inference_mode()
def check(spec: DecoderSpec, model: nn.Module, run: Callable[[list[int]], Any], tokens: int = VERIFY_TOKENS) -> float:
    """Compare a decoder made from a description with the module itself, on its own plain attention.

    Args:
        run: token ids of one sequence -> causal logits `[tokens, vocab]` (array or tensor).

    Returns:
        relative error of the centred logits.

    Raises:
        Unsupported: when they differ by more than arithmetic explains.
    """
    vocab = spec.vocab_size
    ids = torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(0))
    device, expected_dtype = next(model.parameters()).device, next(model.parameters()).dtype
    with attention_of(model, "eager"):
        out: Any = model(input_ids=ids[None].to(device), use_cache=False)
    expected = out.logits[0].float().cpu()
    got = torch.as_tensor(run(ids.tolist())).float().cpu()
    expected, got = (x - x.mean(-1, keepdim=True) for x in (expected, got))
    error = float((got - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    tolerance = TOLERANCE[spec.kind]
    if expected_dtype == torch.bfloat16:
        tolerance = max(tolerance, TOLERANCE["bfloat16"])
    cosine, row = functional.cosine_similarity(got, expected, dim=-1).min(0)
    if not error <= tolerance:
        raise Unsupported(f"its logits in {spec.kind} differ from the module's by {error:.1e} (at most {tolerance})")
    # One row can be worse than the mean of all (whose cosine is 1 - error^2 / 2), but not point elsewhere.
    if not float(cosine) >= max(1 - 2 * tolerance**2, 0.2):
        raise Unsupported(f"its logits of token {int(row)} in {spec.kind} have a cosine of {float(cosine):.4f}")
    return error


def _read(model: Any, trace: Trace, kind: WeightKind, group: int, minimum: bool) -> Description:
    reader = BlockReader(model, trace)
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    blocks = [model.get_submodule(s.name.rpartition(".")[0]) for s in trace.specs]
    if len({id(b) for b in blocks}) < len(blocks):
        raise reader.no(trace.specs[0].name, "shares its block with another attention")
    stream = rows(trace.call(blocks[0]).input)
    hidden = stream.shape[1]
    if not isinstance(embed, nn.Embedding) or embed.weight.shape[1] != hidden:
        raise reader.no("the embedding", f"is not [vocabulary, {hidden}]")
    scales = [1.0, math.sqrt(hidden), *reader.numbers("multiplier", "scale")]
    scales += [float(b) for b in embed.buffers() if b.numel() == 1]
    scales += [float(torch.tensor(s, dtype=stream.dtype)) for s in scales]  # Gemma rounds it
    scale = factor(stream, embed.weight[trace.ids], torch.zeros_like(stream), scales)
    if scale is None:
        raise reader.no("the first layer", "is given more than scaled embeddings")
    layers = []
    sources: dict[str, Source] = {}
    for i, (attention, block) in enumerate(zip(trace.specs, blocks, strict=True)):
        if not same(rows(trace.call(block).input), stream):
            raise reader.no(attention.name.rpartition(".")[0], "is not given what the layer before it returned")
        layer, found = reader.read(attention, block, trace.attention[i])
        layers.append(layer)
        sources |= {f"layers.{i}.{name}": source for name, source in found.items()}
        stream = rows(trace.call(block).output)
    inside = {id(m) for block in blocks for m in block.modules()}
    outer = {n: m for n, m in model.named_modules() if id(m) not in inside and is_norm(m)}
    final = reader.made(outer, trace.head)
    if final is None or not same(rows(trace.call(outer[final]).input), stream):
        raise reader.no("the output layer", "is given something else than the norm of the last layer")
    sources["final_norm"] = reader.norm(outer[final], final)
    tied = head.weight.data_ptr() == embed.weight.data_ptr()
    if head.weight.shape != embed.weight.shape:
        raise reader.no("the output layer", f"has {head.weight.shape[0]} rows, the embedding {embed.weight.shape[0]}")
    if not tied:
        sources["embed"] = Rows((embed.weight,), hidden)
    sources["head"] = Rows((head.weight,), hidden)
    reader.claim(embed, head)
    if left := [n for n, p in model.named_parameters() if id(p) not in reader.claimed]:
        raise reader.no(left[0], "has no place in the description" + f" (nor {len(left) - 1} more)" * (len(left) > 1))
    if len(reader.eps) > 1:
        raise reader.no("its norms", f"have several epsilons: {sorted(reader.eps)}")
    logit_scale, softcap = _logits(reader, trace)
    spec = DecoderSpec(
        vocab_size=head.weight.shape[0],
        hidden=hidden,
        eps=reader.eps.pop(),
        kind=kind,
        layers=tuple(layers),
        ropes=tuple(reader.used),
        tied=tied,
        group=group,
        minimum=minimum,
        embed_scale=scale,
        logit_scale=logit_scale,
        final_softcap=softcap,
    )
    _agree(reader, spec, sources)
    return Description(spec, sources)


def _logits(reader: BlockReader, trace: Trace) -> tuple[float, float | None]:
    """Scale and softcap between the output layer's product and the logits."""
    x, out = trace.stand_in.float(), trace.logits
    factors = reader.numbers("multiplier", "scal")
    for scale in (1.0, *factors, *(1 / f for f in factors if f)):
        for cap in (None, *reader.numbers("softcap")):
            if near(out, x * scale if cap is None else cap * torch.tanh(x * scale / cap)):
                return scale, cap
    raise reader.no("the output layer", "is followed by more than a scale and a softcap")


def _agree(reader: BlockReader, spec: DecoderSpec, sources: dict[str, Source]) -> None:
    """Shapes as the description says."""
    shapes: dict[str, Any] = {n: (s.count, s.columns) for n, s in sources.items() if isinstance(s, Rows)}
    lengths = {n: len(s) for n, s in sources.items() if isinstance(s, torch.Tensor)}
    for expected, found in ((spec.matrices(), shapes), (spec.vectors(), lengths)):
        for name in expected.keys() | found.keys():
            if expected.get(name) != found.get(name):
                raise reader.no(name, f"is {found.get(name)} rather than {expected.get(name)}")
