"""Modules that compute the same faster, put in place of the model's own by walking its tree.

Today: linear layers whose weights are packed once, at load, for our CPU kernels or, where those are not built, oneDNN.
Left alone, MKL packs them again at every call, which for a few rows costs more than the product itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from anyrig.core.decoder import INT4, WeightKind
from anyrig.core.errors import UsageError
from anyrig.hardware import cpu
from anyrig.ops.cpu import native

PACKED_FOR = 32  # rows that oneDNN's layout is chosen for; it is used for any number of them
MOST_ROUTED = 256  # outputs of a layer that chooses experts
FEW = 0.1  # share of the weights that torch may multiply with on one thread


@dataclass(frozen=True)
class LinearChoice:
    """What stands in the place of an `nn.Linear`.

    Attributes:
        name: for people: "int8", "packed", "plain".
        make: the replacement of an inner layer; None: they stay.
        make_head: the replacement of the output layer.
        make_router: the replacement of a small layer that chooses experts; None: they stay.
        kernels: whether the CPU kernels compute them.
    """

    name: str
    make: Callable[[nn.Linear], nn.Module] | None = None
    make_head: Callable[[nn.Linear], nn.Module] | None = None
    make_router: Callable[[nn.Linear], nn.Module] | None = None
    kernels: bool = False


def choose_linear(device: str, dtype: torch.dtype, quantize: str = "none", threads: int = 1) -> LinearChoice:
    """The best there is for a device, dtype and kind of weights.

    Raises:
        UsageError: for quantised weights where our kernels can't run.
    """
    reason = "it is for CPUs" if device != "cpu" else native.why_not()
    if quantize != "none" and reason is not None:
        raise UsageError(f"`quantize` is {quantize}, which needs the CPU kernels: {reason}", "leave it at none")
    kinds: dict[torch.dtype, WeightKind] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    own = kinds.get(dtype)
    kind = own if quantize == "none" else quantize
    if reason is None and kind is not None:
        from anyrig.ops.cpu.linear import CpuLinear

        chosen: WeightKind = kind  # type: ignore[assignment]
        group, minimum = INT4 if chosen == "int4" else (0, False)
        ends: WeightKind = "int8" if chosen == "int4" else chosen
        return LinearChoice(
            f"{chosen} (CPU kernels)",
            lambda linear: CpuLinear(linear, chosen, group, minimum, threads),
            lambda linear: CpuLinear(linear, ends, 0, False, threads),
            None if own is None else lambda linear: CpuLinear(linear, own, 0, False, threads),
            kernels=True,
        )
    if why_not_packed(device, dtype) is None:
        return LinearChoice("packed", PackedLinear, PackedLinear, PackedLinear)
    return LinearChoice("plain")


class PackedLinear(nn.Module):
    """`nn.Linear` with its weight in oneDNN's own layout (`[out, in]`, opaque).

    `weight` stays there as a tensor without memory, for code that asks for its dtype or shape.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACKED_FOR)
        self.register_buffer("weight", linear.weight.detach().to("meta"), persistent=False)

    @property
    def packed_bytes(self) -> int:
        return int(self.packed.numel() * self.packed.element_size())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


def why_not_packed(device: str, dtype: torch.dtype) -> str | None:
    """Why linear layers can't be packed here, or None when they can."""
    if device != "cpu":
        return "not on a CPU"
    if dtype == torch.bfloat16 and not cpu.read().native_bf16:
        return "no bfloat16 instructions"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"{dtype} is not packed"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "torch was built without oneDNN"
    try:
        with torch.inference_mode():
            PackedLinear(nn.Linear(16, 16, dtype=dtype))(torch.zeros(4, 16, dtype=dtype))
    except (RuntimeError, AttributeError) as error:  # a processor that oneDNN lacks code for; a torch without the op
        return f"oneDNN refuses: {str(error).splitlines()[0]}"
    return None


def linear_shapes(model: nn.Module) -> list[tuple[int, int]]:
    """`[out, in]` of the model's plain linear layers, each shape once."""
    return sorted({(m.out_features, m.in_features) for m in model.modules() if type(m) is nn.Linear})


def pack_linear(model: nn.Module, choice: LinearChoice) -> list[tuple[int, int]]:
    """Replace every plain `nn.Linear` of the model, one after the other, so that little is held twice.

    Layers that choose experts keep the model's dtype: they are small, and another choice is another function.

    Returns:
        their `[out, in]` shapes, each once.
    """
    shapes = linear_shapes(model)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if choice.make is None or choice.make_head is None:
        return shapes
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            make: Callable[[nn.Linear], nn.Module] | None = choice.make
            if child is head:
                make = choice.make_head
            elif _routes(f"{path}.{name}", child):
                make = choice.make_router
            if make is not None:
                setattr(parent, name, make(child))
    return shapes


def _routes(path: str, linear: nn.Linear) -> bool:
    """Whether a layer chooses experts, by its size and its own name or that of the module it is in."""
    parent, name = path.split(".")[-2:]
    named = "router" in parent or "router" in name or ("gate" in name and not name.endswith("_proj"))
    return linear.out_features <= MOST_ROUTED and named


def weight_bytes(model: nn.Module) -> int:
    """Bytes that the weights take, packed or not. A table that is also the output layer, packed, counts as that one."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    table = getattr(model, "get_input_embeddings", lambda: None)()
    tied = hasattr(head, "packed_bytes") and getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    skip = table.weight if tied and table is not None else None
    return _packed_bytes(model) + sum(p.nbytes for p in model.parameters() if p is not skip)


def left_to_torch(model: nn.Module) -> float:
    """Share of the weights that torch multiplies with: fused experts and what else is no `nn.Linear`; 0 to 1."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    left = sum(p.nbytes for p in model.parameters() if p.dim() > 1 and id(p) not in tables)
    return left / max(1, left + _packed_bytes(model))


def _packed_bytes(model: nn.Module) -> int:
    return sum(getattr(m, "packed_bytes", 0) for m in model.modules())
