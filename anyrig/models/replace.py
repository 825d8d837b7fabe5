"""Modules that compute the same faster, put in place of the model's own by walking its tree.

Today: linear layers whose weights oneDNN has packed once, at load. Left alone, MKL packs them again at every call,
which for a few rows costs more than the product itself.
"""

import torch
from torch import nn

from anyrig.hardware import cpu

PACKED_FOR = 32  # rows that the packed layout is chosen for; it is used for any number of them


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


def pack_linear(model: nn.Module) -> list[tuple[int, int]]:
    """Pack every plain `nn.Linear` of the model, one after the other, so that little is held twice.

    Returns:
        their `[out, in]` shapes, each once.
    """
    shapes = linear_shapes(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
    return shapes
