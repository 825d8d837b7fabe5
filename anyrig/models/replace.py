"""Modules that compute the same faster, put in place of the model's own by walking its tree.

Today: linear layers whose weights are packed once, at load, for our CPU kernels or, where those aren't built, by oneDNN.
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


@dataclass(frozen=True)
class LinearChoice:
    """What stands in the place of an `nn.Linear`.

    Attributes:
        name: for people: "int8", "packed", "plain".
        make: the replacement of an inner layer; None: they stay.
        make_head: the replacement of the output layer.
    """

    name: str
    make: Callable[[nn.Linear], nn.Module] | None = None
    make_head: Callable[[nn.Linear], nn.Module] | None = None


def choose_linear(device: str, dtype: torch.dtype, quantize: str = "none", threads: int = 1) -> LinearChoice:
    """The best there is for a device, dtype and kind of weights.

    Raises:
        UsageError: for quantised weights where our kernels can't run.
    """
    reason = "it is for CPUs" if device != "cpu" else native.why_not()
    if quantize != "none" and reason is not None:
        raise UsageError(f"`quantize` is {quantize}, which needs the CPU kernels: {reason}", "leave it at none")
    kinds: dict[torch.dtype, WeightKind] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    kind = kinds.get(dtype) if quantize == "none" else quantize
    if reason is None and kind is not None:
        from anyrig.ops.cpu.linear import CpuLinear

        chosen: WeightKind = kind  # type: ignore[assignment]
        group, minimum = INT4 if chosen == "int4" else (0, False)
        ends: WeightKind = "int8" if chosen == "int4" else chosen
        return LinearChoice(
            f"{chosen} (CPU kernels)",
            lambda linear: CpuLinear(linear, chosen, group, minimum, threads),
            lambda linear: CpuLinear(linear, ends, 0, False, threads),
        )
    if why_not_packed(device, dtype) is None:
        return LinearChoice("packed", PackedLinear, PackedLinear)
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

    Returns:
        their `[out, in]` shapes, each once.
    """
    shapes = linear_shapes(model)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if choice.make is None or choice.make_head is None:
        return shapes
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, choice.make_head(child) if child is head else choice.make(child))
    return shapes
